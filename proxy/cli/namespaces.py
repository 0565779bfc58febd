"""Whether the launcher of `local` sandboxes can make its namespaces here, what refuses them, and what helps."""

import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from sandboxes import IMPORT_ROOT
from sandboxes.linux import syscalls as kernel
from sandboxes.rights import held

_CONTROLS = {
    "apparmor": "kernel/apparmor_restrict_unprivileged_userns",
    "clone": "kernel/unprivileged_userns_clone",
    "most": "user/max_user_namespaces",
}
"""Files below /proc/sys that decide who may make user namespaces."""
_CONTAINER = "In a container, give it the rights that docs/deploying.md lists for the driver local."
PROFILE = "forkpoint"
_PROBE = """\
from sandboxes.linux import syscalls as kernel
kernel.unshare({flags})
kernel.mount("", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
"""


class Probe(NamedTuple):
    """What came of an attempt to make the launcher's namespaces, and to change a mount in them."""

    ok: bool
    detail: str
    remedy: str


def probe() -> Probe:
    """Make the launcher's namespaces in a child process, because success would change this process."""
    if service := held.launcher_socket():
        lacking = ", ".join(held.missing())
        how = f"root, by the launcher at {service}"
        # The trial of the driver asks it for a sandbox.
        return Probe(not lacking, how + (f"; the capabilities {lacking} are missing" if lacking else ""), _CONTAINER)
    is_root = os.geteuid() == 0
    flags = kernel.CLONE_NEWNS | (0 if is_root else kernel.CLONE_NEWUSER)
    program = f"import sys; sys.path.insert(0, {IMPORT_ROOT!r})\n{_PROBE.format(flags=flags)}"
    # The launcher's interpreter: AppArmor goes by the path of the program.
    done = subprocess.run(  # noqa: S603 - our own interpreter and program
        [sys.executable, "-I", "-S", "-B", "-c", program], stdin=subprocess.DEVNULL, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    how = "root" if is_root else "unprivileged, in a user namespace"
    if done.returncode == 0:
        return Probe(True, how, "")
    refused = (done.stderr.strip().splitlines() or ["the kernel refuses them"])[-1].rpartition("] ")[2]
    if is_root and not kernel.holds(kernel.CAP_SYS_ADMIN):
        return Probe(False, f"{how}: {refused}; the capability SYS_ADMIN is missing", _CONTAINER)
    known = None if is_root else closed_to_users(_controls())
    cause, remedy = known or (_confinement(), _CONTAINER)
    return Probe(False, f"{how}: {refused}{cause and '; '}{cause}", remedy)


def profile(interpreter: str) -> str:
    """Return an AppArmor profile that allows user namespaces to one interpreter, and to nothing else."""
    return f"""\
# /etc/apparmor.d/{PROFILE}: lets Forkpoint's launcher make user namespaces. See docs/deploying.md.
# Load it with: apparmor_parser --replace /etc/apparmor.d/{PROFILE}
abi <abi/4.0>,
include <tunables/global>

profile {PROFILE} "{interpreter}" flags=(unconfined) {{
  userns,

  include if exists <local/{PROFILE}>
}}
"""


def shared_interpreter(interpreter: str) -> str:
    """Return a warning if an interpreter is the system's, whose profile would hold for every Python program."""
    if Path(interpreter).parent not in {Path("/usr/bin"), Path("/usr/local/bin"), Path("/bin")}:
        return ""
    return (
        f"{interpreter} runs other programs too, which the profile would allow user namespaces as well. Install "
        "Forkpoint into an environment with an interpreter of its own: python3 -m venv --copies."
    )


def closed_to_users(controls: Mapping[str, str]) -> tuple[str, str] | None:
    """Return why the machine keeps ordinary users from user namespaces, and what helps; None if it does not."""
    if controls["clone"] == "0":
        return "kernel.unprivileged_userns_clone is 0", "Run as root, or sysctl kernel.unprivileged_userns_clone=1."
    if controls["most"] == "0":
        return "user.max_user_namespaces is 0", "Run as root, or sysctl user.max_user_namespaces=15000."
    if controls["apparmor"] == "1":
        return (
            "AppArmor restricts user namespaces, as on Ubuntu 24.04 (apparmor_restrict_unprivileged_userns is 1)",
            "Run as root, or load the profile that `forkpoint doctor --apparmor` prints (docs/deploying.md).",
        )
    return None


def _confinement() -> str:
    """Return what confines this process, and so probably refuses it namespaces; empty if nothing does."""
    confined = []
    # Without AppArmor the kernel has no such file, or refuses to read it.
    with suppress(OSError):
        label = Path("/proc/self/attr/current").read_text().strip("\0\n")
        confined += [f"the AppArmor profile {label}"] if label.endswith("(enforce)") else []
    if "\nSeccomp:\t2" in Path("/proc/self/status").read_text():
        confined.append("a filter of system calls (seccomp)")
    return f"this process is confined by {' and '.join(confined)}" if confined else ""


def _controls() -> dict[str, str]:
    return {
        name: path.read_text().strip() if (path := Path("/proc/sys") / file).exists() else ""
        for name, file in _CONTROLS.items()
    }
