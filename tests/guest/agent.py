"""Runs in the guest as a service: executes the commands that come over a serial line, and sends back what they print.

Each message is a line of JSON. `{"command": "...", "within_s": 60}` comes in. `{"output": "..."}` goes out for each
piece of output, and `{"code": 0}` at the end; 124 means that the time was up. The standard library only.
"""

import json
import os
import signal
import subprocess
import threading
import tty
from typing import Any

PORT = "/dev/ttyS1"


def main() -> None:
    """Serve the port until the machine stops."""
    port = os.open(PORT, os.O_RDWR | os.O_NOCTTY)
    tty.setraw(port)
    with os.fdopen(os.dup(port), "rb") as requests, os.fdopen(port, "wb", buffering=0) as replies:
        _send(replies, {"ready": os.uname().release})
        for line in requests:
            request = json.loads(line)
            _send(replies, {"code": _run(replies, request["command"], request["within_s"])})


def _run(replies: Any, command: str, within_s: float) -> int:
    # A session of its own, so that all of it can be ended.
    process = subprocess.Popen(
        ["/bin/bash", "-c", command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip
    late = threading.Event()

    def end() -> None:
        late.set()
        os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(within_s, end)
    timer.start()
    assert process.stdout is not None
    descriptor = process.stdout.fileno()
    while output := os.read(descriptor, 4096):
        _send(replies, {"output": output.decode(errors="replace")})
    code = process.wait()
    timer.cancel()
    return 124 if late.is_set() else code


def _send(replies: Any, message: dict[str, Any]) -> None:
    data = json.dumps(message).encode() + b"\n"
    while data:
        data = data[replies.write(data) :]


if __name__ == "__main__":
    main()
