"""CRIU's RPC protocol: one request for a dump or a restore, over the socket of one CRIU process.

The messages are generated from `rpc.proto`. A conversation goes like this, one message a packet (SOCK_SEQPACKET):

1. We send `criu_req` with the type DUMP or RESTORE and the options.
2. For a dump, CRIU sends `criu_resp` with the type NOTIFY at each stage, and waits for a `criu_req` NOTIFY in return.
   At the stage `post-dump` the images are written and the processes are still frozen.
3. CRIU sends `criu_resp` with the result, and exits when we close the socket.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sandboxes.ipc.inherited import IMAGES_FD

if TYPE_CHECKING:
    from snapshots.criu import rpc_pb2

OPERATION_S = 60
"""Longest dump or restore; our limit and CRIU's own. Both take tens of milliseconds for an ordinary shell.

The value is an estimate.
"""

MAX_GHOST_BYTES = 256 << 20
"""Limits a deleted file that is still open: CRIU stores its content in the images, up to this size.

The value is an estimate.
"""

_MAX_PACKET_BYTES = 1 << 16
"""Limits one response. CRIU's responses hold a few numbers and one error text."""

_LOG = "criu.log"
_LOG_ERRORS = 1
"""CRIU's log level at which it writes errors only."""


class CriuError(RuntimeError):
    """CRIU could not dump or restore these processes; the text is its own reason."""


class CriuConversation:
    """The client's end of one CRIU process, for one request. Closing it lets CRIU exit."""

    def __init__(self, end: socket.socket, *, outer_session: bool) -> None:
        """Take over the socket.

        Args:
            end: The socket to CRIU.
            outer_session: Whether the session of the tree's root belongs to a process outside the tree, as in a
                container. A restored root then joins CRIU's session ("shell job").
        """
        end.setblocking(False)
        self._end, self._outer_session = end, outer_session

    def close(self) -> None:
        """Close the socket."""
        self._end.close()

    async def dump(
        self, pid: int, images: Path, on_frozen: Callable[[], Awaitable[None]], *, external: Iterable[str] = ()
    ) -> None:
        """Dump a process tree, which then runs on.

        Args:
            pid: The tree's root, in CRIU's pid namespace.
            images: The directory of the images, as the proxy sees it; CRIU has it as a descriptor.
            on_frozen: Awaited while the processes are frozen.
            external: CRIU's names of files that the restore will pass as descriptors.

        Raises:
            CriuError: The tree cannot be dumped; its processes run on.
        """
        options = {
            "pid": pid,
            "leave_running": True,
            # Files that were deleted but have other links get a temporary name, by which a restore opens them.
            "link_remap": True,
            "ghost_limit": MAX_GHOST_BYTES,
            "external": list(external),
        }
        await self._operate("DUMP", options, images, on_frozen)

    async def restore(self, images: Path, inherit: Mapping[str, int]) -> int:
        """Restore a process tree.

        Args:
            images: The directory of the images.
            inherit: Pipes and external files by their names at the dump, with the descriptors of CRIU's that replace
                them.

        Returns:
            The pid of the tree's root.

        Raises:
            CriuError: The tree cannot be restored here.
        """
        options = {"inherit_fd": [{"key": key, "fd": fd} for key, fd in inherit.items()]}
        return (await self._operate("RESTORE", options, images, None)).restore.pid

    async def _operate(
        self, kind: str, options: Mapping[str, Any], images: Path, on_frozen: Callable[[], Awaitable[None]] | None
    ) -> "rpc_pb2.criu_resp":
        # protobuf takes 0.1 s to load, and most proxies never make a checkpoint.
        from google.protobuf.message import DecodeError  # noqa: PLC0415 - see above

        from snapshots.criu import rpc_pb2 as rpc  # noqa: PLC0415 - see above

        opts = rpc.criu_opts(
            # CRIU looks up images_dir_fd among its client's descriptors, in /proc/<client's pid>. The client is the
            # proxy, which has no pid in the sandbox. -1 makes CRIU take the path, which leads to its own descriptor.
            images_dir_fd=-1,
            images_dir=f"/proc/self/fd/{IMAGES_FD}",
            # Relative to the images' directory, where the proxy reads it.
            log_file=_LOG,
            log_level=_LOG_ERRORS,
            # The driver places processes into control groups; CRIU would look for cgroups that a sandbox does not have.
            manage_cgroups_mode=rpc.IGNORE,
            # Connections stay inside the sandbox's own network, where no peer can notice the pause.
            network_lock=rpc.SKIP,
            tcp_established=True,
            file_locks=True,
            # The files of the same moment come with the images, so their modes cannot have changed meanwhile.
            skip_file_rwx_check=True,
            # A restore needs no notification, and each one costs a round trip.
            notify_scripts=on_frozen is not None,
            shell_job=self._outer_session,
            # CRIU gives up by itself, too: a proxy that died cannot stop it.
            timeout=OPERATION_S,
            **options,
        )
        try:
            async with asyncio.timeout(OPERATION_S):
                await self._send(rpc.criu_req(type=kind, opts=opts))
                # Step 2 repeats until CRIU sends its result, which has the request's type.
                while (response := rpc.criu_resp.FromString(await self._receive())).type == rpc.NOTIFY:
                    if on_frozen is not None and response.notify.script == "post-dump":
                        await on_frozen()
                    # CRIU waits for this before it goes on.
                    await self._send(rpc.criu_req(type=rpc.NOTIFY, notify_success=True))
        except TimeoutError as error:
            raise CriuError(f"CRIU did not end within {OPERATION_S} s") from error
        except (OSError, DecodeError) as error:
            raise CriuError(f"CRIU exited: {_logged_reason(images) or error}") from error
        # CRIU's error message is often empty; its log names the first thing that went wrong.
        if not response.success:
            raise CriuError(_logged_reason(images) or response.cr_errmsg or f"error {response.cr_errno}")
        return response

    async def _send(self, request: "rpc_pb2.criu_req") -> None:
        await asyncio.get_running_loop().sock_sendall(self._end, request.SerializeToString())

    async def _receive(self) -> bytes:
        data = await asyncio.get_running_loop().sock_recv(self._end, _MAX_PACKET_BYTES)
        if not data:
            raise ConnectionError("it closed the connection")
        return data


def _logged_reason(images: Path) -> str:
    """Return the first two errors of CRIU's log, without source positions; empty if there are none."""
    try:
        lines = (images / _LOG).read_text(errors="replace").splitlines()
    except OSError:
        return ""
    # CRIU logs a harmless error about RLIMIT_NOFILE when the kernel allows fewer descriptors than at the probe.
    errors = [line for line in lines if "Error (" in line and "RLIMIT_NOFILE for self" not in line]
    reasons = [line.partition("Error (")[2].partition("): ")[2] for line in errors]
    return "; ".join(reason.strip() for reason in reasons[:2] if reason)
