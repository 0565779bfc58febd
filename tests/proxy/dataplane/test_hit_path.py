"""A hit reads its answer before it takes its step: a failed read leaves the rollout where its agent saw it."""

from pathlib import Path

import pytest

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
