"""The log of what people change: who, what, when, and how it was answered."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from proxy.http import change_log
from tests.proxy.serving import Running, serving

ROOT, ALICE = "root-token-0123456789", "alice-token-012345678"


def ask(proxy: Running, method: str, path: str, token: str = ALICE, **more: Any) -> Any:
    return proxy.client.request(method, f"/api/v1/{path}", headers={"authorization": f"Bearer {token}"}, **more)


def changes(proxy: Running) -> list[tuple[Any, ...]]:
    items = ask(proxy, "GET", "system/changes", ROOT).json()["items"]
    return [(item["token"], item["method"], item["path"].removeprefix("/api/v1/"), item["status"]) for item in items]


def test_changes_of_people_are_listed_and_those_of_trainers_are_not(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text(f"{ALICE} @alice t*\n")
    settings: dict[str, Any] = {"token": SecretStr(ROOT), "token_file": file}
    with serving(tmp_path, **settings) as proxy:
        ask(proxy, "PUT", "tasks/t", json={"driver": "memory"}).raise_for_status()
        ask(proxy, "POST", "tasks/t/rollouts", json={"rollout": "r"}).raise_for_status()
        ask(proxy, "PATCH", "tasks/t/rollouts/r/labels", json={"reward": 1}).raise_for_status()
        ask(proxy, "DELETE", "tasks/t/rollouts/r").raise_for_status()
        assert changes(proxy) == []
        ask(proxy, "DELETE", "tasks/t/nodes/n99")
        ask(proxy, "DELETE", "tasks/other")
        ask(proxy, "POST", "tasks/t/nodes/n1/pin", ROOT).raise_for_status()
        ask(proxy, "DELETE", "tasks/t").raise_for_status()
        wanted = [
            ("alice", "DELETE", "tasks/t", 204), ("", "POST", "tasks/t/nodes/n1/pin", 200),
            ("alice", "DELETE", "tasks/t/nodes/n99", 404),
        ]  # fmt: skip
        assert changes(proxy) == wanted
        assert ask(proxy, "GET", "system/changes").status_code == 403
    log = tmp_path / change_log.FILE
    assert (log.stat().st_mode & 0o777, ALICE in log.read_text()) == (0o600, False)
    with log.open("a") as written:
        written.write('{"timestamp": "cut by a loss of po')
    with serving(tmp_path, **settings) as proxy:
        assert changes(proxy) == wanted


def test_the_file_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(change_log, "MAX_BYTES", 500)
    with serving(tmp_path) as proxy:
        for number in range(20):
            proxy.client.delete(f"/api/v1/tasks/t{number}")
        shown = [path for _, _, path, _ in changes(proxy)]
        assert shown[:2] == ["tasks/t19", "tasks/t18"]
        assert sum(file.stat().st_size for file in tmp_path.glob("changes.*")) < 1500
