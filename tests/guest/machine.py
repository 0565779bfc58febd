"""Boots the guest in QEMU, and runs commands in it over a serial line."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.guest.image import Image

QEMU = "qemu-system-x86_64"
BOOT_S = 300.0
"""Longest time until the guest's agent answers. On an idle core it takes about a minute."""
_MARGIN_S = 30.0
"""How much longer than its own limit a command may take until its end is known here."""
_STOP_S = 10.0
_MEMORY_MB = 4096


class GuestError(Exception):
    """The guest did not answer, or not in time."""


@dataclass
class Result:
    """What a command in the guest printed, both outputs as one, and its exit code; 124 if its time was up."""

    output: str
    code: int


@dataclass
class Guest:
    """A running guest.

    Attributes:
        line: The other end of the serial line of the guest's agent.
        console: The file with what the guest's kernel and systemd print.
        release: The version of its kernel.
    """

    line: socket.socket
    console: Path
    release: str = ""
    _received: bytearray = field(default_factory=bytearray)

    def run(self, command: str, *, within_s: float, echo: bool = False) -> Result:
        """Run a bash command in the guest, as root; print its output as it comes if `echo` is set."""
        request = {"command": command, "within_s": within_s}
        self.line.sendall(json.dumps(request).encode() + b"\n")
        deadline = time.monotonic() + within_s + _MARGIN_S
        output = ""
        while True:
            message = self._receive(deadline)
            if "code" in message:
                return Result(output, message["code"])
            output += message.get("output", "")
            if echo:
                sys.stdout.write(message.get("output", ""))
                sys.stdout.flush()

    def wait(self) -> None:
        """Wait until the agent answers."""
        self.release = self._receive(time.monotonic() + BOOT_S)["ready"]

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\n" not in self._received:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.line], [], [], left)[0]:
                raise GuestError(f"The guest sent nothing in time. Its console:\n{self.last_words()}")
            data = self.line.recv(65536)
            if not data:
                raise GuestError(f"QEMU ended. Its console:\n{self.last_words()}")
            self._received += data
        line, _, rest = bytes(self._received).partition(b"\n")
        self._received = bytearray(rest)
        message: dict[str, Any] = json.loads(line)
        return message

    def last_words(self) -> str:
        """Return the last lines of the console."""
        return "\n".join(self.console.read_text(errors="replace").splitlines()[-30:])


@contextmanager
def booted(image: Image) -> Iterator[Guest]:
    """Yield a guest that has booted from a throw-away copy of the image. It is gone at the end, and what it wrote."""
    with tempfile.TemporaryDirectory(prefix="forkpoint-guest-") as name:
        console, path = Path(name, "console"), Path(name, "agent")
        console.touch()
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen()
            listener.settimeout(_MARGIN_S)
            process = subprocess.Popen(_command(image, Path(name)), stdin=subprocess.DEVNULL, start_new_session=True)
            try:
                line, _ = listener.accept()
                with line:
                    guest = Guest(line, console)
                    guest.wait()
                    yield guest
            finally:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(_STOP_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def _command(image: Image, folder: Path) -> list[str]:
    # The processor is emulated, with every feature that QEMU knows. `snapshot` keeps writes in a file of QEMU's.
    return [
        # It ends with this process, however that ends.
        "setpriv", "--pdeathsig", "KILL",
        QEMU, "-accel", "tcg,thread=multi", "-cpu", "max", "-smp", str(min(2, os.cpu_count() or 1)),
        "-m", str(_MEMORY_MB),
        "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-nic", "none",
        "-kernel", str(image.kernel), "-initrd", str(image.initrd),
        "-append", "root=/dev/vda rw console=ttyS0 panic=-1 quiet systemd.show_status=no",
        "-drive", f"file={image.disk},format=raw,if=virtio,snapshot=on",
        "-chardev", f"file,id=console,path={folder / 'console'}", "-serial", "chardev:console",
        "-chardev", f"socket,id=agent,path={folder / 'agent'}", "-serial", "chardev:agent",
    ]  # fmt: skip
