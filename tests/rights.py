"""Runs a program with exactly the rights that a container or a hardened machine gives it.

`python -m tests.rights '{"capabilities": ["SETUID"], "refused": ["mount"]}' PROGRAM…` gives up the rest, then executes
the program; a fork that has imported it runs it as it is. `Rights.wrapper` is this command, for the `wrapper` of
`tests.machine.Proxy`.
"""

import json
import os
import re
import runpy
import struct
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from sandboxes.linux import cgroups, confine
from sandboxes.linux import syscalls as kernel
from tests import forks, known_machine

CAPABILITIES = (
    "CHOWN", "DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETPCAP",
    "LINUX_IMMUTABLE", "NET_BIND_SERVICE", "NET_BROADCAST", "NET_ADMIN", "NET_RAW", "IPC_LOCK", "IPC_OWNER",
    "SYS_MODULE", "SYS_RAWIO", "SYS_CHROOT", "SYS_PTRACE", "SYS_PACCT", "SYS_ADMIN", "SYS_BOOT", "SYS_NICE",
    "SYS_RESOURCE", "SYS_TIME", "SYS_TTY_CONFIG", "MKNOD", "LEASE", "AUDIT_WRITE", "AUDIT_CONTROL", "SETFCAP",
    "MAC_OVERRIDE", "MAC_ADMIN", "SYSLOG", "WAKE_ALARM", "BLOCK_SUSPEND", "AUDIT_READ", "PERFMON", "BPF",
    "CHECKPOINT_RESTORE",
)  # fmt: skip
"""The names of the capabilities, by number (linux/capability.h)."""
DOCKER = (
    "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETPCAP", "NET_BIND_SERVICE", "NET_RAW",
    "SYS_CHROOT", "MKNOD", "AUDIT_WRITE", "SETFCAP",
)  # fmt: skip
"""The capabilities that Docker gives a container."""
MOUNTS = (
    "mount", "umount2", "pivot_root", "open_tree", "move_mount", "fsopen", "fsconfig", "fsmount", "fspick",
    "mount_setattr",
)  # fmt: skip
"""The calls that Docker's profile refuses beside those that make namespaces, and that AppArmor refuses a process that
was not allowed user namespaces."""
_CLONE3, _ERRNO, _ALLOW = 435, 0x00050000, 0x7FFF0000
_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_MORE_CALLS = {"chroot": (161, 51), "prctl": (157, 167)}
"""Numbers of calls (x86_64, aarch64) that sandboxes may make, so that `confine.REFUSED` has none."""


@dataclass(frozen=True, slots=True)
class Rights:
    """What a program may do.

    Attributes:
        capabilities: The capabilities that it can have; None for all of this machine's. Another user than root has
            these from its start, as a unit's `AmbientCapabilities=` gives them.
        refused: The system calls that fail with EPERM. "clone" stands for a clone that makes namespaces.
        absent: Whether clone3 does not exist, as in Docker's profile.
        uid: The user that it runs as.
        no_new_privileges: Whether set-uid programs give it nothing.
        masked: Whether /proc/sys and control groups are read-only, as in containers.
    """

    capabilities: tuple[str, ...] | None = None
    refused: tuple[str, ...] = ()
    absent: bool = False
    uid: int = 0
    no_new_privileges: bool = False
    masked: bool = False

    @property
    def wrapper(self) -> tuple[str, ...]:
        """The command before a program."""
        return (sys.executable, "-m", "tests.rights", json.dumps(asdict(self)))

    def keeps(self, capability: str) -> bool:
        """Return whether the program has a capability, as far as this machine has it."""
        return self.uid == 0 and (self.capabilities is None or capability in self.capabilities)

    def doctor(self, folder: Path) -> dict[str, dict[str, Any]]:
        """Return what doctor shows a proxy with these rights, by name."""
        os.chown(folder, self.uid, self.uid)
        command = [sys.executable, "-m", "forkpoint", "doctor", "--json", "--data", str(folder / "data")]
        shown = folder / "shown"
        forks.server().fork([*self.wrapper[2:], *command], folder, os.environ, shown).wait(120)
        assert not (folder / "data").exists()
        # Before it is what a process of a trial said that failed.
        text = "\n" + shown.read_text()
        return {requirement["name"]: requirement for requirement in json.loads(text[text.index("\n[") :])}

    def take(self) -> None:
        """Give up every other right, for good."""
        if self.masked:
            kernel.unshare(kernel.CLONE_NEWNS)
            kernel.mount("", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
            kernel.mount("/proc/sys", "/proc/sys", "", kernel.MS_BIND)
            for path in ["/proc/sys", *(str(path) for _, path in cgroups.hierarchies())]:
                kernel.mount("", path, "", kernel.MS_BIND | kernel.MS_REMOUNT | kernel.MS_RDONLY)
        if self.no_new_privileges:
            kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        if self.uid:
            _become_user(self.uid, self.capabilities or ())
        elif self.capabilities is not None:
            for number, name in enumerate(CAPABILITIES):
                if name not in self.capabilities and kernel.permitted() >> number & 1:
                    kernel.prctl(kernel.PR_CAPBSET_DROP, number)
        if self.refused or self.absent:
            # Without no_new_privs a filter needs CAP_SYS_ADMIN, which root still has here.
            if self.uid:
                kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
            kernel.seccomp(_refusing(self.refused, absent=self.absent))


def least_rights() -> dict[str, str]:
    """Return the capabilities of `local` in the table of docs/deploying.md, each with what happens without it."""
    page = (Path(__file__).parents[1] / "docs" / "deploying.md").read_text()
    table = page.partition("| Capability of `local`")[2].partition("\n\n")[0]
    rows = [row.split("|")[1:-1] for row in table.splitlines() if row.startswith("| `")]
    return {name: row[-1].strip() for row in rows for name in re.findall(r"`([A-Z_]+)`", row[0])}


def capabilities_here() -> tuple[str, ...]:
    """Return the capabilities that this machine has; a process cannot be given others."""
    return tuple(name for number, name in enumerate(CAPABILITIES) if kernel.permitted() >> number & 1)


POD = Rights(DOCKER, (*MOUNTS, "unshare", "setns", "clone"), absent=True, masked=True)
"""A container with Docker's default rights."""
BARE_POD = replace(POD, capabilities=(), no_new_privileges=True)
"""A container as the restricted policy of Kubernetes has it, but for root."""
UBUNTU = Rights((), (*MOUNTS, "chroot", "sethostname"), uid=1000)
"""An ordinary user of Ubuntu 24.04, who can make a user namespace, in which AppArmor then refuses all that needs a
right."""


def _become_user(uid: int, capabilities: Iterable[str]) -> None:
    """Become another user, with some capabilities; or an ordinary one who can read this interpreter in root's home."""
    numbers = [CAPABILITIES.index(name) for name in (capabilities or ["DAC_READ_SEARCH"])]
    confine.become_user_with(numbers, uid, uid)


def _refusing(names: Iterable[str], *, absent: bool) -> bytes:
    """Return a filter of system calls as a BPF program (seccomp(2))."""
    column = ("x86_64", "aarch64").index(kernel.MACHINE)
    refused = _instruction(_RETURN, _ERRNO | confine.EPERM)
    program = [_instruction(_LOAD, 0)]
    if absent:
        program += [_instruction(_EQUAL, _CLONE3, 0, 1), _instruction(_RETURN, _ERRNO | confine.ENOSYS)]
    for name in names:
        if name == "clone":
            continue
        number = (confine.REFUSED.get(name) or _MORE_CALLS[name])[column]
        program += [_instruction(_EQUAL, number or 0, 0, 1), refused]
    if "clone" in names:
        program += [
            _instruction(_EQUAL, (56, 220)[column], 0, 4), _instruction(_LOAD, 16),
            _instruction(_ANY_BIT, confine.NEW_NAMESPACES, 0, 1), refused, _instruction(_RETURN, _ALLOW),
        ]  # fmt: skip
    return b"".join([*program, _instruction(_RETURN, _ALLOW)])


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def main() -> None:
    """Take the rights in the first argument, and execute the rest."""
    members = json.loads(sys.argv[1])
    kept = members["capabilities"]
    members |= {"capabilities": None if kept is None else tuple(kept), "refused": tuple(members["refused"])}
    rights = Rights(**members)
    rights.take()
    # What a user may reach of itself is decided when a program is executed; root's rights need not be.
    if rights.uid == 0 and sys.argv[2:4] == [sys.executable, "-m"] and forks.PRELOADED[0] in sys.modules:
        sys.argv[:4] = []
        known_machine.forget()
        kernel.capset(sum(1 << CAPABILITIES.index(name) for name in capabilities_here() if rights.keeps(name)))
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        os.execvp(sys.argv[2], sys.argv[2:])  # noqa: S606 - what the test names


if __name__ == "__main__":
    main()
