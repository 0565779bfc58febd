"""The process beside a container that runs commands in it, one at a time, and looks at what each of them changed.

It is outside: nothing in the container can reach or signal it. It ends when the driver's end of its socket closes or
when the container does, and takes the container with it.
"""

import contextlib
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sandboxes.containerbox import household, rooms, terminal
from sandboxes.containerbox.anchor import Anchor
from sandboxes.containerbox.changes import FOLDER, ContainerChanges
from sandboxes.containerbox.freezing import Freezing, Parts
from sandboxes.containerbox.left import ContainerLeft
from sandboxes.containerbox.processes import Launch
from sandboxes.containerbox.servers import ContainerServers
from sandboxes.containerbox.shell import limit
from sandboxes.containerbox.shells import ContainerShells
from sandboxes.localbox import confine, delta, files, kernel, processes, watching
from sandboxes.localbox.alive import Alive
from sandboxes.localbox.anchor import CannotStart
from sandboxes.localbox.changes import WATCH_S, Stillness
from sandboxes.localbox.left import AllLeft, Kept
from sandboxes.localbox.running import Running, failed
from sandboxes.localbox.servers import Log, ServerFailed, hand_over, served
from sandboxes.localbox.session import MalformedDump
from sandboxes.localbox.shell import Output, Shell
from sandboxes.localbox.terminal import give
from sandboxes.localbox.wire import Inbox, Message, pack, receive

READY_S = 10.0
TIMED_OUT, OVER_DISK = 124, 137


class Ended(Exception):  # noqa: N818 - says what happened
    """The container has ended."""


def run(channel: int, fields: dict[str, Any]) -> None:
    """Be a container's keeper until the driver lets go."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    driver = socket.socket(fileno=channel)
    house = household.Household(fields["pid"], fields["container"])
    _end_with_parent(house.init)
    try:
        # So that /proc/sysvipc shows the container's.
        namespace = os.open(f"/proc/{house.pid}/ns/ipc", os.O_RDONLY | os.O_CLOEXEC)
        kernel.setns(namespace, kernel.CLONE_NEWIPC)
        os.close(namespace)
        # Its servers listen on its own loopback; this process has no other use for a network.
        namespace = os.open(f"/proc/{house.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        kernel.setns(namespace, kernel.CLONE_NEWNET)
        os.close(namespace)
        _narrow(house.pid)
        lower = rooms.view(fields["lowers"], fields["view"])
        roots = delta.Roots(os.open(fields["upper"], FOLDER), lower, lower)
        anchor = Anchor(Path(fields["box"]), house)
        Keeper(driver, house, anchor, roots, fields).serve()
    finally:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(house.init, signal.SIGKILL)


def _end_with_parent(init: int) -> None:
    """Have the container killed when the doorman ends, whatever this process is doing then.

    By a handler: a doorman whose driver was killed ends at once, and a SIGKILL from it would come before this process
    has seen its own channel close, and leave the container to the next start.
    """
    own = os.getpid()

    def end(_number: int, _frame: object) -> None:
        # Not in those that it forks, which run as the agent.
        if os.getpid() == own:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(init, signal.SIGKILL)
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGTERM)


def _narrow(pid: int) -> None:
    """See `rooms.narrow`, which needs a process of its own."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            rooms.narrow(pid)
            code = 0
        except OSError as error:
            code = error.errno or 1
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code:
        raise OSError(code, f"the container's mounts could not be narrowed: {os.strerror(code)}")


class Keeper:
    """One container at work. fields: what the driver told of it; `begin` tells of spec and state."""

    def __init__(
        self,
        driver: socket.socket,
        house: household.Household,
        anchor: Anchor,
        roots: delta.Roots,
        fields: dict[str, Any],
    ) -> None:
        self.driver, self.house, self.anchor = driver, house, anchor
        self.inbox = Inbox()
        self.user = household.ids(house.pid)
        self.inherited = household.environment(house.pid)
        self.output_bytes = 0
        self.shells = ContainerShells(anchor, house, set(self.inherited))
        self.servers = ContainerServers(anchor, house)
        self.left = AllLeft(0)
        self.changes = ContainerChanges(house, roots, fields)
        self.alive = Alive(self.shells, self.left, self._living)
        self.parts = Parts(
            house, anchor, self.shells, self.servers, self.left, self.alive, self.changes, stillness=Stillness()
        )
        self.freezing = Freezing(self.parts)

    # -- requests ----------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Say that the container is ready; then answer until the driver is gone, or the container."""
        bash = self.anchor.ready(READY_S)
        for pid in self.shells.anchor_pids:
            limit(pid, self.changes.disk_bytes)
        self._reply({"bash": bash})
        while (message := self._next()) is not None:
            match message.fields["op"]:
                case "begin":
                    self._begin(message)
                case "exec" | "file" | "serve" | "process" | "tend":
                    self._call(message)
                case "start":
                    self._start_servers(message.fields["servers"])
                case "freeze" | "dump" | "copy" | "describe" | "terminal":
                    self._show(message)

    def _show(self, message: Message) -> None:
        """Serve who freezes this state, or looks at it."""
        fields = message.fields
        match fields["op"]:
            case "freeze":
                self._reply(self.freezing.freeze(fields))
            case "dump":
                self._reply(self.freezing.dump(fields["program"], message.fds))
            case "copy":
                self._reply(self.freezing.copy(fields))
            case "terminal":
                launch, (columns, rows) = Launch(self.anchor, self.house, self.user[0]), fields["size"]
                give(self.driver, lambda: terminal.start_shell(launch, self.shells, (columns, rows)))
            case "describe":
                self.changes.look()
                known = {"sessions": self.shells.sessions, "pristine": self.shells.pristine}
                self._reply({"delta": self.changes.now, **known})

    def _next(self) -> Message | None:
        """Wait for a request; meanwhile take the output of what lives, so that it does not block."""
        while (message := self.inbox.take()) is None:
            poll = select.poll()
            for fd in (self.driver.fileno(), self.house.init):
                poll.register(fd, select.POLLIN)
            outputs = self._outputs() if self.alive else {}
            for fd in outputs:
                poll.register(fd, select.POLLIN)
            for fd, _ in poll.poll(None if not self.alive else 1000):
                if fd in outputs:
                    outputs[fd].drain(self.output_bytes)
                elif fd == self.house.init:
                    raise Ended("the container ended")
                else:
                    data, fds = receive(self.driver)
                    if not data:
                        return None
                    self.inbox.feed(data, fds)
            self.left.drain()
        return message

    def _reply(self, fields: dict[str, Any], body: bytes = b"") -> None:
        self.driver.sendall(pack(fields, body))

    def _begin(self, message: Message) -> None:
        """Become a sandbox: at the image's state, or at that of a copy; then start the shell that is asked first.

        With a checkpoint its processes come back instead, by a CRIU that the driver talks to.
        """
        fields = message.fields
        self.output_bytes = fields["output_bytes"]
        self.left.limit = self.output_bytes
        given = {name: value for name, value in self.inherited.items() if name not in {"HOSTNAME", "SHLVL"}}
        self.shells.begin(fields, {**fields["defaults"], **given, **fields["environment"]})
        self.changes.begin(fields["born_ns"], fields["copy"])
        if fields["checkpoint"] is not None:
            self._reply(
                self.freezing.bring_back(fields["checkpoint"], fields["program"], message.fds, self._await_restored)
            )
            return
        try:
            self.shells.ready(next(iter(self.shells.sessions), "main"))
        except CannotStart as error:
            self._reply({"cannot_start": str(error)})
            return
        self._reply({})

    def _await_restored(self) -> None:
        self._reply({})
        while (message := self._next()) is not None and message.fields["op"] != "restored":
            self._reply({})

    # -- calls -------------------------------------------------------------------------------------------------------

    def _call(self, message: Message) -> None:
        fields = message.fields
        alive_before, free = self.alive.now, self.changes.free_bytes()
        turns_before = processes.turns(self.alive.processes)
        started = time.perf_counter()
        touched: str | None = None
        if fields["op"] == "exec":
            touched = fields["session"]
            answer, body = self._exec(fields, message.body)
        elif fields["op"] == "serve":
            answer, body = self._serve(fields["server"], message.body), b""
        elif fields["op"] == "process":
            answer, body = self._process(fields, message.body), b""
        elif fields["op"] == "tend":
            status, media_type, body = watching.perform(self.left, fields, message.body, self._become_user)
            answer = {"status": status, "media_type": media_type}
        else:
            answer, body = self._file(fields, message)
        answer["seconds"] = time.perf_counter() - started
        changed, read = answer.pop("session_changed", False), answer.pop("read", False)
        self.alive.settle()
        # Whoever answers works: where its client's word is that it reads, only who lives is looked at.
        worked = not read and processes.worked(turns_before, processes.turns(self.alive.processes))
        came_or_went, wrote_files = self.alive.now != alive_before, self.changes.look()
        self.parts.stillness.saw(wrote=wrote_files, moved=came_or_went)
        # A server of the spec's was waited for; others may be on their way for a while.
        awaited = answer.pop("awaited", False)
        answer["young"] = bool(self.alive) and came_or_went and not awaited
        effects = {"session": changed, "processes": worked or came_or_went, "files": wrote_files}
        if self.changes.free_bytes() < min(free, self.changes.reserve_bytes):
            answer["host_full"] = True
        self._reply({**answer, **effects, **self.parts.state()}, body)
        if not self.alive and touched is not None:
            self.shells.renew([touched])

    def _serve(self, order: dict[str, Any], first: bytes) -> dict[str, Any]:
        """Give the driver a way to a server, on which first was sent, and wait until it has its answer."""
        order = {**order, "environment": {**self.shells.environment, **order["environment"]}}
        while True:
            try:
                fresh = hand_over(self.driver, self.servers, order, self._watch(), first)
            except ServerFailed as error:
                return {"failed": error.kind, "detail": str(error)}
            message = self._hear_while_serving()
            if message.fields["op"] != "again":
                return {**served(self.servers, order, message), "awaited": fresh}
            first = b""

    def _hear_while_serving(self) -> Message:
        watch = self._watch()
        while (message := self.inbox.take()) is None:
            outputs = self._outputs()
            readable, _, _ = select.select([self.driver.fileno(), *outputs], [], [], WATCH_S)
            for fd in readable:
                if fd in outputs:
                    outputs[fd].drain(self.output_bytes)
                    continue
                data, carried = receive(self.driver)
                if not data:
                    sys.exit(0)
                self.inbox.feed(data, carried)
            watch()
        return message

    def _process(self, fields: dict[str, Any], stdin: bytes) -> dict[str, Any]:
        """Run a process of its own; the driver gets a socket on which its output comes."""
        heard, to = socket.socketpair()
        launch = Launch(self.anchor, self.house, self.user[0])
        with to, heard:
            socket.send_fds(self.driver, [pack({"connected": True}, fds=1)], [heard.fileno()])
            heard.close()
            spared = {pid for pid, _ in self.house.living()}
            try:
                running = launch.begin(fields, stdin, to)
                return self._conclude_process(running, launch, spared, fields)
            except CannotStart as error:
                self._mind({self.house.init} if household.exiting(self.house.pid) else set())
                return failed(to, str(error))
            finally:
                launch.end()

    def _conclude_process(
        self, running: Running, launch: Launch, spared: set[int], fields: dict[str, Any]
    ) -> dict[str, Any]:
        until, detach = time.monotonic() + fields["timeout_s"], bool(fields["arguments"].get("detach"))
        ending = running.pump(until, self.driver.fileno(), self._disk_watch(), self._client_left, detach=detach)
        if household.exiting(self.house.pid):
            raise Ended("the container ended during a call")
        if ending in {"timeout", "disk", "host"}:
            self.house.kill_except(spared)
        elif ending == "left" and "process" in fields["arguments"]:
            self._leave(running, launch, fields["arguments"])
        elif ending == "left":
            for fd in running.outputs:
                self.servers.take_over(fd, launch.inner)
        answer = running.conclude(ending, lambda: self.shells.status_of(launch.inner), self.changes.disk_bytes)
        return {**answer, "detached": detach, "kept": "process" in fields["arguments"]}

    def _leave(self, running: Running, launch: Launch, told: dict[str, Any]) -> None:
        launch.left = True
        ends, death = running.hand_over()
        inner, pid = launch.inner, self.house.find(launch.inner) or 0
        status = lambda: self.shells.status_of(inner)  # noqa: E731
        self.left.add(ContainerLeft(told, ends, death, pid, status, inner=inner, folder=launch.folder))

    def _client_left(self) -> bool:
        """Hear what the driver says during a call: that its client has left, or nothing ever again."""
        data, fds = receive(self.driver)
        if not data:
            sys.exit(0)
        self.inbox.feed(data, fds)
        message = self.inbox.take()
        return message is not None and message.fields["op"] == "leave"

    def _watch(self) -> Callable[[], None]:
        """Return what ends the servers when the sandbox holds too much, and this process when nobody needs it."""
        over_disk = self._disk_watch()

        def look() -> None:
            self._mind({fd for fd in (self.driver.fileno(), self.house.init) if _hung_up(fd, self.driver.fileno())})
            if over_disk() is not None:
                self.house.kill_except(self.shells.anchor_pids)

        return look

    def _start_servers(self, orders: list[dict[str, Any]]) -> None:
        """Start servers, as part of the root state."""
        try:
            for order in orders:
                told = {**order, "environment": {**self.shells.environment, **order["environment"]}}
                for fd in self.servers.connect(told, self._watch())[0]:
                    os.close(fd)
        except ServerFailed as error:
            self._reply({"failed": error.kind, "detail": str(error)})
            return
        self.alive.settle()
        self.changes.look()
        self._reply({})

    def _exec(self, fields: dict[str, Any], command: bytes) -> tuple[dict[str, Any], bytes]:
        spared = self.shells.anchor_pids | {pid for pid, _ in self.alive.processes}
        try:
            shell = self.shells.ready(fields["session"])
        except CannotStart as error:
            return self._answer(127, b"", f"{error}\n".encode()), f"{error}\n".encode()
        spared |= {other.pid for other in self.shells if other is not shell}
        shell.run(command)
        ending = self._wait(shell, fields["timeout_s"])
        return self._conclude(shell, ending, spared)

    def _wait(self, shell: Shell, timeout_s: float) -> str:
        """Wait for shell's dump; return "dump", "died", "timeout", "disk" or "host"."""
        deadline = time.monotonic() + timeout_s
        watch = self._disk_watch()
        try:
            death = os.pidfd_open(shell.pid)
        except ProcessLookupError:
            return "died"
        poll = select.poll()
        outputs = {output.fd: output for output in (shell.out, shell.err)}
        for fd in (*outputs, shell.dump_fd, death, self.house.init):
            poll.register(fd, select.POLLIN)
        poll.register(self.driver, select.POLLHUP | select.POLLRDHUP)
        try:
            while True:
                left = deadline - time.monotonic()
                if left <= 0:
                    return "timeout"
                events = {fd for fd, _ in poll.poll(max(1, min(left, WATCH_S) * 1000))}
                for fd in events & outputs.keys():
                    outputs[fd].drain(self.output_bytes)
                self._mind(events)
                if shell.dump_fd in events and shell.read_dump():
                    return "dump"
                if death in events:
                    return "died"
                if (over := watch()) is not None:
                    return over
        finally:
            os.close(death)

    def _mind(self, events: set[int]) -> None:
        """End where nobody waits for an answer any more, or nobody is left to give one."""
        if self.driver.fileno() in events:
            sys.exit(0)
        if self.house.init in events:
            raise Ended("the container ended during a call")

    def _conclude(self, shell: Shell, ending: str, spared: set[int]) -> tuple[dict[str, Any], bytes]:
        code, changed, notes = 0, False, b""
        if ending == "dump":
            try:
                code, changed = self.shells.take_dump(shell)
            except MalformedDump as error:
                ending, code = "malformed", 1
                notes = f"\n[forkpoint: the session stays as it was before this call: {error}]\n".encode()
        elif ending == "died":
            if household.exiting(self.house.pid):
                raise Ended("the container ended during a call")
            code = self.shells.status(shell)
        else:
            self.house.kill_except(spared, first=shell.pid)
            code = TIMED_OUT if ending == "timeout" else OVER_DISK
            if ending == "disk":
                megabytes = self.changes.disk_bytes >> 20
                notes = f"\n[forkpoint: killed: the sandbox may hold {megabytes} MB of new files]\n".encode()
        for output in (shell.out, shell.err):
            output.drain(self.output_bytes)
        (out, out_cut), (err, err_cut) = shell.out.take(), shell.err.take()
        err += notes
        if ending != "dump":
            self.shells.kill(shell)
        answer = self._answer(code, out, err, timed_out=ending == "timeout", truncated=out_cut or err_cut)
        return {**answer, "session_changed": changed, "host_full": ending == "host"}, out + err

    def _answer(
        self, code: int, out: bytes, err: bytes, *, timed_out: bool = False, truncated: bool = False
    ) -> dict[str, Any]:
        lengths = {"stdout_bytes": len(out), "stderr_bytes": len(err)}
        return {"exit_code": code, "timed_out": timed_out, "truncated": truncated, **lengths}

    def _file(self, fields: dict[str, Any], message: Message) -> tuple[dict[str, Any], bytes]:
        """Run a file operation in a child that has moved into the container's files, with its rights and no more."""
        reading, writing = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(reading, False)
        pid = os.fork()
        if pid == 0:
            source = message.fds[0] if message.fds else None
            self._operate(fields, message.body, writing, source)
        for fd in (writing, *message.fds):
            os.close(fd)
        data, whole = self._read_all(reading, fields["timeout_s"])
        os.close(reading)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return files.heard(data, whole=whole)

    def _operate(self, fields: dict[str, Any], body: bytes, result: int, source: int | None) -> None:
        """In the child. Never returns."""
        try:
            self._become_user()
            files.run_apart(fields["tool"], fields["arguments"], body, result, source)
        finally:
            os._exit(1)

    def _become_user(self) -> None:
        """In a child: be the container's user. Paths are the agent's, so it must not be able to do more than he is."""
        namespace = os.open(f"/proc/{self.house.pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
        kernel.setns(namespace, kernel.CLONE_NEWNS)
        os.umask(0o022)
        confine.limit_resources(self.changes.disk_bytes, None, None)
        confine.confine()
        uid, gid, groups = self.user
        if uid:
            os.setgroups(groups)
            os.setresgid(gid, gid, gid)
            os.setresuid(uid, uid, uid)

    def _read_all(self, fd: int, timeout_s: float) -> tuple[bytes, bool]:
        output = Output(fd)
        deadline, watch = time.monotonic() + timeout_s, self._disk_watch()
        poll = select.poll()
        poll.register(fd, select.POLLIN | select.POLLHUP)
        while time.monotonic() < deadline and watch() is None:
            events = poll.poll(WATCH_S * 1000)
            output.drain(sys.maxsize)
            if events and events[0][1] & select.POLLHUP and not events[0][1] & select.POLLIN:
                return bytes(output.kept), True
        return bytes(output.kept), False

    # -- who lives ---------------------------------------------------------------------------------------------------

    def _living(self) -> set[processes.Process]:
        self.anchor.look_after()
        return self.house.living()

    def _outputs(self) -> dict[int, Output | Log | Kept]:
        return {**self.shells.outputs, **self.servers.outputs, **self.left.outputs}

    def _disk_watch(self) -> Callable[[], str | None]:
        """Return what is to be called during a call: see `disk_watch`. It takes the output of servers meanwhile."""
        over_disk = self.changes.disk_watch()

        def tend() -> str | None:
            self.left.look()
            for log in self.servers.outputs.values():
                log.drain()
            return over_disk()

        return tend


def _hung_up(fd: int, socket_fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLHUP | select.POLLRDHUP if fd == socket_fd else select.POLLIN)
    return bool(poll.poll(0))
