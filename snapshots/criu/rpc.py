"""CRIU's RPC protocol: one request for a dump or a restore, over the socket of one CRIU process.

One message a packet (SOCK_SEQPACKET): we send `criu_req` with the type DUMP or RESTORE and the options. CRIU sends
`criu_resp` with the type NOTIFY at each stage, and waits for a `criu_req` NOTIFY in return
(`snapshots.criu.checkpoints` has hooks). Then it sends `criu_resp` with the result, and exits when we close the socket.
"""

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sandboxes.ipc.inherited import IMAGES_FD

if TYPE_CHECKING:
    from snapshots.criu import rpc_pb2

OPERATION_S = 60
"""Longest dump or restore; our limit and CRIU's own. Both take tens of milliseconds for an ordinary shell. The value is
an estimate."""

MAX_GHOST_BYTES = 256 << 20
"""Limits a deleted file that is still open: CRIU stores its content in the images, up to this size. The value is an
estimate."""

STOPPED = "query-ext-files"
"""The stage of a dump at which the processes stand still, and nothing of them was looked up yet."""

_MAX_PACKET_BYTES = 1 << 16
"""Limits one response. CRIU's responses hold a few numbers and one error text."""

_LOG_ERRORS = 1
"""CRIU's log level at which it writes errors only."""

_MAX_LOG_BYTES = 1 << 16
"""Limits what is read of the log. Its first lines name the reason of a failure."""


class CriuError(RuntimeError):
    """CRIU could not dump or restore these processes; the text is its own reason."""


class CriuUnstartedError(CriuError):
    """CRIU could not be started: the machine failed, and nothing has touched the processes."""


class CriuGoneError(CriuError):
    """CRIU ended amid its work, killed or crashed: its code may be left in the processes of a dump."""


class CriuConversation:
    """The client's end of one CRIU process, for one request. Closing it lets CRIU exit."""

    def __init__(self, end: socket.socket, log: int) -> None:
        """Take over the socket to CRIU. `log` is a descriptor of the file for CRIU's errors; it stays the caller's."""
        end.setblocking(False)
        self._end, self._log = end, log
        self._stages: set[str] = set()  # The stages that CRIU was let pass.

    def close(self) -> None:
        """Close the socket."""
        self._end.close()

    async def dump(
        self,
        pid: int,
        watched: Sequence[str],
        on_held: Callable[[], Awaitable[Iterable[str]]],
        on_dumped: Callable[[], Awaitable[None]],
    ) -> None:
        """Dump a process tree, which then runs on. `pid` is its root, in CRIU's pid namespace.

        `watched` are paths where CRIU looks for directories that processes watch. `on_held` is awaited when the
        processes are frozen, before CRIU looks up what they hold; it returns CRIU's names of files that the restore
        will pass as descriptors, or raises: then nothing is dumped. `on_dumped` is awaited when the images are written,
        while the processes are still frozen.
        """
        options = {"pid": pid, "leave_running": True, "ghost_limit": MAX_GHOST_BYTES, "irmap_scan_paths": watched}
        # Without the first hook, agents could lead CRIU to the host: a CRIU that has no such stage must not dump.
        stages = await self._operate("DUMP", options, {STOPPED: on_held, "post-dump": on_dumped})
        if STOPPED not in stages:
            raise CriuError("this version does not let us look at the processes first (it needs 3.16)")

    async def restore(self, inherit: Mapping[str, int], on_restored: Callable[[], Awaitable[None]]) -> None:
        """Restore a process tree; `inherit` has CRIU's descriptors that replace pipes and files, by name at the dump.

        `on_restored` is awaited when everything is restored, before the processes run.
        """
        options = {"inherit_fd": [{"key": key, "fd": fd} for key, fd in inherit.items()]}
        if "pre-resume" not in await self._operate("RESTORE", options, {"pre-resume": on_restored}):
            raise CriuError("this version does not tell when everything is restored")

    async def _operate(
        self, kind: str, options: Mapping[str, Any], hooks: Mapping[str, Callable[[], Awaitable[Iterable[str] | None]]]
    ) -> set[str]:
        # protobuf takes 0.1 s to load, and most proxies never make a checkpoint.
        from google.protobuf.message import DecodeError  # noqa: PLC0415 - see above

        from snapshots.criu import rpc_pb2 as rpc  # noqa: PLC0415 - see above

        opts = rpc.criu_opts(
            # CRIU looks up images_dir_fd among its client's descriptors, in /proc/<client's pid>. The client is the
            # proxy, which has no pid in the sandbox. -1 makes CRIU take the path, which leads to its own descriptor.
            images_dir_fd=-1,
            images_dir=f"/proc/self/fd/{IMAGES_FD}",
            # The operator has put the log's descriptor there. In the images' directory, a restore could not write it.
            log_to_stderr=True,
            log_level=_LOG_ERRORS,
            # The driver places processes into control groups; CRIU would look for cgroups that a sandbox does not have.
            manage_cgroups_mode=rpc.IGNORE,
            # Connections stay inside the sandbox's own network, where no peer can notice the pause.
            network_lock=rpc.SKIP,
            tcp_established=True,
            file_locks=True,
            # The files of the same moment come with the images, so their modes cannot have changed meanwhile.
            skip_file_rwx_check=True,
            notify_scripts=True,
            # CRIU gives up by itself, too: a proxy that died cannot stop it.
            timeout=OPERATION_S,
            **options,
        )
        try:
            async with asyncio.timeout(OPERATION_S):
                await self._send(rpc.criu_req(type=kind, opts=opts))
                # Step 2 repeats until CRIU sends its result, which has the request's type.
                while (response := rpc.criu_resp.FromString(await self._receive())).type == rpc.NOTIFY:
                    hook = hooks.get(response.notify.script)
                    external = None if hook is None else await hook()
                    self._stages.add(response.notify.script)
                    answer = rpc.criu_req(type=rpc.NOTIFY, notify_success=True)
                    if external:
                        answer.opts.CopyFrom(rpc.criu_opts(images_dir_fd=-1, external=external))
                    # CRIU waits for this before it goes on.
                    await self._send(answer)
        except TimeoutError as error:
            raise CriuError(f"CRIU did not end within {OPERATION_S} s") from error
        except DecodeError as error:
            raise self._gone(error) from error
        # CRIU's error message is often empty; its log names the first thing that went wrong.
        if not response.success:
            raise CriuError(self._logged_reason() or response.cr_errmsg or f"error {response.cr_errno}")
        return self._stages

    async def _send(self, request: "rpc_pb2.criu_req") -> None:
        try:
            await asyncio.get_running_loop().sock_sendall(self._end, request.SerializeToString())
        except OSError as error:
            raise self._gone(error) from error

    async def _receive(self) -> bytes:
        try:
            data = await asyncio.get_running_loop().sock_recv(self._end, _MAX_PACKET_BYTES)
        except OSError as error:
            raise self._gone(error) from error
        if not data:
            raise self._gone("it closed the connection")
        return data

    def _gone(self, why: object) -> CriuError:
        text = f"CRIU exited: {self._logged_reason() or why}"
        # Up to this stage CRIU has only stopped the processes of a dump, and its end lets them go on (ptrace(2)).
        return CriuGoneError(text) if STOPPED in self._stages else CriuError(text)

    def _logged_reason(self) -> str:
        """Return the first two errors of CRIU's log, without source positions; empty if there are none."""
        lines = os.pread(self._log, _MAX_LOG_BYTES, 0).decode(errors="replace").splitlines()
        # CRIU logs a harmless error about RLIMIT_NOFILE when the kernel allows fewer descriptors than at the probe.
        errors = [line for line in lines if "Error (" in line and "RLIMIT_NOFILE for self" not in line]
        reasons = [line.partition("Error (")[2].partition("): ")[2] for line in errors]
        return "; ".join(reason.strip() for reason in reasons[:2] if reason)
