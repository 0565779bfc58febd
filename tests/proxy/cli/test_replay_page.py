"""Rollouts and trees as one HTML file: what rollouts did, and nothing that an agent's output could do."""

import json
from base64 import b64encode
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from proxy.cli.main import app
from proxy.cli.rendering.replay_page import rollout_page, tree_page
from tests.proxy.serving import Running, serving

ATTACK = '</pre></code><script>window.hacked=1</script><img src=x onerror="window.hacked=2"><style>*{}</style>'
CONTROLS = "\x1b]0;title\x07 safe \u202egnp.exe \x00 \u2028"


def line(rollout: str, calls: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """Return a trajectory; each call has `command`, `node` and perhaps other members."""
    messages, views = [], []
    for turn, call in enumerate(calls):
        function = {"name": "shell_exec", "arguments": json.dumps({"command": call["command"]})}
        content = call.get("content", json.dumps({"stdout": call.get("stdout", ""), "stderr": "", "exit_code": 0}))
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [{"id": f"call_{turn}", "function": function}]},
            {"role": "tool", "tool_call_id": f"call_{turn}", "content": content},
        ]
        views.append({
            "turn": turn, "id": f"call_{turn}", "outcome": "miss", "record": call.get("record", turn),
            "endpoint": "shell", "tool": "exec", "status": 200, "encoding": call.get("encoding", "utf-8"),
            "media_type": call.get("media_type", "application/json"), "truncated": False,
            "exit_code": call.get("exit_code", 0), "effect": ["files"], "node": call["node"], "tool_s": 0.5,
        })  # fmt: skip
    totals = {"calls": len(calls), "hits": 0, "waits": 0, "executed_s": 1.0, "saved_s": 0.0, "replayed_s": 0.0}
    return {
        "task": "t", "rollout": rollout, "labels": {}, "reward": None, "complete": True, "start": "n1",
        "node": calls[-1]["node"], "messages": messages, "calls": views, "totals": totals, **more,
    }  # fmt: skip


def hostile() -> dict[str, Any]:
    """Return a rollout whose every text is an attack."""
    picture = b64encode(ATTACK.encode()).decode()
    return line(
        ATTACK,
        [
            {"command": ATTACK, "stdout": ATTACK + CONTROLS, "node": "n2"},
            {"command": CONTROLS, "content": ATTACK, "media_type": ATTACK, "node": "n3"},
            {"command": "deep", "content": "[" * 100_000, "node": "n3"},
            {"command": "surrogate", "content": '{"a": "\\ud800"}', "node": "n3"},
            {
                "command": "svg", "content": picture, "encoding": "base64", "media_type": "image/svg+xml", "node": "n3",
            },
            {"command": "png", "content": picture, "encoding": "base64", "media_type": "image/png", "node": "n3"},
        ],
        task=ATTACK,
        labels={"run": ATTACK},
    )  # fmt: skip


class Reader(HTMLParser):
    """Collects the elements, the attributes and the visible text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[tuple[str, str]] = set()
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {(name, value or "") for name, value in attrs}

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.mark.parametrize("kind", ["rollout", "tree"])
def test_hostile_output_is_text(kind: str) -> None:
    page = "".join(rollout_page(hostile()) if kind == "rollout" else tree_page(ATTACK, [hostile()], limit=9))
    read = Reader(page)
    assert not read.tags & {"script", "iframe", "a", "form", "object", "link", "base"}
    assert not [name for name, _ in read.attributes if name.startswith("on") or name in ("href", "style")]
    assert {value.partition(",")[0] for name, value in read.attributes if name == "src"} == {"data:image/png;base64"}
    assert page.count("<style>") == 1
    text = "".join(read.texts)
    assert "<script>window.hacked=1</script>" in text
    assert "\\u202egnp.exe \\x00" in text
    assert not set("\x00\x07\x1b\u202e\u2028\ud800") & set(page)


def test_policy_allows_the_own_style_alone() -> None:
    values = [value for name, value in Reader("".join(rollout_page(hostile()))).attributes if name == "content"]
    (policy,) = (value for value in values if "-src" in value)
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


def test_tree_shows_each_call_once_and_indents_branches() -> None:
    shared = [
        {"command": "make", "node": "n2", "record": 1},
        {"command": "cat log", "node": "n2", "record": 2, "stdout": "said"},
    ]
    labels = {"labels": {"reward": 0.5}}
    one = line("one", [*shared, {"command": "left", "node": "n3", "record": 3}], **labels)
    two = line("two", [*shared, {"command": "right", "node": "n4", "record": 4, "exit_code": 7}])
    page = "".join(tree_page("t", [one, two], limit=100))
    assert [page.count(f"<code>{name}</code>") for name in ("make", "cat log", "left", "right")] == [1, 1, 1, 1]
    assert page.count('<details class="d1"><summary><code>') == 2, "left and right"
    assert ("2 miss" in page, "exit 7" in page, "▸ two" in page, "reward=0.5" in page) == (True,) * 4
    few = "".join(tree_page("t", [one, two], limit=3))
    assert ("<code>right</code>" in few, "first 3 recorded calls" in few) == (False, True)


def test_long_rollouts_are_flat() -> None:
    calls = [{"command": f"step {n}", "node": f"n{n + 2}", "record": n} for n in range(2000)]
    page = "".join(tree_page("t", [line("r", calls)], limit=5000))
    assert page.count('<details class="d0">') == 2000


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("data")) as running:
        for rollout in ("1", "2"):
            running.exec(rollout, "echo one > f").raise_for_status()
            running.exec(rollout, "cat f").raise_for_status()
        yield running


def test_command_writes_pages(proxy: Running, tmp_path: Path) -> None:
    environment = {"FORKPOINT_URL": str(proxy.client.base_url)}
    tree, one = tmp_path / "tree.html", tmp_path / "one.html"
    for words in (["task", str(tree)], ["task", str(one), "--rollout", "2"]):
        result = CliRunner().invoke(app, ["html", *words], env=environment)
        assert result.exit_code == 0, result.output
    assert "1 hit, 1 miss" in tree.read_text()
    assert '<span class="o">hit</span>' in one.read_text()
    absent = CliRunner().invoke(app, ["html", "task", str(tmp_path / "x"), "--rollout", "9"], env=environment)
    assert (absent.exit_code, "has made a call" in absent.output) == (1, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.html", "tree.html"]
