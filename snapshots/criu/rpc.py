"""The one door to CRIU, which checkpoints and restores live processes: its program, and its RPC over a socket.

CRIU runs inside a sandbox's own namespaces, so it meets none that it would have to save or to build: that is what makes
a checkpoint take tens of milliseconds (docs/decisions/0008-criu-inside.md). What it looks up in a file system is then
the sandbox's, where an agent may have put anything; so our copy of the program reads its cache of kernel features from
a descriptor, no plug-in and no configuration file, and finds no other program to run.
"""

import asyncio
import os
import shutil
import socket
import subprocess
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from google.protobuf.message import Message

SOCKET_FD, IMAGES_FD, KERNEL_FD = 3, 7, 9
"""Where the program finds its RPC socket, the directory of the images, and the cache of kernel features."""
ARGUMENTS = ("criu", "--no-default-config", "--libdir", "/dev", "swrk", str(SOCKET_FD))
_CACHE_PATH, _CACHE_AS_FD = b"/run/criu.kdat\0", b"/dev/fd/9\0\0\0\0\0\0"
_LOG = "criu.log"
_DUMP, _RESTORE, _NOTIFY = 1, 2, 6
_PATIENCE_S = 60

# What we use of images/rpc.proto of CRIU 4.2: name, number, kind; * for repeated.
_MESSAGES: dict[str, tuple[tuple[str, int, str], ...]] = {
    "inherit_fd": (("key", 1, "text"), ("fd", 2, "int")),
    "criu_opts": (
        ("images_dir_fd", 1, "int"),
        ("pid", 2, "int"),
        ("leave_running", 3, "bool"),
        ("tcp_established", 5, "bool"),
        ("shell_job", 7, "bool"),
        ("file_locks", 8, "bool"),
        ("log_level", 9, "int"),
        ("log_file", 10, "text"),
        ("notify_scripts", 12, "bool"),
        ("parent_img", 14, "text"),
        ("track_mem", 15, "bool"),
        ("link_remap", 18, "bool"),
        ("inherit_fd", 27, "*inherit_fd"),
        ("manage_cgroups_mode", 34, "int"),
        ("ghost_limit", 35, "uint"),
        ("external", 37, "*text"),
        ("timeout", 45, "uint"),
        ("network_lock", 64, "int"),
        ("skip_file_rwx_check", 66, "bool"),
        ("images_dir", 68, "text"),
    ),
    "criu_req": (("type", 1, "int"), ("opts", 2, "criu_opts"), ("notify_success", 3, "bool"), ("keep_open", 4, "bool")),
    "criu_restore_resp": (("pid", 1, "int"),),
    "criu_notify": (("script", 1, "text"), ("pid", 2, "int")),
    "criu_resp": (
        ("type", 1, "int"),
        ("success", 2, "bool"),
        ("restore", 4, "criu_restore_resp"),
        ("notify", 5, "criu_notify"),
        ("cr_errno", 7, "int"),
        ("cr_errmsg", 9, "text"),
    ),
}
_PLACES = ("/usr/local/sbin/criu", "/usr/sbin/criu")
_IGNORE_CGROUPS, _SKIP_NETWORK_LOCK = 0, 3
GHOST_BYTES = 256 << 20
"""Largest deleted file, still open, whose content goes into the images."""


class CriuMissingError(RuntimeError):
    """There is no CRIU here that works; the text says why, and how to get one."""


class CriuError(RuntimeError):
    """CRIU could not dump or restore these processes; the text is its own reason."""


@cache
def _types() -> "dict[str, type[Message]]":
    """Return the message classes by name. Loading protobuf takes 0.1 s, so it waits for the first checkpoint."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory  # noqa: PLC0415 - see above

    described = descriptor_pb2.FieldDescriptorProto
    kinds = {
        "bool": described.TYPE_BOOL, "int": described.TYPE_INT32, "uint": described.TYPE_UINT32,
        "text": described.TYPE_STRING,
    }  # fmt: skip
    file = descriptor_pb2.FileDescriptorProto(name="criu_rpc.proto", package="criu", syntax="proto2")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, number, kind in fields:
            added = message.field.add(name=field, number=number, label=described.LABEL_OPTIONAL)
            if kind.startswith("*"):
                added.label = described.LABEL_REPEATED
            if (plain := kinds.get(kind.lstrip("*"))) is not None:
                added.type = plain
            else:
                added.type, added.type_name = described.TYPE_MESSAGE, f".criu.{kind.lstrip('*')}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    names = (f"criu.{name}" for name in _MESSAGES)
    return {name.partition(".")[2]: message_factory.GetMessageClass(pool.FindMessageTypeByName(name)) for name in names}


class Criu:
    """CRIU made ready: `program` is our copy, `kernel` its cache of what this kernel can do."""

    def __init__(self, program: Path, kernel: Path) -> None:
        self.program, self.kernel = program, kernel

    @classmethod
    def prepare(cls, directory: Path, found: Path | None = None) -> "Criu":
        """Make our copy of the machine's CRIU in directory, and find out what it can do here. Blocking; 0.1 s.

        Raises:
            CriuMissing: there is none, it does not work on this kernel, or we are not root.
        """
        if os.geteuid() != 0:
            raise CriuMissingError("checkpoints of live processes need root: CRIU restores processes with their pids")
        names = [found] if found else [Path(path) for path in (shutil.which("criu"), *_PLACES) if path]
        present = [name for name in dict.fromkeys(names) if name.is_file()]
        if not present:
            raise CriuMissingError("criu is not installed: run docker/install-criu.sh; Debian 13: apt install criu")
        for name in present:
            try:
                program, kernel = _patched(name), _ask_kernel(name)
                break
            except CriuMissingError:
                # An old one may stand beside one that works.
                if name == present[-1]:
                    raise
        directory.mkdir(parents=True, exist_ok=True)
        copy = directory / "criu"
        copy.write_bytes(program)
        copy.chmod(0o700)
        (directory / "kernel").write_bytes(kernel)
        return cls(copy, directory / "kernel")


def _patched(criu: Path) -> bytes:
    program = criu.read_bytes()
    if program.count(_CACHE_PATH) != 1:
        raise CriuMissingError(f"{criu} is not a CRIU that is known here: it keeps its cache elsewhere than in /run")
    return program.replace(_CACHE_PATH, _CACHE_AS_FD)


def _ask_kernel(criu: Path) -> bytes:
    """Return the cache that `criu check` leaves in /run, where that is a tmpfs; ours is, in namespaces of its own."""
    script = 'mount -t tmpfs none /run && "$1" check >&2 && cat /run/criu.kdat'
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh", str(criu)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_PATIENCE_S, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CriuMissingError(f"{criu} check failed: {error}") from error
    if done.returncode or not done.stdout:
        said = done.stderr.decode(errors="replace").strip().splitlines() or ["it says nothing"]
        raise CriuMissingError(f"{criu} does not work on this kernel: {said[-1]}")
    return done.stdout


class CriuConversation:
    """One CRIU process, one request. Close it when done; CRIU then ends, and lets go of what it held.

    outer_session: the tree's root is in a session of a process above it; restored, it is in CRIU's.
    """

    def __init__(self, end: socket.socket, *, outer_session: bool) -> None:
        end.setblocking(False)
        self._end, self._outer_session = end, outer_session

    def close(self) -> None:
        self._end.close()

    async def dump(
        self, pid: int, images: Path, held: Callable[[], Awaitable[None]], *, external: Iterable[str] = ()
    ) -> None:
        """Dump the tree below pid into images; await held while its processes stand still; let them run on.

        external: CRIU's names of files that it is to be given again at restore.

        Raises:
            CriuRefused: it cannot be dumped; the processes run on.
        """
        options = {
            "pid": pid,
            "leave_running": True,
            "link_remap": True,
            "ghost_limit": GHOST_BYTES,
            "external": list(external),
        }
        await self._carry_out(_DUMP, options, images, held)

    async def restore(self, images: Path, inherit: Mapping[str, int]) -> int:
        """Restore images; return the pid of their root.

        inherit: pipes and external files, by their names when they were dumped -> CRIU's descriptor of what takes
        their place.

        Raises:
            CriuRefused: it cannot be restored here.
        """
        options = {"inherit_fd": [{"key": key, "fd": fd} for key, fd in inherit.items()]}
        answer = await self._carry_out(_RESTORE, options, images, None)
        return int(answer.restore.pid)

    async def _carry_out(
        self, kind: int, options: Mapping[str, Any], images: Path, held: Callable[[], Awaitable[None]] | None
    ) -> Any:
        opts = {
            "images_dir_fd": -1,
            "images_dir": f"/proc/self/fd/{IMAGES_FD}",
            "log_file": _LOG,
            "log_level": 1,
            "manage_cgroups_mode": _IGNORE_CGROUPS,
            "network_lock": _SKIP_NETWORK_LOCK,
            "tcp_established": True,
            "file_locks": True,
            # The files of the same moment come with the images.
            "skip_file_rwx_check": True,
            "notify_scripts": held is not None,
            "shell_job": self._outer_session,
            "timeout": _PATIENCE_S,
            **options,
        }
        from google.protobuf.message import DecodeError  # noqa: PLC0415 - see `_types`

        try:
            async with asyncio.timeout(_PATIENCE_S):
                await self._send({"type": kind, "opts": opts})
                while (answer := await self._receive()).type == _NOTIFY:
                    if held is not None and answer.notify.script == "post-dump":
                        await held()
                    await self._send({"type": _NOTIFY, "notify_success": True})
        except TimeoutError as error:
            raise CriuError(f"CRIU did not end within {_PATIENCE_S} s") from error
        except (OSError, DecodeError) as error:
            raise CriuError(f"CRIU went away: {_reason(images) or error}") from error
        if not answer.success:
            raise CriuError(_reason(images) or answer.cr_errmsg or f"error {answer.cr_errno}")
        return answer

    async def _send(self, fields: Mapping[str, Any]) -> None:
        await asyncio.get_running_loop().sock_sendall(self._end, _types()["criu_req"](**fields).SerializeToString())

    async def _receive(self) -> Any:
        data = await asyncio.get_running_loop().sock_recv(self._end, 1 << 16)
        if not data:
            raise ConnectionError("it closed the connection")
        return _types()["criu_resp"].FromString(data)


def _reason(images: Path) -> str:
    """Return what CRIU's log says first of what went wrong, without its source places."""
    try:
        lines = (images / _LOG).read_text(errors="replace").splitlines()
    except OSError:
        return ""
    # That of descriptors is said, and harmless, where the kernel allows fewer than it did when it was asked.
    errors = [line for line in lines if "Error (" in line and "RLIMIT_NOFILE for self" not in line]
    said = [line.partition("Error (")[2].partition("): ")[2] for line in errors]
    return "; ".join(part.strip() for part in said[:2] if part)
