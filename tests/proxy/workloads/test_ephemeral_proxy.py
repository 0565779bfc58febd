"""A private proxy comes and goes with its block."""

from pathlib import Path

import pytest

from proxy.workloads.ephemeral_proxy import PrivateProxyError, private_proxy


def test_a_private_proxy_that_does_not_start_says_why_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("FORKPOINT_LOG", "loud")
    with pytest.raises(PrivateProxyError, match=r"ended with code 1:\nThe settings cannot be used"), private_proxy():
        pass
    assert list(tmp_path.iterdir()) == []
