"""The process beside a container that runs commands in it, one at a time, and looks at what each of them changed.

It is outside: nothing in the container can reach or signal it. It ends when the driver's end of its socket closes or
when the container does, and takes the container with it.
"""

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sandboxes.containerbox import copies, household, rooms
from sandboxes.containerbox.anchor import Anchor, CannotStart
from sandboxes.containerbox.left import ContainerLeft, Prepared
from sandboxes.containerbox.processes import Launch
from sandboxes.containerbox.servers import ContainerServers
from sandboxes.containerbox.shells import Shell, limit, read_limits
from sandboxes.localbox import confine, delta, files, kernel, processes
from sandboxes.localbox import session as sessions
from sandboxes.localbox.changes import WATCH_S, Stillness, disk_watch, free_bytes
from sandboxes.localbox.left import AllLeft, Kept
from sandboxes.localbox.operate import operate, set_last_pid
from sandboxes.localbox.restoring import OUT_OF_THE_WAY
from sandboxes.localbox.running import Running, failed
from sandboxes.localbox.servers import Log, ServerFailed, hand_over, served
from sandboxes.localbox.session import MalformedDump, Session
from sandboxes.localbox.shell import Output
from sandboxes.localbox.wire import Inbox, Message, pack, receive

READY_S = 10.0
TIMED_OUT, OVER_DISK, KILLED = 124, 137, 137
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


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
        roots = delta.Roots(os.open(fields["upper"], _FOLDER), lower, lower)
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
        self.driver, self.house, self.anchor, self.roots = driver, house, anchor, roots
        self.inbox = Inbox()
        self.disk_bytes: int = fields["disk_bytes"]
        self.reserve_bytes: int = fields["reserve_bytes"]
        self.user = household.ids(house.pid)
        self.inherited = household.environment(house.pid)
        self.environment: dict[str, str] = {}
        self.workdir = "/"
        self.output_bytes = self.born_ns = self.calls = 0
        self.shells: dict[str, Shell] = {}
        self.servers = ContainerServers(anchor, house)
        self.left = AllLeft(0)
        self.sessions: dict[str, Session] = {}
        self.pristine: Session | None = None
        self.delta: delta.Delta | None = {}
        self.signatures: dict[str, delta.Signature] = {}
        self.copied: tuple[str, dict[str, delta.Signature]] = ("", {})
        self.alive: frozenset[Any] = frozenset()
        self.stillness, self.held_from = Stillness(), 0.0

    # -- requests ----------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Say that the container is ready; then answer until the driver is gone, or the container."""
        bash = self.anchor.ready(READY_S)
        for pid in self._kept():
            limit(pid, self.disk_bytes)
        self._reply({"bash": bash})
        while (message := self._next()) is not None:
            match message.fields["op"]:
                case "begin":
                    self._begin(message)
                case "exec" | "file" | "serve" | "process" | "tend":
                    self._call(message)
                case "start":
                    self._start_servers(message.fields["servers"])
                case "freeze":
                    self._freeze(message.fields)
                case "dump":
                    self._dump(message)
                case "copy":
                    self._copy(message.fields)
                case "describe":
                    self._look_at_files()
                    self._reply({"delta": self.delta, "sessions": self.sessions, "pristine": self.pristine})

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
        for name in ("workdir", "output_bytes", "born_ns", "sessions", "pristine"):
            setattr(self, name, fields[name])
        self.left.limit = self.output_bytes
        given = {name: value for name, value in self.inherited.items() if name not in {"HOSTNAME", "SHLVL"}}
        self.environment = {**fields["defaults"], **given, **fields["environment"]}
        if copy := fields["copy"]:
            meta = json.loads((Path(copy) / "meta.json").read_bytes())
            self._lay_over(f"{copy}/diff", meta["links"])
            told = meta["delta"]
            self.delta = None if told is None else {path: (what, at) for path, (what, at) in told.items()}
            self.signatures = delta.signatures(self.roots.upper)
            self.copied = (copy, self.signatures)
        else:
            self._look_at_files()
        if fields["checkpoint"] is not None:
            self._bring_back(fields["checkpoint"], fields["program"], message.fds)
            return
        try:
            self._ready_shell(next(iter(self.sessions), "main"))
        except CannotStart as error:
            self._reply({"cannot_start": str(error)})
            return
        self._reply({})

    def _lay_over(self, copy: str, links: dict[str, str]) -> None:
        source, target = os.open(copy, _FOLDER), os.open(f"/proc/{self.house.pid}/root", _FOLDER)
        try:
            copies.lay_over(source, target, links)
        finally:
            os.close(source)
            os.close(target)

    # -- calls -------------------------------------------------------------------------------------------------------

    def _call(self, message: Message) -> None:
        fields = message.fields
        self.calls += 1
        alive_before, free = self.alive, self._free_bytes()
        turns_before = processes.turns(self._living())
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
            status, media_type, body = self.left.perform(fields, message.body)
            answer = {"status": status, "media_type": media_type}
        else:
            answer, body = self._file(fields, message)
        answer["seconds"] = time.perf_counter() - started
        changed, read = answer.pop("session_changed", False), answer.pop("read", False)
        self._settle()
        # Whoever answers works: where its client's word is that it reads, only who lives is looked at.
        worked = not read and processes.worked(turns_before, processes.turns(self._living()))
        came_or_went, wrote_files = self.alive != alive_before, self._look_at_files()
        self.stillness.saw(wrote=wrote_files, moved=came_or_went)
        effects = {"session": changed, "processes": worked or came_or_went, "files": wrote_files}
        if self._free_bytes() < min(free, self.reserve_bytes):
            answer["host_full"] = True
        self._reply({**answer, **effects, **self._state()}, body)
        if not self.alive and touched is not None:
            self._renew(touched)

    def _serve(self, order: dict[str, Any], first: bytes) -> dict[str, Any]:
        """Give the driver a way to a server, on which first was sent, and wait until it has its answer."""
        order = {**order, "environment": {**self.environment, **order["environment"]}}
        while True:
            try:
                hand_over(self.driver, self.servers, order, self._watch(), first)
            except ServerFailed as error:
                return {"failed": error.kind, "detail": str(error)}
            message = self._hear_while_serving()
            if message.fields["op"] != "again":
                return served(self.servers, order, message)
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
        answer = running.conclude(ending, lambda: self._status(launch.inner), self.disk_bytes)
        return {**answer, "detached": detach, "kept": "process" in fields["arguments"]}

    def _leave(self, running: Running, launch: Launch, told: dict[str, Any]) -> None:
        launch.left = True
        ends, death = running.hand_over()
        inner, pid = launch.inner, self.house.find(launch.inner) or 0
        status = lambda: self._status(inner)  # noqa: E731
        self.left.add(ContainerLeft(told, ends, death, pid, status, inner=inner, folder=launch.folder))

    def _status(self, inner: int) -> int:
        return self.anchor.status(inner, otherwise=KILLED)

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
                self.house.kill_except(self._kept())

        return look

    def _start_servers(self, orders: list[dict[str, Any]]) -> None:
        """Start servers, as part of the root state."""
        try:
            for order in orders:
                told = {**order, "environment": {**self.environment, **order["environment"]}}
                for fd in self.servers.connect(told, self._watch())[0]:
                    os.close(fd)
        except ServerFailed as error:
            self._reply({"failed": error.kind, "detail": str(error)})
            return
        self._settle()
        self._look_at_files()
        self._reply({})

    def _exec(self, fields: dict[str, Any], command: bytes) -> tuple[dict[str, Any], bytes]:
        spared = self._kept() | {pid for pid, _ in self._living()}
        try:
            shell = self._ready_shell(fields["session"])
        except CannotStart as error:
            return self._answer(127, b"", f"{error}\n".encode()), f"{error}\n".encode()
        spared |= {other.pid for other in self.shells.values() if other is not shell}
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
                code, changed = self._take_dump(shell)
            except MalformedDump as error:
                ending, code = "malformed", 1
                notes = f"\n[forkpoint: the session stays as it was before this call: {error}]\n".encode()
        elif ending == "died":
            if household.exiting(self.house.pid):
                raise Ended("the container ended during a call")
            code = self.anchor.status(shell.inner, otherwise=KILLED)
        else:
            self.house.kill_except(spared, first=shell.pid)
            code = TIMED_OUT if ending == "timeout" else OVER_DISK
            if ending == "disk":
                megabytes = self.disk_bytes >> 20
                notes = f"\n[forkpoint: killed: the sandbox may hold {megabytes} MB of new files]\n".encode()
        for output in (shell.out, shell.err):
            output.drain(self.output_bytes)
        (out, out_cut), (err, err_cut) = shell.out.take(), shell.err.take()
        err += notes
        if ending != "dump":
            self._kill(shell)
        answer = self._answer(code, out, err, timed_out=ending == "timeout", truncated=out_cut or err_cut)
        return {**answer, "session_changed": changed, "host_full": ending == "host"}, out + err

    def _answer(
        self, code: int, out: bytes, err: bytes, *, timed_out: bool = False, truncated: bool = False
    ) -> dict[str, Any]:
        lengths = {"stdout_bytes": len(out), "stderr_bytes": len(err)}
        return {"exit_code": code, "timed_out": timed_out, "truncated": truncated, **lengths}

    def _take_dump(self, shell: Shell) -> tuple[int, bool]:
        """Return the exit status that the dump tells, and whether the session is another now.

        Raises:
            MalformedDump: a command has interfered with it.
        """
        code, now = shell.finish_dump()
        # Compared with what the restored shell said of itself, not with what it was restored from: where a shell
        # prints a thing differently the second time, nothing has changed.
        changed = now != shell.baseline
        if changed:
            shell.session = None if now == self.pristine else now
            shell.baseline = now
            if shell.session is None:
                self.sessions.pop(shell.name, None)
            else:
                self.sessions[shell.name] = now
        return code, changed

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
        """In the child. Paths are the agent's, so this must not be able to do more than the agent is. Never returns."""
        try:
            namespace = os.open(f"/proc/{self.house.pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
            kernel.setns(namespace, kernel.CLONE_NEWNS)
            os.umask(0o022)
            confine.limit_resources(self.disk_bytes, None, None)
            confine.confine()
            uid, gid, groups = self.user
            if uid:
                os.setgroups(groups)
                os.setresgid(gid, gid, gid)
                os.setresuid(uid, uid, uid)
            files.run_apart(fields["tool"], fields["arguments"], body, result, source)
        finally:
            os._exit(1)

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

    def _kept(self) -> set[int]:
        return {self.house.pid, *self.anchor.pids}

    def _settle(self, grace_s: tuple[float, ...] = processes.GRACE_S) -> None:
        """Find out what outlives the call, with some grace for what is just about to end."""
        for pause in (*grace_s, None):
            self.anchor.look_after()
            idle = {shell.pid for shell in self.shells.values()} | self._kept()
            left = {process for process in self.house.living() if process[0] not in idle}
            if left <= self.alive or pause is None:
                break
            time.sleep(pause)
        # Each call may move what descriptors point at, or write to shared memory: these are never what they were.
        held = {("descriptors", name, shell.runs) for name, shell in self.shells.items() if shell.holds_more()}
        objects = processes.ipc_objects()
        alive: set[Any] = left | held | ({("ipc", objects, self.calls)} if objects else set()) | self.left.state
        if alive:
            # These shells are not replaced after the call: what they know of their children lives on with them.
            alive |= {("jobs", name, *shell.jobs) for name, shell in self.shells.items() if shell.jobs}
        self.alive = frozenset(alive)

    def _living(self) -> list[processes.Process]:
        """Return the processes among what is alive."""
        return [(entry[0], entry[1]) for entry in self.alive if isinstance(entry[0], int)]

    def _ready_shell(self, name: str) -> Shell:
        """Return session name's shell when it has said what it is; start it where there is none.

        Raises:
            CannotStart: the image's shell is gone, or broken.
        """
        shell = self.shells.get(name) or self._start_shell(name)
        if shell.baseline is None:
            self._await_first_dump(shell)
        return shell

    def _start_shell(self, name: str) -> Shell:
        self.anchor.look_after()
        shell = Shell(name, self.sessions.get(name), self.anchor.new_folder(), bash=self.anchor.bash)
        shell.prepare(self.workdir, self.environment, set(self.inherited))
        try:
            pid, inner = self.anchor.start(shell.folder.name)
        except CannotStart:
            shell.close()
            raise
        shell.started(pid, inner, read_limits(self.anchor.pid))
        self.shells[name] = shell
        return shell

    def _await_first_dump(self, shell: Shell) -> None:
        poll = select.poll()
        poll.register(shell.dump_fd, select.POLLIN)
        with contextlib.suppress(ProcessLookupError, MalformedDump), _descriptor(os.pidfd_open(shell.pid)) as death:
            poll.register(death, select.POLLIN)
            deadline = time.monotonic() + READY_S
            while time.monotonic() < deadline:
                events = {fd for fd, _ in poll.poll(READY_S * 1000)}
                if shell.dump_fd in events and shell.read_dump():
                    _, shell.baseline = shell.finish_dump()
                    if shell.session is None:
                        self.pristine = shell.baseline
                    else:
                        # These come with the command, not before: see `session.orders`.
                        shell.baseline |= {kind: shell.session[kind] for kind in ("traps", "options")}
                    return
                if death in events:
                    break
        shell.err.drain(4096)
        reason = bytes(shell.err.kept).decode(errors="replace").strip() or "it gives no answer"
        self._kill(shell)
        path = "/bin/bash" if self.anchor.bash else "/bin/sh"
        raise CannotStart(f"{path} does not start in this sandbox: {reason}")

    def _kill(self, shell: Shell) -> None:
        household.kill(shell.pid)
        self.anchor.status(shell.inner, otherwise=KILLED)
        shell.close()
        if self.shells.get(shell.name) is shell:
            del self.shells[shell.name]

    def _renew(self, name: str) -> None:
        """Replace a shell by a fresh one restored from its dump: a session is what its dump says."""
        if name in self.shells:
            self._kill(self.shells[name])
        with contextlib.suppress(CannotStart):
            self._start_shell(name)

    def _outputs(self) -> dict[int, Output | Log | Kept]:
        shells: dict[int, Output | Log | Kept] = {
            output.fd: output for shell in self.shells.values() for output in (shell.out, shell.err)
        }
        return {**shells, **self.servers.outputs, **self.left.outputs}

    # -- files -------------------------------------------------------------------------------------------------------

    def _look_at_files(self) -> bool:
        """Update the delta; return whether anything differs from before."""
        now = delta.signatures(self.roots.upper)
        if now == self.signatures:
            return False
        before, self.signatures = self.delta, now
        try:
            self.delta = delta.merge({}, self.roots, copies.OPAQUE)
        except delta.TooLarge:
            self.delta = None
            return True
        return self.delta != before

    def _state(self) -> dict[str, Any]:
        if self.delta is None:
            return {"state": None, "witness": None}
        told, now_ns = sessions.digest(self.sessions), time.time_ns()
        if not self.alive:
            exact, content = delta.digests(self.delta, told, born_ns=self.born_ns, now_ns=now_ns)
            return {"state": [exact.hex(), content.hex()], "witness": None}
        # What lives may go on writing where it writes: only the rest says what the call itself did.
        written = self.house.written_paths()
        still = {path: entry for path, entry in self.delta.items() if path not in written}
        witness = delta.digests(still, told, born_ns=self.born_ns, now_ns=now_ns)[1].hex()
        return {"state": None, "witness": witness, "restless": self.stillness.restless}

    def _freeze(self, fields: dict[str, Any]) -> None:
        """Copy the container's own files to an empty directory.

        Where something lives, name the process whose tree can be dumped, and wait to be told to copy then.
        """
        if self.alive:
            why = self._outside_the_tree() if fields["checkpoint"] else self._who_lives()
            self.held_from = time.monotonic()
            self._reply({"not_freezable": why} if why else {"tree": household.inner_of(self._top())})
            return
        self._copy(fields)

    def _copy(self, fields: dict[str, Any]) -> None:
        self.stillness.saw(wrote=self._look_at_files())
        if self.alive:
            self.stillness.stood_still(time.monotonic() - self.held_from)
        folder = Path(fields["folder"])
        (folder / "diff").mkdir(parents=True)
        target = os.open(folder / "diff", _FOLDER)
        copy = copies.Copy(self._unchanged)
        try:
            copy.take(self.roots.upper, target)
        finally:
            os.close(target)
        meta = {"delta": self.delta, "links": copy.links, "added_bytes": copy.added_bytes}
        (folder / "meta.json").write_text(json.dumps(meta, separators=(",", ":")))
        self.copied = (fields["becomes"], self.signatures)
        told = {"sessions": self.sessions, "pristine": self.pristine, "added_bytes": copy.added_bytes}
        checkpoint = self._remember() if self.alive else None
        self._reply({**told, **self._state(), "delta": self.delta, "checkpoint": checkpoint})

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def _outside_the_tree(self) -> str:
        """Say what lives here that no checkpoint would hold; empty where there is nothing."""
        if any(kind == "ipc" for kind, *_ in self.alive):
            return "System V IPC objects exist, and a checkpoint does not hold them"
        if self.left.terminals:
            return "a terminal is open, and a checkpoint does not hold it"

        def others() -> set[int]:
            return {pid for pid, _ in self.house.living()} - {self.house.pid}

        if not processes.descend(others, self._top()):
            return (
                "processes live outside the tree of the container's anchor: this machine has no tini, or it was killed"
            )
        for name in list(self.shells):
            # What a new shell says of itself would be lost on its way to us.
            with contextlib.suppress(CannotStart):
                self._ready_shell(name)
        return ""

    def _top(self) -> int:
        """Return the root of the tree that holds all but pid 1."""
        return next(iter(self.anchor.pids - {self.house.pid, self.anchor.pid}), self.anchor.pid)

    def _dump(self, message: Message) -> None:
        reply, host_root, *files = message.fds
        if os.fork() == 0:
            self._enter()
            operate(host_root, message.fields["program"], reply, files, survey=True)
        for fd in message.fds:
            os.close(fd)
        self._reply({})

    def _enter(self) -> None:
        """In a fork: move into the container's namespaces; children are born in its pid namespace."""
        try:
            every = kernel.CLONE_NEWNS | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS
            kernel.setns(self.house.init, every | kernel.CLONE_NEWPID | kernel.CLONE_NEWCGROUP)
            os.chdir("/")
        except OSError:
            os._exit(1)

    def _remember(self) -> dict[str, Any]:
        """Return what must be known of the processes to take them over in another container."""
        return {
            "anchor": self.anchor.remember(),
            "shells": [shell.remember() for shell in self.shells.values()],
            "servers": [server.remember() for server in self.servers],
            "restless": self.stillness.restless,
            "left": [process.remember() for process in self.left],
            "pids": sorted(household.inner_of(pid) for pid, _ in self.house.living()),
        }

    def _bring_back(self, checkpoint: dict[str, Any], program: list[str], fds: list[int]) -> None:
        self.house.kill_except({self.house.pid})
        shells = [Shell.prepare_again(told, self.anchor.box, bash=self.anchor.bash) for told in checkpoint["shells"]]
        self.servers.prepare_again(checkpoint.get("servers", []))
        left = [Prepared(told, self.anchor.box) for told in checkpoint.get("left", [])]
        reply, host_root, *files = fds
        last = max(checkpoint["pids"])
        operator = os.fork()
        if operator == 0:
            household.join(self.house.pid)
            self._enter()
            _in_child(lambda: set_last_pid(host_root, last + OUT_OF_THE_WAY))
            operate(host_root, program, reply, files)
        for fd in (reply, *files):
            os.close(fd)
        self._reply({})
        while (message := self._next()) is not None and message.fields["op"] != "restored":
            self._reply({})
        os.waitpid(operator, 0)
        after = os.fork()
        if after == 0:
            self._enter()
            _in_child(lambda: set_last_pid(host_root, last))
            os._exit(0)
        os.waitpid(after, 0)
        os.close(host_root)
        self.anchor.adopt(checkpoint["anchor"])
        self.stillness.saw(wrote=checkpoint["restless"])
        for shell, told in zip(shells, checkpoint["shells"], strict=True):
            shell.adopt(told, self.house.find(told["inner"]) or 0)
            self.shells[shell.name] = shell
        self.servers.adopt_prepared()
        for process in left:
            self.left.add(process.adopted(self.house, self._status))
        self._settle(())
        self._reply({})

    def _unchanged(self, path: str) -> str | None:
        copy, signatures = self.copied
        return f"{copy}/diff/{path}" if copy and signatures.get(path) == self.signatures.get(path) else None

    def _who_lives(self) -> str:
        kinds = {
            "descriptors": "the shell holds open descriptors",
            "ipc": "System V IPC objects exist",
            "jobs": "the shell has jobs",
        }
        return "; ".join(sorted({kinds.get(str(kind), f"process {kind} lives") for kind, *_ in self.alive})[:5])

    def _free_bytes(self) -> int:
        return free_bytes(self.roots.upper)

    def _disk_watch(self) -> Callable[[], str | None]:
        """Return what is to be called during a call: see `disk_watch`. It takes the output of servers meanwhile."""
        over_disk = disk_watch(self.roots.upper, self.disk_bytes, self.reserve_bytes)

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


def _in_child(work: Callable[[], None]) -> None:
    """Do work in a child, which is born in another pid namespace than this process is in."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


@contextlib.contextmanager
def _descriptor(fd: int) -> Iterator[int]:
    try:
        yield fd
    finally:
        os.close(fd)
