"""Runs commands with the library of `ordinary_calls`, as pid 1 of a pid namespace: a program for its tests.

For each command it prints null if the library did not end the call, and otherwise the exit status and the outputs.
"""

import json
import os
import signal
import socket
import sys

from sandboxes.guest.anchor import NativeAnchor
from sandboxes.guest.driver_link import DriverLink
from sandboxes.guest.local_shell import LocalShell
from sandboxes.guest.local_shells import LocalShells
from sandboxes.guest.shell import Shell
from sandboxes.local import ordinary_calls


def learnt(program: str) -> tuple[LocalShells, ordinary_calls.OrdinaryCalls, socket.socket]:
    """Return shells whose next call the library may run."""
    shells = LocalShells({"PATH": os.environ["PATH"]}, "/", {}, None)
    shells.anchor = NativeAnchor.start(program)
    ours, proxys = socket.socketpair()
    ordinary = ordinary_calls.OrdinaryCalls(DriverLink(ours), shells)
    shell = shells.ready("main")
    shell.run(b"true")
    await_dump(shell)
    assert shells.take_dump(shell) == (0, False)
    ordinary.learn(shells.are_untouched)
    ended = ordinary.end()
    assert ended is shell
    assert ordinary.start(ended)
    return shells, ordinary, proxys


def await_dump(shell: Shell) -> None:
    os.set_blocking(shell.dump_fd, True)
    while not shell.read_dump():
        assert not shell.ended
    os.set_blocking(shell.dump_fd, False)


def main(library: str, program: str, commands: str) -> None:
    ordinary_calls._library = ordinary_calls.library(library)
    results: list[tuple[int, str, str] | None] = []
    for command in json.loads(commands):
        shells, ordinary, proxys = learnt(program)
        shell = ordinary.fresh_shell("main")
        assert isinstance(shell, LocalShell)
        ran = ordinary.run(shell, command.encode())
        assert ran is not None, "its first dump is another one"
        ended = ran.status is not None
        results.append((ran.status or 0, ran.stdout.decode(), ran.stderr.decode()) if ended else None)
        os.kill(-1, signal.SIGKILL)
        shells.kill_except(set())
        proxys.close()
    print(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
