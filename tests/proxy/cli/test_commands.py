"""The commands that look at a running proxy and steer it, as somebody types them."""

import json
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr
from typer.testing import CliRunner

from proxy.cli.main import app
from proxy.cli.rendering.views import spark
from tests.proxy.cli.typing_commands import as_json, proxy, typed
from tests.proxy.serving import Running, serving

__all__ = ["proxy"]


def nodes(proxy: Running) -> list[str]:
    return [node["id"] for node in as_json(proxy, "tree", "demo")["nodes"]]


def test_rollout_lists_its_calls_with_bars(proxy: Running) -> None:
    text = typed(proxy, "rollout", "demo", "second")
    assert " s saved, running at n" in text
    assert "demo / second: 3 calls, 0.03 s saved" in text
    assert text.count("hit") == 3
    assert "echo one > f" in text
    assert [step["outcome"] for step in as_json(proxy, "rollout", "demo", "first")["steps"]["items"]] == ["miss"] * 3


def test_calls_of_a_rollout_are_counted_from_one(proxy: Running) -> None:
    """As on the page."""
    lines = typed(proxy, "rollout", "demo", "first").splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["1", "2", "3"]


def test_why_names_reasons_and_other_states(proxy: Running) -> None:
    for rollout in ("first", "second"):
        for command in ("echo one > f", "cat f", "X=1"):
            proxy.exec(rollout, command, task="why-demo")
    text = typed(proxy, "why", "why-demo", "first")
    assert "0 of 3 calls were hits" in text
    assert text.splitlines()[1].split() == ["call", "reason", "node", "text"]
    assert "new-call: No rollout of this task had made this call before." in text
    assert "3 of 3 calls were hits" in typed(proxy, "why", "why-demo", "second")
    assert "hit: The tree knew the answer." in typed(proxy, "why", "why-demo", "second", "1")
    proxy.exec("lost", "echo other > f", task="why-demo")
    proxy.exec("lost", "cat f", task="why-demo")
    [item] = as_json(proxy, "why", "why-demo", "lost", "2")
    nearest = item["nearest"]
    assert f"forkpoint diff why-demo {nearest['node']} {item['node']}" in typed(
        proxy, "why", "why-demo", "lost", "2"
    ).replace("\n", "")
    typed(proxy, "why", "why-demo", "second", "9", code=2)
    assert [each["turn"] for each in as_json(proxy, "why", "why-demo", "second", "cat f")] == [1]
    typed(proxy, "why", "why-demo", "second", "cat g", code=2)


def test_node_shows_call_and_snapshot_reason(proxy: Running) -> None:
    _, one, _ = nodes(proxy)
    text = typed(proxy, "node", "demo", one)
    for part in ("echo one > f", "kept", "first", "1 read-only calls", "cat f"):
        assert part in text
    assert as_json(proxy, "node", "demo", one)["id"] == one


def test_diff_shows_files_and_sessions(proxy: Running) -> None:
    _, one, two = nodes(proxy)
    text = typed(proxy, "diff", "demo", one, two)
    for part in ("~ /root/f", "+\\x1b[31mtwo", "+ 1"):
        assert part in text
    assert as_json(proxy, "diff", "demo", one, one)["same"]


def test_verify_prints_confidence_interval(proxy: Running) -> None:
    view = as_json(proxy, "verify", "demo", "--all")
    assert (view["bounds"][0]["checked"], view["findings"], view["running"]) == (3, [], None)
    assert "3" in typed(proxy, "verify", "demo", "--sample", "1", "--seed", "7")


def test_tree_is_exported_and_imported(proxy: Running, tmp_path: Path) -> None:
    file = tmp_path / "demo.tar"
    assert as_json(proxy, "export", "demo", str(file)) == {
        "task": "demo", "file": str(file), "bytes": file.stat().st_size,
    }  # fmt: skip
    assert list(tmp_path.iterdir()) == [file]
    assert as_json(proxy, "import", str(file), "copied")["records"] == 3
    # The file has no states, so a call that changes something runs here before its rollout is led behind it.
    statuses = [proxy.exec("r", call, task="copied").headers["cache-status"] for call in ("echo one > f", "cat f")]
    assert statuses == ["forkpoint; fwd=miss; stored; detail=not-kept", "forkpoint; hit"]
    with_states = tmp_path / "states.tar"
    assert proxy.client.post(f"/api/v1/tasks/demo/nodes/{nodes(proxy)[1]}/snapshot").is_success
    as_json(proxy, "export", "demo", str(with_states), "--snapshots")
    with tarfile.open(with_states) as listed:
        assert any(name.startswith("snapshot/") for name in listed.getnames())
    assert "snapshots (0 more were left out)" in typed(proxy, "import", str(with_states), "with-states")
    damaged = bytearray(file.read_bytes())
    damaged[3000] ^= 1
    file.write_bytes(damaged)
    result = CliRunner().invoke(app, ["import", str(file), "again"], env={"FORKPOINT_URL": str(proxy.client.base_url)})
    assert result.exit_code == 1
    assert "the file cannot be imported" in result.output


def test_top_shows_last_minute_and_busiest_tasks(proxy: Running) -> None:
    text = typed(proxy, "top", "--once")
    for part in ("calls", "demo", "hits", "sandboxes:"):
        assert part in text
    assert as_json(proxy, "top", "--once")["stats"]["calls"] >= 6


def test_gc_prints_what_it_freed(proxy: Running) -> None:
    assert as_json(proxy, "gc")["evicted"] == 0
    assert "forgotten nodes deleted" in typed(proxy, "gc")


@pytest.mark.parametrize(
    "words",
    [
        ["rollout", "demo", "nobody"],
        ["node", "demo", "n99999"],
        ["diff", "demo", "n1", "x"],
        ["export", "nothing", "f"],
        ["verify", "nothing"],
    ],
)
def test_unknown_names_exit_with_1(
    proxy: Running, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    typed(proxy, *words, code=1)
    assert list(tmp_path.iterdir()) == []


def test_token_comes_from_environment(tmp_path: Path) -> None:
    token = "some-token-0123456789"
    with serving(tmp_path, token=SecretStr(token)) as proxy:
        typed(proxy, "gc", code=1)
        assert json.loads(typed(proxy, "gc", "--json", FORKPOINT_TOKEN=token))["evicted"] == 0


def test_shell_completion_can_be_installed() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert "--install-completion" in result.output


@given(st.lists(st.floats(0, 1e6), max_size=60))
def test_each_value_has_a_bar(values: list[float]) -> None:
    bars = spark(values)
    assert len(bars) == len(values)
    assert [bar == " " for bar in bars] == [value <= 0 for value in values]
