"""Every command that prints data prints it as JSON with --json, in the shape that docs/cli.md states."""

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from proxy.cli.main import app
from tests.proxy.cli.typing_commands import as_json, proxy, typed
from tests.proxy.serving import Running
from tests.proxy.stub import Stub, stub_proxy

__all__ = ["proxy"]

CLI_PAGE = Path(__file__).parents[3] / "docs" / "cli.md"
COMMANDS = sorted(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
NO_DATA = {
    "serve": "prints a log", "launcher": "prints nothing", "shell": "is a terminal", "down": "prints nothing",
}  # fmt: skip
"""The commands without --json, and why."""
ELSEWHERE = {"up", "branch"}
"""The commands that need a Ray cluster or an agent; other tests have them."""
ARGUMENTS: Mapping[str, str] = {
    "backup": "FOLDER/new.backup",
    "cluster": "",
    "compare": "demo",
    "diff": "demo NODE NODE",
    "doctor": "--data FOLDER/none",
    "exec": "demo NODE 'cat f'",
    "export": "demo FOLDER/demo.tar",
    "files": "demo NODE",
    "fork": "demo first json",
    "gc": "",
    "html": "demo FOLDER/demo.html",
    "image": "demo NODE demo:fixed",
    "import": "FOLDER/tree.tar arrived",
    "node": "demo NODE",
    "open": "demo --print",
    "pin": "demo NODE",
    "replay": "FOLDER/calls.jsonl --no-compare --url URL",
    "report": "",
    "restore": "FOLDER/old.backup --data FOLDER/restored",
    "rm": "doomed --yes --rollout r",
    "rollout": "demo first",
    "rollouts": "demo",
    "sandboxes": "",
    "snapshots": "",
    "stats": "",
    "tasks": "",
    "token": "create carol --tasks 'carol-*' --file FOLDER/tokens",
    "top": "--once",
    "trajectories": "FOLDER/demo.jsonl demo",
    "tree": "demo",
    "upgrade": "--data FOLDER/none",
    "verify": "demo --sample 1",
    "why": "demo first",
}
"""What each command is given. A new command needs a line here, and one in the table of docs/cli.md."""
STUBBED = {"cluster", "replay"}
"""Commands that get a stand-in: clusters have another control plane, and a replay would log calls of this process."""


def documented(command: str) -> set[str]:
    """Return the members that the table of docs/cli.md names for a command."""
    section = CLI_PAGE.read_text().split("\n## JSON\n")[1].split("\n## ")[0]
    for line in section.splitlines():
        cells = line.split("|")
        if len(cells) == 4 and f"`{command}`" in cells[1]:
            return set(re.findall(r"`([a-z_]+)`", cells[2]))
    raise AssertionError(f"the table of docs/cli.md lacks {command}")


@pytest.fixture(scope="module")
def stub() -> Iterator[Stub]:
    with stub_proxy() as stub:
        stub.view = {
            "cluster": "c",
            "members": [{"name": "a", "number": 1, "link": "", "alive": True, "tasks": 0, "sandboxes": None}],
        }
        yield stub


@pytest.fixture(scope="module")
def folder(proxy: Running, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that commands read."""
    folder = tmp_path_factory.mktemp("files")
    typed(proxy, "backup", str(folder / "old.backup"))
    typed(proxy, "export", "demo", str(folder / "tree.tar"))
    proxy.exec("r", "echo x", task="doomed")
    call = {"tool": "shell", "args": {"command": "echo one > f"}}
    (folder / "calls.jsonl").write_text(json.dumps({"task": "t", "rollout": "r", "calls": [call]}))
    return folder


@pytest.mark.parametrize("command", sorted(set(COMMANDS) - set(NO_DATA) - ELSEWHERE))
def test_command_prints_documented_json(proxy: Running, stub: Stub, folder: Path, command: str) -> None:
    node = as_json(proxy, "tree", "demo")["nodes"][1]["id"]
    url = stub.url if command in STUBBED else str(proxy.client.base_url).rstrip("/")
    values = {"FOLDER": str(folder), "NODE": node, "URL": url}
    words = re.sub("FOLDER|NODE|URL", lambda match: values[match[0]], ARGUMENTS[command])
    result = CliRunner().invoke(app, [command, *shlex.split(words), "--json"], env={"FORKPOINT_URL": url})
    assert result.exit_code == 0, result.output
    view = json.loads(result.stdout)
    if isinstance(view, list):
        assert view or command == "sandboxes"
        view = view[0] if view else dict.fromkeys(documented(command))
    assert documented(command) <= set(view)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_offers_json_and_an_example(command: str) -> None:
    output = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).output
    assert f"Example: forkpoint {command}" in output
    assert ("--json" in output) == (command not in NO_DATA)
