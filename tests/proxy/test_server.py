"""The settings of the web server that agents depend on."""

from types import SimpleNamespace
from typing import Any, cast

from proxy.server import server


def test_connections_outlive_a_models_thinking() -> None:
    """The server must not close an idle connection just as its agent sends the next call."""
    engine = SimpleNamespace(
        counts=SimpleNamespace(hit_s=None), settings=SimpleNamespace(max_connections=100, max_body_bytes=1024)
    )
    config = server(
        cast("Any", SimpleNamespace(engine=engine, others=None, tunnels=None, hits=None, known=None))
    ).config
    assert config.timeout_keep_alive >= 60
    assert config.ws_max_size == 1024
