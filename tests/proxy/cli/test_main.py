"""The command line, as somebody types it."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from proxy.cli.main import app
from proxy.cli.rendering.tree import render_tree
from proxy.cli.replay.report import CallId, Difference, ToolAnswer
from proxy.cli.replay.show import first_difference
from proxy.cli.text import printable, shortened
from tests.proxy.stub import stub_proxy


def node(name: str, parent: str | None, command: str | None, children: int = 0, **more: Any) -> dict[str, Any]:
    call = command and {"endpoint": "shell", "tool": "exec", "arguments": {"command": command}, "title": command}
    plain = {"effect": ["files"], "seconds": 0.25, "hits": 2, "snapshot": False, "rollouts": [], "observations": []}
    return {"id": name, "parent": parent, "call": call, "flags": [], "children": children, **plain, **more}


def drawn(*nodes: dict[str, Any], width: int = 100) -> list[str]:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(render_tree({"task": "demo", "root": "n1", "nodes": list(nodes)}))
    return capture.get().splitlines()


def typed(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(words))
    return result.exit_code, result.output


COMMANDS = ["serve", "doctor", "tree", "replay", "top", "rollout", "node", "diff", "verify", "export", "import", "gc"]


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_explains_itself(command: str) -> None:
    code, output = typed(command, "--help")
    assert code == 0
    assert "Usage" in output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("serve", "--port", "x"), "Invalid value for '--port': "),
        (("tree",), "Missing argument 'TASK'. See `"),
        (("tree", "t", "--nosuch"), "No such option: --nosuch. See `"),
        (("tre",), "No such command 'tre'. Did you mean 'tree'? See `"),
        (("restore", "/none"), "does not exist. See `"),
    ],
)
def test_unusable_command_line_is_one_sentence(words: tuple[str, ...], said: str) -> None:
    code, output = typed(*words)
    assert code == 2
    assert said in output
    assert output.count("\n") == 1
    assert output.endswith(" --help`.\n")


def test_no_command_prints_the_help() -> None:
    assert "Usage" in typed()[1]


def test_version_is_the_distributions() -> None:
    assert typed("--version") == (0, "forkpoint 0.1.0\n")


def test_tree_indents_only_at_branches() -> None:
    lines = drawn(
        node("n1", None, None, 1),
        node("n2", "n1", "make", 2),
        node("n3", "n2", "make test"),
        node("n4", "n2", "make lint"),
    )
    column = {word: line.index(word) for line in lines for word in ("n1", "n2", "n3", "n4") if word in line}
    assert column["n1"] == column["n2"] < column["n3"] == column["n4"]


def test_the_manuals_picture_is_what_is_drawn() -> None:
    """The tree in docs/cli.md, from the calls that it shows."""
    page = (Path(__file__).parents[3] / "docs" / "cli.md").read_text()
    picture = page.partition("## `forkpoint tree TASK`")[2].split("```")[1].strip("\n").splitlines()
    look = {
        "call": {"endpoint": "shell", "tool": "exec", "arguments": {}, "title": "ls -la"},
        "seconds": 0.01,
        "hits": 7,
    }
    lines = drawn(
        node("n1", None, None, 2, snapshot=True, observations=[look]),
        node("n2", "n1", "pip install -r requirements.txt", 1, seconds=12.31, hits=6, snapshot=True),
        node("n3", "n2", "pytest -q", 2, seconds=4.02, hits=5, exit_code=1, rollouts=["r1", "r2"]),
        node("n4", "n3", "sed -i s/a/b/ x.py", seconds=0.01, hits=3),
        node("n5", "n3", "git stash", seconds=0.02, hits=1),
        node("n6", "n1", "make", seconds=3.4, hits=0),
        width=90,
    )
    assert [line.rstrip() for line in lines] == picture


def test_tree_shows_effects_and_rollouts() -> None:
    *_, line, _legend = drawn(
        node("n1", None, None, 1),
        node("n2", "n1", "pytest", effect=["files", "session"], exit_code=1, snapshot=True, rollouts=["a", "b"]),
    )
    for mark in ("pytest", "files session", "0.25 s", "2 hits", "exit 1", "◆", "▸ a, b"):
        assert mark in line


def test_long_command_is_cut_before_its_marks() -> None:
    for width in (60, 100):
        line = next(line for line in drawn(node("n1", None, "x" * 500), width=width) if "n1" in line)
        assert len(line.rstrip()) <= width
        assert "…" in line
        assert line.rstrip().endswith("2 hits")


def test_long_names_of_rollouts_are_whole_below_their_call() -> None:
    long = "policy-2026-11-23-group-17-seed-3-attempt-2"
    above, *below = (line.strip("│ ") for line in drawn(node("n1", None, "make test", rollouts=[long]), width=44)[1:])
    assert "make test" in above
    assert long in "".join(line.strip() for line in below)


def test_read_only_calls_are_listed_by_hits() -> None:
    call = {"endpoint": "shell", "tool": "exec"}
    seen = [
        {"call": {**call, "arguments": {"command": f"cat {n}"}, "title": f"cat {n}"}, "seconds": 0, "hits": n}
        for n in range(5)
    ]
    lines = [line.strip(" │└├─") for line in drawn(node("n1", None, None, observations=seen))]
    assert [line.split("  ")[0] for line in lines if line.startswith("·")] == [
        "· cat 4",
        "· cat 3",
        "· cat 2",
        "· 2 more read-only calls",
    ]


def test_cut_subtree_names_its_node() -> None:
    assert any("3 more below: --node n1" in line for line in drawn(node("n1", None, None, 3)))


def test_truncated_tree_has_a_note() -> None:
    console = Console(width=100)
    with console.capture() as capture:
        console.print(render_tree({"task": "t", "root": "n1", "nodes": [node("n1", None, None)], "truncated": True}))
    assert "too large to show at once" in capture.get()


def test_trajectory_of_thousands_of_calls_is_a_list() -> None:
    nodes = [node(f"n{at}", f"n{at - 1}" if at else None, f"step {at}", 1) for at in range(2000)]
    assert len(drawn(*nodes)) == 2003


def test_tree_command_requests_only_its_subtree() -> None:
    with stub_proxy() as stub:
        stub.view = {"task": "demo", "root": "n1", "nodes": [node("n7", "n2", "ls")]}
        code, output = typed("tree", "demo", "--url", stub.url, "--node", "n7", "--depth", "2")
        assert stub.queries[0] == {"node": "n7", "depth": "2"}
    assert code == 0
    assert "n7 ls" in output


def test_error_of_proxy_is_printed_escaped() -> None:
    with stub_proxy() as stub:
        code, output = typed("tree", "nothing", "--url", stub.url)
    assert (code, output) == (1, "404 Unknown task: No task has this name.\\x1b[2J\n")


def test_unreachable_proxy_error_names_remedy() -> None:
    code, output = typed("tree", "demo", "--url", "http://127.0.0.1:1")
    assert code == 1
    assert "Start one with `forkpoint serve`" in output


def a_workload(folder: Path, *commands: str) -> str:
    calls = [{"tool": "shell", "args": {"command": command}} for command in commands]
    file = folder / "workload.jsonl"
    file.write_text("".join(json.dumps({"task": "t", "rollout": name, "calls": calls}) + "\n" for name in "ab"))
    return str(file)


def test_replay_prints_figures_and_differences(tmp_path: Path) -> None:
    with stub_proxy() as stub:
        file = a_workload(tmp_path, "ls", "random", "\x1b[31mred")
        code, output = typed("replay", file, "--url", stub.url, "--rollouts", "1", "--noise")
    assert code == 0
    assert "50.0%" in output
    assert "cached / uncached: 2 of 6 answers differ (33.33%)" in output
    assert "uncached / uncached again: 2 of 6 answers differ (33.33%)" in output
    assert "\x1b[31m" not in output


def test_replay_with_errors_fails(tmp_path: Path) -> None:
    with stub_proxy() as stub:
        code, output = typed("replay", a_workload(tmp_path, "ls", "fail"), "--url", stub.url, "--no-compare")
    assert code == 1
    assert "2 errors, cached:" in output
    assert "503 The sandbox failed: It died." in output


def test_baseline_makes_only_uncached_runs(tmp_path: Path) -> None:
    with stub_proxy() as stub:
        words = ["replay", a_workload(tmp_path, "ls"), "--url", stub.url, "--baseline", "--json"]
        result = CliRunner().invoke(app, words)
    found = json.loads(result.stdout)
    assert result.exit_code == 0
    assert list(found["runs"]) == ["uncached"]
    assert (found["runs"]["uncached"]["bypasses"], found["runs"]["uncached"]["hits"]) == (2, 0)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nothing.jsonl"], "cannot be read"),
        (["FILE", "--task", "other*"], "no rollout in these files matches"),
        (["FILE", "--baseline", "--no-compare"], "cannot be combined with"),
        (["FILE", "--url", "ftp://x"], "no proxy answers"),
    ],
)
def test_impossible_replay_is_refused_with_reason(tmp_path: Path, words: list[str], said: str) -> None:
    file = a_workload(tmp_path, "ls")
    code, output = typed("replay", *(file if word == "FILE" else word for word in words))
    assert code != 0
    assert said in " ".join(output.replace("│", " ").split())


@given(st.text())
def test_control_characters_are_escaped(text: str) -> None:
    assert printable(text).isprintable()
    assert len(shortened(text, 20)) <= 20


@given(st.text(max_size=60), st.text(max_size=60))
def test_answers_are_shown_around_first_difference(one: str, other: str) -> None:
    difference = Difference(
        CallId("t", "r", 0), "ls", ToolAnswer(f"same {one}", "", 0), ToolAnswer(f"same {other}", "", 0)
    )
    if one != other:
        left, right = first_difference(difference, 1000)
        assert left != right
        assert left.startswith("stdout ")


def test_exit_codes_are_compared_before_output() -> None:
    difference = Difference(CallId("t", "r", 0), "ls", ToolAnswer("a", "", 0), ToolAnswer("b", "", 1))
    assert first_difference(difference, 40) == ("exit_code 0", "exit_code 1")
