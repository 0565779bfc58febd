"""Makes examples/group.ipynb, an executed notebook: `python -m examples.make_notebook [FILE]`.

It needs no Jupyter: the cells run here, against a proxy of their own, and each shows what a notebook would show.
"""

import ast
import io
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).with_name("group.ipynb")
CELLS = (
    """# A group of rollouts
A proxy for this notebook, with sandboxes of this machine. `Client()` would talk to a running one.""",
    """
import forkpoint
from forkpoint import to_dataframe

proxy = forkpoint.local(drivers=["local"])
client = proxy.__enter__()
task = client.task("fix")
task.put({"files": {"/root/add.py": "def add(a, b): return a - b\\n"}, "workdir": "/root"})
TEST = "python3 -B -c 'from add import add; assert add(2, 3) == 5'"
AGENTS = {
    "plus": ["cat add.py", "sed -i 's/a - b/a + b/' add.py", TEST],
    "five": ["cat add.py", "echo 'def add(a, b): return 5' > add.py", TEST],
    "gives up": ["cat add.py", TEST],
}
for step in range(2):
    for name, commands in AGENTS.items():
        with task.rollout(f"{name.replace(' ', '-')}-{step}", labels={"run": "r1", "step": step}) as rollout:
            codes = [rollout.exec(command).exit_code for command in commands]
            rollout.label(reward=1.0 if codes[-1] == 0 else 0.0)
""",
    "What the rollouts did, as a tree. The second step ran nothing: all of its calls were hits.",
    "task.tree()",
    'client.report(by="step")',
    'to_dataframe(client.report(by="step"))[["group", "calls", "hits", "hit_rate", "reward"]]',
    "Rollouts as a data frame: labels keep their types.",
    'frame = to_dataframe(task.rollouts())\nframe[["rollout", "calls", "label_step", "label_reward"]]',
    "What only winners did, and nobody else:",
    '[each["call"] for each in task.compare()["winning_calls"]]',
    "What the mend changed:",
    'mended = next(node for node in task.tree().nodes if "a + b" in node.title)\ntask.diff(mended.parent, mended.id)',
    "task.node(mended.id)",
    "Training data, with the same labels:",
    'to_dataframe(client.trajectories("fix"))[["rollout", "reward", "label_step", "total_hits", "total_saved_s"]]',
    "ended = proxy.__exit__(None, None, None)",
)
"""The cells in their order. One that is no Python is text."""


def made() -> dict[str, Any]:
    """Run the cells, and return the notebook (nbformat 4.5)."""
    names: dict[str, Any] = {}
    cells = [_cell(number, source.strip(), names) for number, source in enumerate(CELLS)]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def _cell(number: int, source: str, names: dict[str, Any]) -> dict[str, Any]:
    cell: dict[str, Any] = {"id": f"cell-{number}", "metadata": {}, "source": source.splitlines(keepends=True)}
    try:
        parsed = ast.parse(source)
    except SyntaxError:
        return {**cell, "cell_type": "markdown"}
    return {**cell, "cell_type": "code", "execution_count": number, "outputs": _outputs(parsed, names, number)}


def _outputs(parsed: ast.Module, names: dict[str, Any], number: int) -> list[dict[str, Any]]:
    """Run a cell. Return what it printed, and its last expression as text and as HTML."""
    last = parsed.body.pop() if parsed.body and isinstance(parsed.body[-1], ast.Expr) else None
    printed, outputs = io.StringIO(), list[dict[str, Any]]()
    with redirect_stdout(printed):
        exec(compile(parsed, "cell", "exec"), names)  # noqa: S102 - the cells above
        value = None if last is None else eval(compile(ast.Expression(last.value), "cell", "eval"), names)  # noqa: S307
    if printed.getvalue():
        outputs.append(
            {"output_type": "stream", "name": "stdout", "text": printed.getvalue().splitlines(keepends=True)}
        )
    if value is not None:
        html = value._repr_html_() if hasattr(value, "_repr_html_") else None
        data = {"text/plain": str(value).splitlines(keepends=True)}
        data |= {} if html is None else {"text/html": html.splitlines(keepends=True)}
        outputs.append({"output_type": "execute_result", "execution_count": number, "metadata": {}, "data": data})
    return outputs


if __name__ == "__main__":
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else NOTEBOOK
    file.write_text(json.dumps(made(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
