"""A terminal in a fork of a node, in the terminal of the command. The second door to websockets.

What the fork writes reaches the user's terminal as it is, escape sequences included, as in any terminal program.
"""

import contextlib
import json
import os
import select
import shutil
import sys
import termios
import threading
import tty
from collections.abc import Iterator
from urllib.parse import quote, urlencode

from websockets.exceptions import ConnectionClosed, InvalidHandshake
from websockets.sync.client import ClientConnection, connect

from proxy.cli.client import ControlClient

_INPUT_BYTES = 1 << 16
"""Most bytes of input that one message carries."""
_LOOK_S = 0.2
"""Interval at which a new size of this terminal is noticed, in seconds."""
_FAILED = 4000
"""Close codes from here on are an HTTP status plus this number."""


class TerminalError(RuntimeError):
    """The terminal cannot be opened. The text says why."""


def attach(proxy: ControlClient, task: str, node: str) -> int:
    """Connect this terminal to a shell in a fork of a node, until it ends; return 0. Raises TerminalError."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise TerminalError("`shell` needs a terminal. For a single command use `forkpoint exec`.")
    columns, rows = shutil.get_terminal_size()
    query = urlencode({"columns": columns, "rows": rows})
    path = f"/api/v1/tasks/{quote(task, safe='')}/nodes/{quote(node, safe='')}/terminal?{query}"
    address = "ws" + proxy.url.removeprefix("http") + path
    try:
        with connect(address, additional_headers=proxy.headers, compression=None, max_size=None) as connection:
            return _forward(connection)
    except (OSError, InvalidHandshake) as error:
        raise TerminalError(f"no terminal at {proxy.url}: {error}") from error


def _forward(connection: ClientConnection) -> int:
    last = ""
    with _raw(sys.stdin.fileno()):
        # Daemonic: it may wait for a key when the shell has ended.
        threading.Thread(target=_send_input, args=(connection,), daemon=True).start()
        try:
            for message in connection:
                if isinstance(message, str):
                    last = message
                else:
                    os.write(sys.stdout.fileno(), message)
        except ConnectionClosed as closed:
            if closed.rcvd is not None and closed.rcvd.code > _FAILED:
                raise TerminalError(_detail(last)) from None
    return 0


def _send_input(connection: ClientConnection) -> None:
    stdin, size = sys.stdin.fileno(), shutil.get_terminal_size()
    with contextlib.suppress(ConnectionClosed, OSError):
        while True:
            if select.select([stdin], [], [], _LOOK_S)[0]:
                if not (typed := os.read(stdin, _INPUT_BYTES)):
                    connection.close()
                    return
                connection.send(typed)
            if (now := shutil.get_terminal_size()) != size:
                size = now
                connection.send(json.dumps({"resize": list(size)}))


def _detail(problem: str) -> str:
    try:
        return str(json.loads(problem)["detail"])
    except (ValueError, KeyError, TypeError):
        return "the proxy ended the terminal."


@contextlib.contextmanager
def _raw(stdin: int) -> Iterator[None]:
    before = termios.tcgetattr(stdin)
    tty.setraw(stdin)
    try:
        yield
    finally:
        termios.tcsetattr(stdin, termios.TCSADRAIN, before)
