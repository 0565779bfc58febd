"""Commands that run in a side service: in its root directory, with its variables, its directory and its user (pure)."""

import posixpath
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from sandboxes.calls import ToolCall
from sandboxes.images.config import ImageConfig
from sandboxes.process_output import PATH
from sandboxes.server_spec import Service

SERVICES = "/.services"
"""The directory of a sandbox that has the files of its side services, a directory for each."""
ROOT = frozenset({"", "0", "root", "0:0", "root:root"})
"""Names of the user and group that a command has without `--userspec`."""
HOST_NAME = re.compile(r"[a-z][a-z0-9_-]{0,30}")
"""A name on the network, as a spec's `aliases` have it."""
_READY_S = (60.0, 600.0)
"""Shortest and longest time that a service gets to become ready: the spec's default and its limit."""


@dataclass(frozen=True, slots=True)
class ServiceFrame:
    """What surrounds each command of a service; its user is `user` or `user:group`, empty for root."""

    name: str
    environment: Mapping[str, str]
    workdir: str
    user: str

    def shell_text(self, command: Sequence[str]) -> str:
        """Return a line for the main container's shell that becomes a command of the service."""
        as_user = [] if self.user in ROOT else [f"--userspec={self.user}"]
        move = ["/bin/sh", "-c", 'cd -- "$0" && exec "$@"', self.workdir] if self.workdir != "/" else []
        before = shlex.join(["env", "-i", *(f"{key}={value}" for key, value in self.environment.items())])
        after = shlex.join([*as_user, f"{SERVICES}/{self.name}", *move, *command])
        # The program comes from the main image; `env` looks for programs in the service's search path.
        return f'c=$(command -v chroot) && exec {before} "$c" {after}'


def frame_of(name: str, service: Service, config: ImageConfig) -> ServiceFrame:
    """Return what surrounds the commands of a service, from its spec and the configuration of its image."""
    user = service.user or config.user
    home = {"HOME": "/root"} if user.partition(":")[0] in ("", "0", "root") else {}
    environment = {"PATH": PATH, "HOSTNAME": name, **home, **config.environment, **service.environment}
    return ServiceFrame(name, environment, service.working_dir or config.workdir or "/", user)


def call_in_service(call: ToolCall, frame: ServiceFrame) -> ToolCall:
    """Return the call of the main container that runs a process in a service, or works on the service's files."""
    arguments = {name: value for name, value in call.arguments.items() if name != "service"}
    if call.endpoint == "archive":
        return replace(call, arguments={**arguments, "root": f"{SERVICES}/{frame.name}"})
    if call.endpoint == "shell":
        # In a subshell, because the line replaces its shell. Without the session's input, which is not the service's.
        inner = replace(frame, user=str(arguments.pop("user", frame.user)))
        line = inner.shell_text(["/bin/sh", "-c", arguments["command"]])
        return replace(call, arguments={**arguments, "command": f"({line}) </dev/null"})
    terminal = {"TERM": "xterm"} if arguments.get("tty") else {}
    inner = replace(
        frame,
        environment={**frame.environment, **terminal, **(arguments.get("env") or {})},
        workdir=arguments.get("cwd") or frame.workdir,
        user=arguments.get("user") or frame.user,
    )
    argv = ["/bin/sh", "-c", inner.shell_text(arguments["argv"])]
    return replace(call, arguments={**arguments, "argv": argv, "env": {}, "cwd": "/", "user": None})


def ready_s(interval_s: float | None, timeout_s: float | None, start_s: float | None, retries: int | None) -> float:
    """Return the time until Docker would call a service unhealthy, within the limits of a spec; None for a default."""
    total_s = (start_s or 0) + ((interval_s or 30) + (timeout_s or 30)) * (retries or 3)
    return min(_READY_S[1], max(_READY_S[0], total_s))


def only_port(exposed: Iterable[str]) -> int | None:
    """Return the TCP port among those that an image or a create request exposes, such as "80/tcp", if it is one."""
    ports = [entry.partition("/") for entry in exposed]
    numbers = [number for number, _, protocol in ports if protocol in ("", "tcp") and number.isdigit()]
    return int(numbers[0]) if len(numbers) == 1 else None


_SYSTEM = (
    "/bin", "/boot", "/dev", "/etc", "/lib", "/lib32", "/lib64", "/proc", "/run", "/sbin", "/sys", "/usr", "/var/lib",
    "/var/run",
)  # fmt: skip
"""Directories that are mounted for what is in them, and with them sockets such as Docker's."""


def absolute(path: str) -> str:
    """Return a path from the root in its shortest form, whatever slashes it begins with."""
    # Two slashes at the beginning would stay.
    return posixpath.normpath(f"/{path.lstrip('/')}")


def is_system(path: str) -> bool:
    """Return whether an absolute path, in its shortest form, is the root or in a directory of the system."""
    return path == "/" or any(path == system or path.startswith(f"{system}/") for system in _SYSTEM)


def making(folders: Iterable[str], memory: Iterable[str] = ()) -> tuple[str, ...]:
    """Return the set-up commands that make directories; those for memory file systems are open to all users."""
    lists = [("mkdir -p --", sorted(folders)), ("mkdir -p -m 1777 --", sorted(memory))]
    return tuple(f"{command} {shlex.join(paths)}" for command, paths in lists if paths)
