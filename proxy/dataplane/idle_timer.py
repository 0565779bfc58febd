"""The end of connections on which nothing happens."""

import asyncio
from collections.abc import Callable


class IdleTimer:
    """Looks at a connection that had no response for a while, and finds out how long it really was idle."""

    def __init__(self, expire: Callable[[], bool], limit_s: float, loop: asyncio.AbstractEventLoop) -> None:
        """Create a timer. `expire` closes the connection if it is between two requests; False: look at it no more."""
        self._expire, self._limit_s, self._loop = expire, limit_s, loop
        self._since_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def restart(self) -> None:
        """Note that a response was written. Called for each hit."""
        self._since_s = self._loop.time()
        # A timer that runs stays as it is: `_check` sees the new time and waits for the rest.
        if self._timer is None:
            self._timer = self._loop.call_later(self._limit_s, self._check)

    def cancel(self) -> None:
        """Look at the connection no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _check(self) -> None:
        rest_s = self._since_s + self._limit_s - self._loop.time()
        # Responses came meanwhile, or the connection is within a request: looked at again later.
        if rest_s > 0 or self._expire():
            self._timer = self._loop.call_later(rest_s if rest_s > 0 else self._limit_s, self._check)
