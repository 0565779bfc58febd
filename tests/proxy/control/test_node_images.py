"""Images of nodes: routes, who may call them, and what they leave behind."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from pydantic import SecretStr

from sandboxes.errors import StateGoneError
from sandboxes.sqlite.driver import SqliteDriver
from tests.proxy.serving import Running, serving
from tests.sandboxes.memory_driver import MemoryDriver
from tests.sandboxes.sqlite_files import make

ROOT, ALICE = "root-token-0123456789", "alice-token-012345678"


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    data = tmp_path_factory.mktemp("data")
    (data / "tokens").write_text(f"{ALICE} alice-*\n")
    more = {"sqlite": SqliteDriver(data / "sqlite")}
    with serving(data, drivers=more, token=SecretStr(ROOT), token_file=data / "tokens") as running:
        running.client.headers["authorization"] = f"Bearer {ROOT}"
        yield running
        assert list((data / "imports").iterdir()) == []


@pytest.fixture(scope="module")
def node(proxy: Running) -> str:
    return proxy.exec("r", "echo 1 > f", task="alice-1").headers["x-forkpoint-node"]


def get(proxy: Running, node: str, task: str = "alice-1", **query: str) -> httpx.Response:
    return proxy.client.get(f"/api/v1/tasks/{task}/nodes/{node}/image", params=query)


def post(proxy: Running, node: str, name: object, task: str = "alice-1", token: str = ROOT) -> httpx.Response:
    headers = {"authorization": f"Bearer {token}"}
    return proxy.client.post(f"/api/v1/tasks/{task}/nodes/{node}/image", json={"name": name}, headers=headers)


def test_archive_is_downloaded(proxy: Running, node: str) -> None:
    """Its id is in a header. The node has a snapshot afterwards."""
    answer = get(proxy, node, name="a/b:1").raise_for_status()
    assert answer.content.startswith(b'["a/b:1"')
    assert answer.headers["x-forkpoint-image"] == f"sha256:{hashlib.sha256(answer.content).hexdigest()}"
    assert answer.headers["content-length"] == str(len(answer.content))
    assert get(proxy, node).content.startswith(b'[""')
    assert proxy.client.get(f"/api/v1/tasks/alice-1/nodes/{node}").json()["snapshot"] is not None


def test_daemons_image_has_an_id(proxy: Running, node: str) -> None:
    view = post(proxy, node, "repository:tag").raise_for_status().json()
    assert view["name"] == "repository:tag"
    assert view["id"].startswith("sha256:")


@pytest.mark.parametrize("name", ["host:5000/a/b_c__d-e.f:T.1", "localhost/a", "a", "Registry.local/a:1"])
def test_names_of_docker_are_taken(proxy: Running, node: str, name: str) -> None:
    assert post(proxy, node, name).status_code == 200


@pytest.mark.parametrize("name", [None, "", "A", "a:", "a b", "a\n", "-a", "../a", "/a", "a@sha256:0", "a" * 256])
def test_other_names_are_refused(proxy: Running, node: str, name: object) -> None:
    assert post(proxy, node, name).status_code == 422


def test_token_of_some_tasks_gets_archives_only(proxy: Running, node: str) -> None:
    """In the daemon, it could replace an image from which tasks of others start."""
    assert post(proxy, node, "python:3.12", token=ALICE).status_code == 403
    url, headers = f"/api/v1/tasks/alice-1/nodes/{node}/image", {"authorization": f"Bearer {ALICE}"}
    assert proxy.client.get(url, headers=headers).status_code == 200


def test_missing_nodes_and_states_that_are_no_images(proxy: Running, tmp_path: Path) -> None:
    make(tmp_path / "db")
    assert get(proxy, "n99999").status_code == post(proxy, "n99999", "a").status_code == 404
    assert get(proxy, "n1", task="missing").status_code == 404
    proxy.client.put("/api/v1/tasks/no", json={"driver": "memory", "env": {"REFUSED": "1"}}).raise_for_status()
    sql = {"driver": "sqlite", "databases": {"main": {"source": str(tmp_path / "db")}}}
    proxy.client.put("/api/v1/tasks/sql", json=sql).raise_for_status()
    for task, says in (("no", "its base is refused"), ("sql", "driver 'sqlite' cannot become images")):
        root = proxy.client.get(f"/api/v1/tasks/{task}/tree").json()["root"]
        for answer in (get(proxy, root, task=task), post(proxy, root, "a", task=task)):
            assert (answer.status_code, answer.json()["type"]) == (409, "urn:forkpoint:no-image")
            assert says in answer.json()["detail"]
    held = proxy.exec("j", "sleep 9 &", task="alice-1").headers["x-forkpoint-node"]
    answer = get(proxy, held)
    assert (answer.status_code, answer.json()["type"]) == (409, "urn:forkpoint:not-freezable")


def test_lost_state_is_rebuilt_by_the_next_request(proxy: Running, node: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def gone(*_: object) -> str:
        raise StateGoneError("layers x of this state are gone.")

    monkeypatch.setattr(MemoryDriver, "image", gone)
    assert get(proxy, node).status_code == 503
    assert not proxy.client.get(f"/api/v1/tasks/alice-1/nodes/{node}").json()["snapshot"]
    monkeypatch.undo()
    assert get(proxy, node).status_code == 200
