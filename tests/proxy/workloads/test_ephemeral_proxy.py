"""A temporary proxy comes and goes with its block."""

from pathlib import Path

import pytest

from proxy.workloads.ephemeral_proxy import EphemeralProxyError, ephemeral_proxy


def test_failed_start_is_reported_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("FORKPOINT_LOG", "loud")
    with (
        pytest.raises(EphemeralProxyError, match=r"ended with code 1:\nThe setting log in FORKPOINT_LOG"),
        ephemeral_proxy(),
    ):
        pass
    assert list(tmp_path.iterdir()) == []
