"""Every state is worth sending, and at once."""

import pytest


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.cluster.states.sending.DELAY_S", 0.0)
    for module in ("worth", "sending"):
        monkeypatch.setattr(f"proxy.cluster.states.{module}.WORTH_S", 0.0)
