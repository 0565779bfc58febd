"""Tokens of a model behind video tools, with and without the cache: `python -m bench.model_tokens --out FILE`.

A group of eight rollouts loads and prepares one video, and draws four of eight questions each, with unequal odds.
The model is a local endpoint that counts its tokens by a rule of its own (`tests.model_server`). Needs ffmpeg.
"""

import argparse
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import forkpoint
from bench.machine import machine
from examples.make_clip import make
from tests.model_server import model_server

ROLLOUTS, QUESTIONS, SCENE_S = 8, 4, 1.0
ODDS = tuple(1 / rank for rank in range(1, 9))
"""Odds of the questions: the second is asked half as often as the first, and so on (Zipf)."""


def arm(clip: Path, data: Path, url: str, seed: int, **more: Any) -> tuple[int, int]:
    """Play the group behind a proxy of its own; return the tokens that its calls cost, and those that hits saved."""
    draw = random.Random(seed)  # noqa: S311 - which questions are asked
    video = {"source": {"clip.mp4": str(clip)}, "segment_s": 2.0, "model": {"base_url": url, "model": "seer"}}
    with forkpoint.local(data, drivers=["video"]) as client:
        task = client.task("look")
        task.put({"driver": "video", "video": video, **more})
        for number in range(ROLLOUTS):
            with task.rollout(f"r{number}") as rollout:
                rollout.video("load_video", name="clip.mp4")
                rollout.video("preprocess")
                for rank in draw.choices(range(len(ODDS)), ODDS, k=QUESTIONS):
                    question = f"What is seen, in {rank + 1} words?"
                    rollout.video("visual_question_answering", question=question, segment=0)
        total = client.report(by="task").total
        return total.executed_tokens, total.saved_tokens


def main() -> None:
    """Play both arms for each seed, and print and write the tokens of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    runs = []
    with tempfile.TemporaryDirectory(prefix="forkpoint-bench-", dir="/var/tmp") as name, model_server() as server:
        folder = Path(name)
        make(folder / "clip.mp4", SCENE_S)
        for seed in options.seeds:
            cached, saved = arm(folder / "clip.mp4", folder / f"cached-{seed}", server.url, seed)
            plain, _ = arm(folder / "clip.mp4", folder / f"plain-{seed}", server.url, seed, cache="never")
            runs.append({"seed": seed, "uncached": plain, "cached": cached, "saved": saved})
            print(f"seed {seed}: {plain} tokens without the cache, {cached} with it: {plain / cached:.1f}x")
    if options.out is not None:
        command = f"python -m bench.model_tokens --seeds {' '.join(map(str, options.seeds))}"
        options.out.write_text(json.dumps({"command": command, "machine": machine(), "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
