"""A hit reads its answer before it takes its step: a failed read leaves the rollout where its agent saw it."""

from pathlib import Path

import pytest

from proxy.dialects import BuiltIn
from proxy.dialects.base import Call, Local, Request
from proxy.http.answer_cache import Answers, PreparedAnswer
from proxy.storage.errors import StoreError
from proxy.tree.tree import Record
from tests.proxy.serving import serving


def test_a_failed_read_takes_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store cannot be read when a known call comes. The client gets an error, and its retry gets the answer."""
    read, broken = Answers.of, list[bool]()

    def of(answers: Answers, record: Record) -> PreparedAnswer:
        if broken:
            raise StoreError("the disk is gone")
        return read(answers, record)

    monkeypatch.setattr(Answers, "of", of)
    with serving(tmp_path) as proxy:
        for command in ("echo 1 >> log", "echo 1 >> log", "cat log"):
            last = proxy.exec("first", command)
        for _ in range(2):
            # The first call of a rollout takes the regular path, the second one the hit path.
            broken.append(True)
            assert proxy.exec("second", "echo 1 >> log").status_code == 507
            broken.clear()
            assert proxy.exec("second", "echo 1 >> log").headers["cache-status"] == "forkpoint; hit"
        assert proxy.exec("second", "cat log").json() == last.json()


def test_a_miss_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The regular path takes what the hit path has read of the same request."""
    read, requests = BuiltIn.read, list[Request]()

    def noted(dialect: BuiltIn, request: Request) -> Call | Local:
        requests.append(request)
        return read(dialect, request)

    with serving(tmp_path) as proxy:
        proxy.exec("first", "echo 1")
        monkeypatch.setattr(BuiltIn, "read", noted)
        # The first call has made the rollout's address known, so the hit path reads the second one.
        assert "hit" not in proxy.exec("first", "echo 2").headers["cache-status"]
    assert len(requests) == 1
