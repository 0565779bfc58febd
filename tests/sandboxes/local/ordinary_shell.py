"""Runs commands with the library of `ordinary_calls`, as pid 1 of a pid namespace: a program for its tests.

The anchor is a program, or with the folder that `shell_files.copies` has made one that forks shells from templates.
For each command it prints null if the library did not end the call, and otherwise the exit status and the outputs.
With the argument `few`, pid 1 has room for one more descriptor while the library runs.
"""

import json
import os
import resource
import signal
import socket
import sys
from pathlib import Path

from sandboxes.guest.anchors.native_anchor import NativeAnchor
from sandboxes.guest.driver_link import DriverLink
from sandboxes.guest.local_shell import LocalShell
from sandboxes.guest.local_shells import LocalShells
from sandboxes.guest.shell import Shell
from sandboxes.local import ordinary_calls
from tests.sandboxes.guest import forking_anchor


def learnt(program: str) -> tuple[LocalShells, ordinary_calls.OrdinaryCalls, socket.socket]:
    """Return shells whose next call the library may run."""
    shells = LocalShells({"PATH": "/usr/local/bin:/usr/bin:/usr/sbin:/bin:/sbin"}, "/", {}, None)
    forks = os.path.isdir(program)  # noqa: PTH112 - as in pid 1
    shells.anchor = forking_anchor.start(Path(program)) if forks else NativeAnchor.start(program)
    ours, proxys = socket.socketpair()
    ordinary = ordinary_calls.OrdinaryCalls(DriverLink(ours), shells)
    shell = shells.for_command("main")
    assert isinstance(shell, LocalShell)
    assert (shell.template is not None) == forks
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


def leave_one_descriptor(ordinary: ordinary_calls.OrdinaryCalls) -> None:
    """Lower the limit of this process, as `prlimit --pid 1` does, and let the library learn that."""
    # `poll` fails below the number of descriptors that it is given, so free numbers below that are used up.
    while (free := os.open("/dev/null", os.O_RDONLY)) < 10:
        pass
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    facts = ordinary._see(ordinary_calls._SHELL)
    assert facts
    ordinary._kept.append(facts)
    ordinary._shell.facts = ordinary_calls._Bytes(facts, len(facts))


def main(library: str, program: str, commands: str, descriptors: str = "many") -> None:
    ordinary_calls._library = ordinary_calls.library(library)
    results: list[tuple[int, str, str] | None] = []
    for command in json.loads(commands):
        shells, ordinary, proxys = learnt(program)
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        if descriptors == "few":
            leave_one_descriptor(ordinary)
        shell = ordinary.fresh_shell("main")
        assert isinstance(shell, LocalShell)
        ran = ordinary.run(shell, command.encode())
        assert ran is not None, "its first dump is another one"
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        ended = ran.status is not None
        results.append((ran.status or 0, ran.stdout.decode(), ran.stderr.decode()) if ended else None)
        os.kill(-1, signal.SIGKILL)
        shells.kill_except(set())
        proxys.close()
    print(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
