"""A proxy on this machine for the duration of a block."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from forkpoint.client import Client
from forkpoint.ephemeral_proxy import ephemeral_proxy


@contextmanager
def local(data: str | Path | None = None, **settings: object) -> Iterator[Client]:
    """Run a proxy on a free port of 127.0.0.1, and yield a client of it.

    The proxy is a process of its own that ends with the block. It needs what `forkpoint serve` needs;
    `forkpoint doctor` says what is missing.

    Args:
        data: The data directory, whose trees the next block may use; None for an empty one that is removed.
        settings: Settings by their names, as `docs/deploying.md` lists them, such as `drivers=["sqlite"]`.

    Raises:
        EphemeralProxyError: The proxy does not start or does not stop in time. The text quotes the end of its log.
    """
    folder = None if data is None else Path(data)
    with ephemeral_proxy(folder, settings) as proxy, Client(proxy.url, trust_env=False) as client:
        yield client
