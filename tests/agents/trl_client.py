"""The tutorial's lines, with TRL, on a small random model. Prints what TRL logged, and the rewards.

argv: a directory for the model. The vocabulary has whole calls of the tool as single tokens, and the model may generate
nothing else. So a random model makes calls, and can learn which of them are rewarded.
"""

# mypy: disable-error-code="import-not-found, unused-ignore, misc, no-any-return"
# ruff: noqa: S106 - tokens of a vocabulary

import json
import sys
from pathlib import Path
from typing import Any

import torch
import trl
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl.chat_template_utils import qwen3_chat_template

COMMANDS = ["ls", "touch done", "pwd", "rm -f done", "sleep 0.2; echo built", "echo hello", "cat done", "mkdir -p src"]
PAGE = Path(__file__).parents[2] / "docs" / "agents" / "trainers.md"


def make_model(folder: str) -> list[int]:
    """Write the model and its tokenizer; return the numbers of the tokens that it may generate."""
    signs = [chr(number) for number in range(32, 127)] + ["\n", "[UNK]"]
    tokenizer = Tokenizer(WordLevel({sign: number for number, sign in enumerate(signs)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Split("", "isolated")
    calls = [
        f"<tool_call>\n{json.dumps({'name': 'bash', 'arguments': {'command': command}})}\n</tool_call>"
        for command in COMMANDS
    ]
    tokenizer.add_special_tokens([AddedToken("<|im_start|>"), AddedToken("<|im_end|>")])
    tokenizer.add_tokens([AddedToken(call, normalized=False) for call in calls])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>", chat_template=qwen3_chat_template
    )
    fast.save_pretrained(folder)
    config = Qwen3Config(
        vocab_size=len(fast), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=4096, eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return [fast.eos_token_id, *(fast.convert_tokens_to_ids(call) for call in calls)]


def main(folder: str, steps: int) -> dict[str, Any]:
    allowed = make_model(folder)
    silent = [number for number in range(max(allowed) + 1) if number not in allowed]

    class Config(trl.GRPOConfig):
        def __init__(self, **more: Any) -> None:
            more |= {"max_steps": steps, "generation_kwargs": {"suppress_tokens": silent}, "use_cpu": True}
            super().__init__(**more, logging_steps=1, output_dir=folder, save_strategy="no", learning_rate=1e-2, seed=1)

    block = PAGE.read_text().split("```python\n")[1].split("```")[0]
    lines = block.replace("Qwen/Qwen3-0.6B", folder).replace("GRPOConfig(", "Config(")
    scope: dict[str, Any] = {"Config": Config}
    logs: list[dict[str, Any]] = []
    train = trl.GRPOTrainer.train

    def kept(self: Any) -> Any:
        result = train(self)
        logs.extend(self.state.log_history)
        return result

    trl.GRPOTrainer.train = kept
    exec(lines, scope)  # noqa: S102 - what the page shows
    names = ("reward", "tools/call_frequency", "tools/failure_frequency", "loss", "grad_norm")
    rows = [{name: float(log[name]) for name in names} for log in logs if "reward" in log]
    return {"trl": trl.__version__, "torch": torch.__version__, "steps": rows}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]))))
