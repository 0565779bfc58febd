"""The client and its commands need neither the server's packages, nor Linux, nor a newer Python than 3.10."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
LOADS = """
import sys

class OnlyTheClients:
    packages = {"anyio", "certifi", "h11", "httpcore", "httpx", "idna", "markdown_it", "mdurl", "pygments", "rich",
                "shellingham", "typer", "typing_extensions", "annotated_doc", "forkpoint", "proxy", "sandboxes"}
    posix = {"fcntl", "grp", "pwd", "resource", "termios", "tty"}

    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in self.posix or top not in self.packages | sys.stdlib_module_names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

for name in OnlyTheClients.posix:
    sys.modules.pop(name, None)
sys.meta_path.insert(0, OnlyTheClients())
import forkpoint.__main__, forkpoint.trackers, forkpoint.trajectory_files
assert forkpoint.Client and forkpoint.AsyncClient
print(*sorted(module.__file__ for name, module in sys.modules.items() if name.partition(".")[0] in (
    "forkpoint", "proxy", "sandboxes", "snapshots")), sep="\\n")
"""
NEWER = {
    "asyncio": {"timeout", "TaskGroup", "Runner"}, "datetime": {"UTC"}, "enum": {"StrEnum"},
    "tomllib": {"load", "loads"},
    "typing": {"LiteralString", "Never", "NotRequired", "Required", "Self", "Unpack", "assert_never"},
}  # fmt: skip
"""What the standard library has since Python 3.11."""


@pytest.fixture(scope="module")
def loaded() -> list[Path]:
    """Return the files that the client and the command line load, where no other package can be imported."""
    shown = subprocess.run([sys.executable, "-c", LOADS], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stderr
    return [Path(line) for line in shown.stdout.splitlines()]


def test_client_and_commands_load_without_the_server(loaded: list[Path]) -> None:
    names = {str(path.relative_to(REPOSITORY)) for path in loaded}
    assert {"forkpoint/client.py", "forkpoint/trajectory_files.py", "proxy/cli/operating.py"} <= names


def test_client_and_commands_are_python_3_10(loaded: list[Path]) -> None:
    """The server needs 3.11. Imports for types alone are indented and do not count."""
    for path in loaded:
        tree = ast.parse(path.read_text(), feature_version=(3, 10))
        for node in tree.body:
            if isinstance(node, ast.ImportFrom):
                newer = NEWER.get(node.module or "", set()) & {alias.name for alias in node.names}
                assert not newer, f"{path} imports {newer}"
        assert not any(isinstance(node, ast.TryStar) for node in ast.walk(tree)), path
