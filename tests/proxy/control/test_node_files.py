"""Files of nodes are read from layers: what a sandbox would show, without one, and never what lies outside."""

import json
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest
from typer.testing import CliRunner

from forkpoint import Client
from proxy.cli.main import app
from tests.machine import require_sandboxes
from tests.proxy.serving import Running, get, serving
from tests.sandboxes.box import local_driver
from tests.sandboxes.memory_driver import MemoryDriver

CALLS = (
    "mkdir -p d/old d/kept; echo one > a; echo 1 > d/old/x; ln a hard; ln -s /etc/shadow link; ln -s /etc dirlink",
    "rm -rf d/old; mkdir d/old; echo 2 > d/old/y; rm a; mkfifo pipe; echo in > d/kept/file",
    "touch $'odd\\xff name'; printf '\\0\\x01' > 'sp ace%2F'; chmod 000 hard; rm -rf d/kept; echo now >d/kept;mkdir üm",
)
HERE = "root"
if TYPE_CHECKING:
    from sandboxes.driver import Driver


class Plain(MemoryDriver):
    """A driver whose states cannot be read."""

    open_frozen = None  # type: ignore[assignment]


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    require_sandboxes()
    folder = tmp_path_factory.mktemp("data")
    drivers: dict[str, Driver] = {"local": local_driver(folder / "local", checkpoints=False), "plain": Plain()}
    with serving(folder, drivers=drivers) as running:
        running.client.put("/api/v1/tasks/task", json={"driver": "local"}).raise_for_status()
        yield running


@pytest.fixture(scope="module")
def nodes(proxy: Running) -> list[str]:
    """The nodes after each call. Their snapshots are there, and the rollout's sandbox is gone."""
    found = [proxy.exec("r", f"cd /root; {command}").headers["x-forkpoint-node"] for command in CALLS]
    for node in found:
        proxy.client.post(f"/api/v1/tasks/task/nodes/{node}/snapshot", timeout=60).raise_for_status()
    return found


def listed(proxy: Running, node: str, path: str = HERE) -> dict[str, Any]:
    entries: list[dict[str, Any]] = get(proxy, f"tasks/task/nodes/{node}/files/{path}")["entries"]
    return {entry["name"]: entry for entry in entries}


def content(proxy: Running, node: str, path: str, status: int = 200) -> bytes:
    answer = proxy.client.get(f"/api/v1/tasks/task/nodes/{node}/files/{path}")
    assert answer.status_code == status, answer.text
    return answer.content


def test_file_of_each_node_is_read(proxy: Running, nodes: list[str]) -> None:
    """Of two layers with a path, the upper one counts; what it removed is gone, as in a sandbox."""
    first, second, third = nodes
    assert content(proxy, first, "root/a") == b"one\n" == content(proxy, first, "//root/./hard")
    content(proxy, second, "root/a", 404)
    assert content(proxy, second, "root/hard") == b"one\n"
    assert content(proxy, second, "root/d/old/y") == b"2\n"
    # The directory was removed and made again: it hides what the layer below has.
    content(proxy, second, "root/d/old/x", 404)
    assert set(listed(proxy, second, "root/d/old")) == {"y"}
    assert set(listed(proxy, second, "root/d")) == {"old", "kept"}
    assert content(proxy, second, "root/d/kept/file") == b"in\n"
    # A file took the place of the directory.
    assert content(proxy, third, "root/d/kept") == b"now\n"
    content(proxy, third, "root/d/kept/file", 404)
    assert content(proxy, third, "root/hard") == b"one\n"


def test_names_have_any_bytes(proxy: Running, nodes: list[str]) -> None:
    entries = listed(proxy, nodes[2])
    odd = entries["odd\N{REPLACEMENT CHARACTER} name"]
    assert odd["url"] == "odd%FF%20name"
    assert content(proxy, nodes[2], f"root/{odd['url']}") == b""
    assert content(proxy, nodes[2], f"root/{quote('sp ace%2F', safe='')}") == b"\0\1"
    assert entries["üm"]["kind"] == "directory"
    assert listed(proxy, nodes[2], "root/%C3%BCm") == {}


def test_no_link_is_followed(proxy: Running, nodes: list[str]) -> None:
    """Neither to the machine's files, nor to others of the state."""
    entries = listed(proxy, nodes[2])
    kinds = {name: entries[name]["kind"] for name in ("link", "dirlink", "pipe", "hard")}
    assert kinds == {"link": "symlink", "dirlink": "symlink", "pipe": "other", "hard": "file"}
    assert entries["link"]["target"] == "/etc/shadow"
    assert entries["hard"]["mode"] == "0000"
    assert b"/etc/shadow" in content(proxy, nodes[2], "root/link", 409)
    content(proxy, nodes[2], "root/dirlink/passwd", 404)
    content(proxy, nodes[2], "root/dirlink/", 409)
    content(proxy, nodes[2], "root/pipe", 409)


@pytest.mark.parametrize(
    "path", ["..", "root/..%2f..%2f..%2fetc/passwd", "root/../../etc/passwd%00", "root/a%00", "root/%2e%2e/x"]
)
def test_path_leads_nowhere_else(proxy: Running, nodes: list[str], path: str) -> None:
    # Not httpx, which shortens such paths before it sends them.
    connection = HTTPConnection(*proxy.address, timeout=30)
    connection.request("GET", f"/api/v1/tasks/task/nodes/{nodes[2]}/files/{path}")
    assert connection.getresponse().status == 422
    connection.close()


@pytest.mark.parametrize("path", ["etc/passwd", "usr/bin/env", "proc/1/environ", "x" * 300, "root/" + "d/" * 300])
def test_host_below_the_layers_is_not_read(proxy: Running, nodes: list[str], path: str) -> None:
    """The base is the machine itself: a person may not read of it what sandboxes see."""
    assert b"no-such-file" in content(proxy, nodes[2], path, 404)
    assert get(proxy, f"tasks/task/nodes/{nodes[2]}/files/")["base"] is False


def test_answer_is_no_page(proxy: Running, nodes: list[str]) -> None:
    headers = proxy.client.get(f"/api/v1/tasks/task/nodes/{nodes[0]}/files/root/a").headers
    assert headers["content-type"] == "application/octet-stream"
    assert (headers["x-content-type-options"], headers["content-disposition"]) == ("nosniff", "attachment")
    assert headers["content-length"] == "4"


def test_no_sandbox_is_made(proxy: Running, nodes: list[str]) -> None:
    before = get(proxy, "stats")["costs"]["local"]
    assert content(proxy, nodes[0], "root/a") == b"one\n"
    assert get(proxy, "stats")["costs"]["local"] == before


def test_other_drivers_have_no_files(proxy: Running) -> None:
    proxy.client.put("/api/v1/tasks/other", json={"driver": "plain"}).raise_for_status()
    node = proxy.exec("r", "echo a > f", task="other").headers["x-forkpoint-node"]
    assert get(proxy, f"tasks/other/nodes/{node}/files/f", 409)["type"] == "urn:forkpoint:no-files"


def test_client_and_command_read_files(proxy: Running, nodes: list[str], tmp_path: Path) -> None:
    url = str(proxy.client.base_url)
    with Client(url, trust_env=False) as client:
        assert client.task("task").file(nodes[0], "/root/a").content == b"one\n"
        assert client.task("task").file(nodes[0], "").media_type == "application/json"
    run, words = CliRunner(), ["files", "task", nodes[2]]
    assert run.invoke(app, [*words, "root/d/kept", "--url", url]).stdout == "now\n"
    listed = run.invoke(app, [*words, "/root", "--url", url]).stdout
    assert "dirlink -> /etc" in listed
    assert "Only what set-up and calls have changed" in listed
    written = run.invoke(app, [*words, "root/d/kept", "-o", str(tmp_path / "kept"), "--json", "--url", url])
    assert json.loads(written.stdout) == {"node": nodes[2], "path": "/root/d/kept", "bytes": 4}
    assert (tmp_path / "kept").read_text() == "now\n"


def test_sandbox_shows_the_same(proxy: Running, nodes: list[str]) -> None:
    """Every name and file below the directory, as commands show them at the node."""
    look = "cd /root; find . -mindepth 1 -printf '%y %P\\n'; find . -type f -exec tail -n +1 -v {} +"
    for node in nodes:
        body = {"command": look}
        answer = proxy.client.post(f"/api/v1/tasks/task/nodes/{node}/exec", json=body, timeout=60).raise_for_status()
        told = answer.json()["answer"]["json"]["stdout"]
        kinds, contents = dict[str, str](), dict[str, str]()
        waiting = [""]
        while waiting:
            folder = waiting.pop()
            for name, entry in listed(proxy, node, f"root/{folder}").items():
                kinds[folder + name] = {"file": "f", "directory": "d", "symlink": "l", "other": "p"}[entry["kind"]]
                if entry["kind"] == "directory":
                    waiting.append(f"{folder}{name}/")
                elif entry["kind"] == "file":
                    contents[folder + name] = content(proxy, node, f"root/{folder}{entry['url']}").decode()
        shown = {line[2:]: line[0] for line in told.splitlines() if line[1:2] == " " and line[0] in "fdlp"}
        assert {name: kind for name, kind in shown.items() if "odd" not in name} == {
            name: kind for name, kind in kinds.items() if "odd" not in name
        }
        assert all(text in told for text in contents.values())
