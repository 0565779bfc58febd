"""The commands that list what a proxy has, and those that steer it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from forkpoint.address import DEFAULT_URL
from proxy.address import read_address, write_address
from proxy.cli.client import ControlClient, proxy_url
from proxy.cli.commands import _COMMANDS, _OFFLINE
from proxy.cli.main import app
from proxy.cli.options import complete_node, complete_rollout, complete_task, description
from proxy.cli.rendering.lists import ListColumns, render_tasks
from tests.proxy.cli.typing_commands import as_json, proxy, typed
from tests.proxy.serving import Running, serving

__all__ = ["proxy"]

CLI_PAGE = Path(__file__).parents[3] / "docs" / "cli.md"


def test_lists_show_names_and_totals(proxy: Running) -> None:
    assert re.search(r"^demo +2 +2 +\d+ +\d+.0%", typed(proxy, "tasks"), re.MULTILINE)
    assert [row["task"] for row in as_json(proxy, "tasks", "--match", "d*")] == ["demo"]
    assert as_json(proxy, "tasks", "--match", "x*") == []
    assert "no task yet" in typed(proxy, "tasks", "--match", "x*")
    assert re.search(r"^second +running +n\d+ +3", typed(proxy, "rollouts", "demo"), re.MULTILINE)
    assert [row["rollout"] for row in as_json(proxy, "rollouts", "demo")] == ["second", "first"]
    assert "hit rate" in typed(proxy, "stats")
    assert as_json(proxy, "stats")["calls"] >= 6
    states = as_json(proxy, "snapshots", "--task", "demo")
    assert states
    assert f"demo  {states[0]['node']}" in typed(proxy, "snapshots")
    assert as_json(proxy, "snapshots", "--task", "other") == []
    assert {row["task"] for row in as_json(proxy, "sandboxes")} <= {"demo", None}
    assert "sandbox" in typed(proxy, "sandboxes")


def test_running_rollouts_can_be_listed_alone(proxy: Running) -> None:
    proxy.exec("ended", "echo x", task="listed")
    proxy.exec("goes-on", "echo x", task="listed")
    assert "deleted: rollout ended" in typed(proxy, "rm", "listed", "--rollout", "ended", "--yes")
    assert [row["rollout"] for row in as_json(proxy, "rollouts", "listed", "--running")] == ["goes-on"]


def test_rollouts_are_selected_by_label(proxy: Running) -> None:
    for name, step in (("a", "1"), ("b", "2")):
        proxy.client.post("/api/v1/tasks/labelled/rollouts", json={"rollout": name, "labels": {"step": step}})
    assert [row["rollout"] for row in as_json(proxy, "rollouts", "labelled", "--label", "step=2")] == ["b"]
    assert "step=1" in typed(proxy, "rollouts", "labelled")


def test_names_are_never_cut_for_numbers() -> None:
    row = {"rollouts": 64, "running": 3, "calls": 10_000, "hit_rate": 0.5, "saved_s": 1.0, "executed_s": 2.0}
    name = "django__django-11095-with-a-name-that-is-long"
    console = Console(width=70)
    with console.capture() as capture:
        console.print(render_tasks([{"task": name, "nodes": 7, "created_at": "1970-01-01T00:00:00.000Z", **row}]))
    assert name in capture.get()
    assert "not shown here:" in capture.get()
    assert all(len(line) <= 70 for line in capture.get().splitlines())


@pytest.mark.parametrize("width", [10, 20, 40, 80, 200])
def test_columns_fit_any_terminal(width: int) -> None:
    columns = ListColumns(("name", "count", "why"), [("n" * 30, "1", "because"), ("short", "22", "w" * 60)])
    console = Console(width=width)
    with console.capture() as capture:
        console.print(columns)
    shown = re.sub(r"\s", "", capture.get())
    assert "n" * 30 in shown
    assert ("because" in shown) == (width == 200)


def test_tasks_that_did_not_move_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """`cluster rebalance` shows loads and moves, and exits with 1 if a task stays. A dry run moves none."""
    requests = []

    def request(_self: ControlClient, *path: str, **more: Any) -> dict[str, Any]:
        requests.append((path, more["params"]))
        move = {"task": "t", "from": "a", "to": "b", "load": 2, "moved": False}
        loads = [{"name": "a", "before": 4, "after": 4}, {"name": "b", "before": 0, "after": 0}]
        return {"dry_run": more["params"]["dry_run"] == "true", "members": loads, "moves": [move]}

    monkeypatch.setattr(ControlClient, "request", request)
    planned = CliRunner().invoke(app, ["cluster", "rebalance", "--dry-run", "--max", "2"])
    assert (planned.exit_code, "planned" in planned.output) == (0, True), planned.output
    made = CliRunner().invoke(app, ["cluster", "rebalance"])
    assert (made.exit_code, "stays" in made.output) == (1, True), made.output
    path = ("POST", "cluster", "rebalance")
    assert requests == [(path, {"max": 2, "dry_run": "true"}), (path, {"max": 4, "dry_run": "false"})]


def test_fork_begins_rollout_at_node(proxy: Running) -> None:
    node = as_json(proxy, "tree", "demo")["nodes"][1]["id"]
    begun = as_json(proxy, "fork", "demo", "first", "variant", "--node", node)
    assert (begun["rollout"], begun["node"]) == ("variant", node)
    assert proxy.exec("variant", "cat f", task="demo").json()["stdout"] == "one\n"
    assert "begins at" in typed(proxy, "fork", "demo", "first", "another")


def test_exec_runs_in_fork_and_returns_exit_code(proxy: Running) -> None:
    before = as_json(proxy, "tree", "demo")
    node = before["nodes"][1]["id"]
    assert typed(proxy, "exec", "demo", node, "cat f") == "one\n"
    assert typed(proxy, "exec", "demo", node, "exit 7", code=7) == ""
    assert as_json(proxy, "exec", "demo", node, "echo x >> f")["effect"] == ["files"]
    assert as_json(proxy, "tree", "demo")["nodes"] == before["nodes"]


def test_shell_needs_a_terminal(proxy: Running) -> None:
    result = CliRunner().invoke(app, ["shell", "demo", "n1"], env={"FORKPOINT_URL": str(proxy.client.base_url)})
    assert result.exit_code == 1
    assert "needs a terminal" in result.output


def test_pin_and_unpin(proxy: Running) -> None:
    node = as_json(proxy, "tree", "demo")["nodes"][1]["id"]
    assert "is pinned" in typed(proxy, "pin", "demo", node)
    assert "pinned" in as_json(proxy, "node", "demo", node)["flags"]
    assert "is not pinned" in typed(proxy, "pin", "demo", node, "--off")
    assert "pinned" not in as_json(proxy, "node", "demo", node)["flags"]


def test_rm_asks_before_it_deletes(proxy: Running) -> None:
    proxy.exec("r", "echo one > f", task="doomed")
    refused = CliRunner().invoke(app, ["rm", "doomed"], env={"FORKPOINT_URL": str(proxy.client.base_url)})
    assert refused.exit_code == 1
    assert "Repeat the command with --yes" in refused.output
    typed(proxy, "rm", "doomed", "--rollout", "r", "--node", "n1", code=2)
    assert "doomed" in typed(proxy, "tasks")
    assert "deleted: task doomed with its trees" in typed(proxy, "rm", "doomed", "--yes")
    assert "doomed" not in typed(proxy, "tasks")


def test_rm_forgets_a_subtree(proxy: Running) -> None:
    proxy.exec("r", "echo one > f", task="partly")
    node = as_json(proxy, "tree", "partly")["nodes"][1]["id"]
    assert as_json(proxy, "rm", "partly", "--node", node, "--yes")["nodes"] == 1
    assert len(as_json(proxy, "tree", "partly")["nodes"]) == 1


def test_open_prints_the_address_of_the_page(proxy: Running) -> None:
    base = str(proxy.client.base_url).rstrip("/")
    assert typed(proxy, "open", "--print") == f"{base}/ui/\n"
    assert typed(proxy, "open", "de mo", "--node", "n2", "--print") == f"{base}/ui/#/t/de%20mo/n/n2\n"
    typed(proxy, "open", "--node", "n2", "--print", code=2)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_names_are_completed_from_the_proxy(proxy: Running, shell: str) -> None:
    def offered(*words: str) -> set[str]:
        """Return the words that the shell is offered for the last word."""
        environment = {
            "FORKPOINT_URL": str(proxy.client.base_url),
            "_FORKPOINT_COMPLETE": f"complete_{shell}",
            "COMP_WORDS": " ".join(("forkpoint", *words)),
            "COMP_CWORD": str(len(words)),
            "_TYPER_COMPLETE_ARGS": " ".join(("forkpoint", *words)),
            "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        }
        output = CliRunner().invoke(app, [], env=environment, prog_name="forkpoint").stdout
        return set(re.findall(r"\w+", output))

    assert "demo" in offered("tree", "de")
    assert {"first", "second"} <= offered("rollout", "demo", "")
    assert offered("node", "demo", "n") >= {row["id"] for row in as_json(proxy, "tree", "demo")["nodes"]}


@pytest.mark.parametrize("title", ["\\$(touch x)", "\\`touch x`", 'a\\"; touch x; "', "a'; touch x; '", "$HOME\n:b"])
def test_no_shell_interprets_descriptions_of_nodes(title: str) -> None:
    """An agent chooses the title, and zsh evaluates the descriptions of completions."""
    assert re.fullmatch(r"[\w ]+", description(title))
    assert description("echo built > app; cat ./app") == "echo built app cat ./app"


def test_completion_without_proxy_is_silent() -> None:
    context = typer.Context(typer.main.get_command(app))
    context.params = {"url": "http://127.0.0.1:1", "task": "demo"}
    for complete in (complete_task, complete_rollout, complete_node):
        assert complete(context, "") == []


def test_proxy_is_found_by_its_data_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORKPOINT_URL", raising=False)
    monkeypatch.chdir(tmp_path)
    assert proxy_url(None, None) == DEFAULT_URL
    with serving(tmp_path / "data") as running:
        running.exec("r", "echo one > f", task="here")
        assert read_address(tmp_path / "data") == str(running.client.base_url).rstrip("/")
        result = CliRunner().invoke(app, ["tasks", "--json", "--data", str(tmp_path / "data")])
        assert [row["task"] for row in json.loads(result.stdout)] == ["here"]
    assert read_address(tmp_path / "data") is None


def test_directory_without_proxy_never_means_another_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORKPOINT_URL", raising=False)
    result = CliRunner().invoke(app, ["rm", "demo", "--yes", "--data", str(tmp_path)])
    assert result.exit_code == 1
    assert f"No proxy serves {tmp_path}." in result.output


def test_url_wins_over_data_directory(tmp_path: Path) -> None:
    write_address(tmp_path, "http://127.0.0.1:2")
    assert proxy_url("http://127.0.0.1:1", tmp_path) == "http://127.0.0.1:1"
    assert proxy_url(None, tmp_path) == "http://127.0.0.1:2"


def test_each_command_is_documented_with_an_example() -> None:
    documented = set(re.findall(r"^## .*$", CLI_PAGE.read_text(), re.MULTILINE))
    for _, name, _, example in (*_COMMANDS, *_OFFLINE):
        assert any(f"`forkpoint {name}" in title for title in documented), f"docs/cli.md lacks {name}"
        output = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200"}).output
        assert f"Example: {example}" in output
        assert example.startswith(f"forkpoint {name}")


def test_help_groups_the_commands() -> None:
    output = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "120"}).output
    positions = [output.index(group) for group in ("Run a proxy", "List", "Look at one thing", "Steer", "Operate")]
    assert positions == sorted(positions)


def test_image_goes_to_the_daemon_or_a_file(proxy: Running, tmp_path: Path) -> None:
    node, file = as_json(proxy, "tree", "demo")["nodes"][1]["id"], tmp_path / "image.tar"
    assert "demo:1 is sha256:" in typed(proxy, "image", "demo", node, "demo:1")
    written = as_json(proxy, "image", "demo", node, "demo:1", "--output", str(file))
    assert written == {"id": written["id"], "name": "demo:1", "file": str(file), "bytes": file.stat().st_size}
    assert file.read_bytes().startswith(b'["demo:1"')
    assert typed(proxy, "image", "demo", node, "--output", "-").startswith('[""')
    assert "is needed without --output" in CliRunner().invoke(app, ["image", "demo", node]).output
    assert typed(proxy, "image", "demo", "n99999", "--output", str(tmp_path / "none"), code=1) == ""
    assert not (tmp_path / "none").exists()
