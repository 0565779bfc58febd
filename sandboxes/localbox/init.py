"""pid 1 of a sandbox: sets its namespaces up, confines itself, then runs what the driver asks for, one at a time.

After setting up it has no right that the agent's processes lack: what needs more (mounting layers) the launcher does.
It dies with the launcher and when the driver's end of its socket closes; everything in the sandbox dies with it.
"""

import contextlib
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from sandboxes.localbox import confine, delta, files, kernel, processes, rootfs, terminal, watching
from sandboxes.localbox.alive import Alive
from sandboxes.localbox.anchor import Anchor, CannotStart
from sandboxes.localbox.changes import WATCH_S, Changes, Stillness
from sandboxes.localbox.left import AllLeft, Kept, Left
from sandboxes.localbox.restoring import Restoring
from sandboxes.localbox.running import Running, death_of, due_of, failed, new_pipes, open_terminal
from sandboxes.localbox.servers import Log, ServerFailed, Servers, hand_over, served
from sandboxes.localbox.session import MalformedDump
from sandboxes.localbox.shell import Output, Shell
from sandboxes.localbox.shells import Shells
from sandboxes.localbox.wire import Inbox, Message, pack, receive
from sandboxes.process import PROGRAM, TEXT_FD, text

TIMED_OUT, OVER_DISK = 124, 137
NAMESPACES = kernel.CLONE_NEWNS | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS


def run(channel: int, cgroups: list[str], *, privileged: bool) -> None:
    """Be a sandbox until the driver lets go: get ready for whatever spec comes, then begin with one."""
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    kernel.call_itself("init")
    driver = socket.socket(fileno=channel)
    # Up to 15 ms, while the kernel waits for its readers: the reason for spare sandboxes.
    for path in cgroups:
        with open(path, "w") as file:  # noqa: PTH123
            file.write("0")
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:  # noqa: PTH123
        # Memory is short when a command takes too much: it should go, not the one that tells of it.
        file.write("-900")
    kernel.unshare(NAMESPACES)
    kernel.unshare(kernel.CLONE_NEWCGROUP)
    socket.sethostname("sandbox")
    kernel.bring_up_loopback()
    os.umask(0o022)
    rootfs.prepare(devices_from_host=not privileged)
    driver.sendall(pack({"ready": True}))
    _begin(driver)


def _begin(driver: socket.socket) -> None:
    """Wait for a spec and its layers, move into them, confine this process, and serve."""
    inbox = Inbox()
    message = _wait_for(driver, inbox)
    fields, (overlay, upper, lower, root, *files) = message.fields, message.fds
    for folder in fields["binds"]:
        rootfs.bind_read_only(folder)
    rootfs.switch(overlay, fields["binds"])
    os.close(overlay)
    checkpoint: dict[str, Any] | None = fields["checkpoint"]
    restoring = None if checkpoint is None else Restoring(checkpoint, fields["program"], files)
    if restoring is not None:
        driver.sendall(pack({"restoring": True}))
        _wait_for(driver, inbox)
        restoring.finish()
    namespace = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    confine.limit_resources(fields["disk_bytes"], fields["memory_bytes"], fields["pids"])
    confine.confine()
    init = Init(driver, inbox, delta.Roots(upper, lower, root), fields)
    if restoring is not None:
        init.adopt(*restoring.adopted(), restless=restoring.checkpoint["restless"])
    init.serve(namespace)


def _wait_for(driver: socket.socket, inbox: Inbox) -> Message:
    while (message := inbox.take()) is None:
        data, fds = receive(driver)
        if not data:
            sys.exit(0)
        inbox.feed(data, fds)
    return message


def say_last_words(channel: int, error: BaseException) -> None:
    """Tell the driver why this pid 1 ends; the driver may be gone already."""
    with contextlib.suppress(OSError):
        os.write(channel, pack({"error": f"{type(error).__name__}: {error}"}))


class Init:
    """A sandbox at work. fields: what the driver told it of its spec and of the frozen state that it goes on from."""

    def __init__(self, driver: socket.socket, inbox: Inbox, roots: delta.Roots, fields: dict[str, Any]) -> None:
        self.driver = driver
        self.inbox = inbox
        self.output_bytes: int = fields["output_bytes"]
        self.seals: bool = fields["seals"]
        self.shells = Shells(fields["environment"], fields["workdir"], fields["sessions"], fields["pristine"])
        self.servers = Servers(self.shells)
        self.left = AllLeft(self.output_bytes)
        self.changes = Changes(roots, fields)
        self.alive = Alive(self.shells, self.left, self._living)
        self.stillness, self.held_from = Stillness(), 0.0

    # -- requests ----------------------------------------------------------------------------------------------------

    def serve(self, namespace: int) -> None:
        """Say that the sandbox is ready, or that its bash is not; then answer until the driver is gone.

        namespace: the mount namespace, by which the launcher finds it again.
        """
        told: dict[str, Any] = {}
        try:
            self.shells.ready("main")
        except CannotStart as error:
            told = {"cannot_start": str(error)}
        socket.send_fds(self.driver, [pack(told, fds=1)], [namespace])
        os.close(namespace)
        while True:
            message = self._next()
            if message is None:
                return
            match message.fields["op"]:
                case "exec" | "file" | "serve" | "process" | "tend":
                    self._call(message)
                case "start":
                    self._start(message.fields["servers"])
                case "pause":
                    self._pause(root=message.fields["root"], checkpoint=message.fields["checkpoint"])
                case "look" | "describe" | "terminal":
                    self._show(message.fields)
                case "switched":
                    self._switched(message)

    def _next(self) -> Message | None:
        """Wait for a request; meanwhile take the output of what lives, so that it does not block."""
        while (message := self.inbox.take()) is None:
            if not self._listen(self._outputs if self.alive else {}):
                return None
            self.shells.reap()
            self.left.drain()
        return message

    @property
    def _outputs(self) -> dict[int, Output | Log | Kept]:
        """The streams of all that may live on between calls."""
        return {**self.shells.outputs, **self.servers.outputs, **self.left.outputs}

    def _listen(self, outputs: Mapping[int, Output | Log | Kept], within_ms: int | None = None) -> bool:
        """Wait for the driver, or for a second where outputs are to be drained; False where the driver is gone."""
        poll = select.poll()
        poll.register(self.driver, select.POLLIN)
        for fd in outputs:
            poll.register(fd, select.POLLIN)
        for fd, event in poll.poll(within_ms or (1000 if self.alive else None)):
            if fd not in outputs:
                return self._receive()
            outputs[fd].drain(self.output_bytes)
            if not event & select.POLLIN:
                # Nobody writes there any more; polled again and again, it would keep this process busy.
                self.servers.close_log(fd)
        return True

    def _receive(self) -> bool:
        data, fds = receive(self.driver)
        self.inbox.feed(data, fds)
        return bool(data)

    def _reply(self, fields: dict[str, Any], body: bytes = b"") -> None:
        self.driver.sendall(pack(fields, body))

    # -- calls -------------------------------------------------------------------------------------------------------

    def _call(self, message: Message) -> None:
        fields = message.fields
        self.shells.reap()
        alive_before, free = self.alive.now, self.changes.free_bytes()
        turns_before = processes.turns(self.alive.processes)
        started = time.perf_counter()
        touched: str | None
        if fields["op"] == "exec":
            answer, body, touched = self._exec(fields, message.body)
        elif fields["op"] == "serve":
            answer, body, touched = self._serve(fields["server"], message.body), b"", None
        elif fields["op"] == "process":
            answer, body, touched = self._process(fields, message.body), b"", None
        elif fields["op"] == "tend":
            (status, media_type, body), touched = watching.perform(self.left, fields, message.body), None
            answer = {"status": status, "media_type": media_type}
        else:
            answer, body, touched = self._file(fields, message)
        answer["seconds"] = time.perf_counter() - started
        changed, read = answer.pop("session_changed", False), answer.pop("read", False)
        self.alive.settle()
        # Whoever answers works: where its client's word is that it reads, only who lives is looked at.
        worked = not read and processes.worked(turns_before, processes.turns(self.alive.processes))
        came_or_went, wrote_files = self.alive.now != alive_before, self.changes.look()
        self.stillness.saw(wrote=wrote_files, moved=came_or_went)
        # A server of the spec's was waited for; others may be on their way for a while.
        awaited = answer.pop("awaited", False)
        answer["young"] = bool(self.alive) and came_or_went and not awaited
        effects = {"session": changed, "processes": worked or came_or_went, "files": wrote_files}
        wrote = self.seals and self.changes.written and not self.alive
        discard = wrote and self.changes.undone
        seal = wrote and not discard and not self.changes.linked
        if self.changes.free_bytes() < min(free, self.changes.reserve_bytes):
            answer["host_full"] = True
        self._reply({**answer, **effects, **self._state(), "discard": discard, "seal": seal}, body)
        if discard or seal:
            # What was written goes away or into a layer: the driver is told at once what it would ask next.
            self._pause(discard=discard)
        elif not self.alive:
            self.shells.renew([touched] if touched else [])

    def _exec(self, fields: dict[str, Any], command: bytes) -> tuple[dict[str, Any], bytes, str]:
        name = fields["session"]
        spared = processes.living() if self.alive else set()
        try:
            shell = self.shells.ready(name)
        except CannotStart as error:
            return self._answer(127, b"", f"{error}\n".encode()), f"{error}\n".encode(), name
        others = {other.pid for other in self.shells if other is not shell}
        if spared or others:
            # The anchor goes with its shells, unless others have to stay.
            others |= self.shells.anchor_pids
        spared |= {process for process in processes.living() if process[0] in others}
        shell.run(command)
        ending = self._wait(shell, fields["timeout_s"])
        return (*self._conclude(shell, ending, spared), name)

    def _wait(self, shell: Shell, timeout_s: float) -> str:
        """Wait for shell's dump; return "dump", "died", "timeout", "disk" or "host"."""
        deadline = time.monotonic() + timeout_s
        over_disk = self._tending()
        poll = select.poll()
        outputs = {output.fd: output for output in (shell.out, shell.err)}
        for fd in (*outputs, shell.dump_fd, shell.death):
            poll.register(fd, select.POLLIN)
        poll.register(self.driver, select.POLLHUP | select.POLLRDHUP)
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                return "timeout"
            events = {fd for fd, _ in poll.poll(max(1, min(left, WATCH_S) * 1000))}
            for fd in events & outputs.keys():
                outputs[fd].drain(self.output_bytes)
            if self.driver.fileno() in events:
                # Nobody waits for an answer any more.
                sys.exit(0)
            if shell.dump_fd in events and shell.read_dump():
                return "dump"
            if shell.death in events:
                return "died"
            if (over := over_disk()) is not None:
                return over

    def _conclude(self, shell: Shell, ending: str, spared: set[processes.Process]) -> tuple[dict[str, Any], bytes]:
        code, changed, notes = 0, False, b""
        if ending == "dump":
            try:
                code, changed = self.shells.take_dump(shell)
            except MalformedDump as error:
                ending, code = "malformed", 1
                notes = f"\n[forkpoint: the session stays as it was before this call: {error}]\n".encode()
        elif ending == "died":
            code = self.shells.status(shell)
        else:
            self.shells.kill_except(spared, first=shell.pid)
            code = TIMED_OUT if ending == "timeout" else OVER_DISK
            if ending == "disk":
                megabytes = self.changes.disk_bytes >> 20
                notes = f"\n[forkpoint: killed: the sandbox may hold {megabytes} MB of new files]\n".encode()
        for output in (shell.out, shell.err):
            output.drain(self.output_bytes)
        (out, out_cut), (err, err_cut) = shell.out.take(), shell.err.take()
        err += notes
        if ending == "malformed":
            self.shells.kill(shell)
        elif ending != "dump":
            self.shells.forget(shell)
        answer = self._answer(code, out, err, timed_out=ending == "timeout", truncated=out_cut or err_cut)
        return {**answer, "session_changed": changed, "host_full": ending == "host"}, out + err

    def _answer(
        self, code: int, out: bytes, err: bytes, *, timed_out: bool = False, truncated: bool = False
    ) -> dict[str, Any]:
        lengths = {"stdout_bytes": len(out), "stderr_bytes": len(err)}
        return {"exit_code": code, "timed_out": timed_out, "truncated": truncated, **lengths}

    def _file(self, fields: dict[str, Any], message: Message) -> tuple[dict[str, Any], bytes, str | None]:
        """Run a file operation in a child; like a command's, its time and its memory are bounded."""
        reading, writing = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(reading, False)
        try:
            pid = os.fork()
        except OSError as error:
            # The sandbox has as many processes as it may have.
            os.close(reading)
            for fd in (writing, *message.fds):
                os.close(fd)
            status, media_type, body = files.problem(
                507, "File operation failed", f"no process for it: {error.strerror}"
            )
            return {"status": status, "media_type": media_type}, body, None
        if pid == 0:
            source = message.fds[0] if message.fds else None
            files.run_apart(fields["tool"], fields["arguments"], message.body, writing, source)
        for fd in (writing, *message.fds):
            os.close(fd)
        data, whole = self._read_all(reading, fields["timeout_s"])
        os.close(reading)
        # It alone, which starts nobody: what lives beside it may have started others meanwhile.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return *files.heard(data, whole=whole), None

    def _serve(self, order: dict[str, Any], first: bytes) -> dict[str, Any]:
        """Give the driver a connection to a server, on which first was sent, and wait until it has its answer."""
        watch = self._watch()
        while True:
            try:
                fresh = hand_over(self.driver, self.servers, order, watch, first)
            except ServerFailed as error:
                return {"failed": error.kind, "detail": str(error)}
            while (message := self.inbox.take()) is None:
                if not self._listen(self._outputs, int(WATCH_S * 1000)):
                    sys.exit(0)
                watch()
            if message.fields["op"] != "again":
                return {**served(self.servers, order, message), "awaited": fresh}
            first = b""

    def _process(self, fields: dict[str, Any], stdin: bytes) -> dict[str, Any]:
        """Run a process of its own; the driver gets a socket on which its output comes."""
        heard, to = socket.socketpair()
        with to, heard:
            socket.send_fds(self.driver, [pack({"connected": True}, fds=1)], [heard.fileno()])
            heard.close()
            spared = processes.living()
            try:
                running, pid = self._launch(fields, stdin, to)
            except CannotStart as error:
                return failed(to, str(error))
            until = time.monotonic() + fields["timeout_s"]
            detach = bool(fields["arguments"].get("detach"))
            over_disk = self._tending()
            ending = running.pump(until, self.driver.fileno(), over_disk, self._client_left, detach=detach)
            if ending in {"timeout", "disk", "host"}:
                self.shells.kill_except(spared)
            elif ending == "left" and "process" in fields["arguments"]:
                ends, death = running.hand_over()
                self.left.add(self._left(fields["arguments"], ends, death, pid))
            elif ending == "left":
                for fd in running.outputs:
                    self.servers.take_over(fd, pid)
            answer = running.conclude(ending, lambda: self.shells.status_of(pid), self.changes.disk_bytes)
            return {**answer, "detached": detach, "kept": "process" in fields["arguments"]}

    def _left(self, told: dict[str, Any], ends: dict[int, int], death: int, pid: int) -> Left:
        return Left(told, ends, death, pid, lambda: self.shells.status_of(pid))

    def _launch(self, fields: dict[str, Any], stdin: bytes, to: socket.socket) -> tuple[Running, int]:
        asked, terminal = fields["arguments"], ""
        if asked.get("tty"):
            master, terminal = open_terminal("/dev/ptmx", asked.get("size"))
            ours, theirs = {1: master}, {0: os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)}
        else:
            ours, theirs = new_pipes(stdin=bool(stdin or asked.get("stdin")))
        theirs[TEXT_FD] = os.memfd_create("text", os.MFD_CLOEXEC)
        places = f"0<>{terminal} 1>&0 2>&0 {TEXT_FD}<&-" if terminal else f"{TEXT_FD}<&-"
        os.pwrite(
            theirs[TEXT_FD], text(asked, fields["environment"], uid=os.getuid(), places=places, terminal=terminal), 0
        )
        try:
            pid = self.shells.launch({}, theirs, PROGRAM)
            keeps_in = bool(asked.get("stdin"))
            return Running(ours, stdin, death_of(pid), to, keeps_in=keeps_in, due=due_of(asked)), pid
        except BaseException:
            for fd in ours.values():
                os.close(fd)
            raise
        finally:
            for fd in theirs.values():
                os.close(fd)

    def _tending(self) -> Callable[[], str | None]:
        """Return what is to be called during a call: it says when the sandbox holds too much, see `disk_watch`.

        It takes the output of servers, and of what their clients left, so that these do not block meanwhile.
        """
        over_disk = self.changes.disk_watch()

        def tend() -> str | None:
            self.left.look()
            for log in self.servers.outputs.values():
                log.drain()
            return over_disk()

        return tend

    def _client_left(self) -> bool:
        """Hear what the driver says during a call: that its client has left, or nothing ever again."""
        if not self._receive():
            sys.exit(0)
        message = self.inbox.take()
        return message is not None and message.fields["op"] == "leave"

    def _watch(self) -> Callable[[], None]:
        """Return what ends the servers when the sandbox holds too much, or the driver is gone."""
        over_disk = self._tending()
        poll = select.poll()
        poll.register(self.driver, select.POLLHUP | select.POLLRDHUP)

        def look() -> None:
            if poll.poll(0):
                sys.exit(0)
            if over_disk() is not None:
                self.shells.kill_except(set())

        return look

    def _start(self, orders: list[dict[str, Any]]) -> None:
        """Start servers, as part of the root state."""
        try:
            for order in orders:
                for fd in self.servers.connect(order, self._watch())[0]:
                    os.close(fd)
        except ServerFailed as error:
            self._reply({"failed": error.kind, "detail": str(error)})
            return
        self.alive.settle()
        self.changes.look()
        self._reply({})

    def _read_all(self, fd: int, timeout_s: float) -> tuple[bytes, bool]:
        output = Output(fd)
        deadline, over_disk = time.monotonic() + timeout_s, self._tending()
        poll = select.poll()
        poll.register(fd, select.POLLIN | select.POLLHUP)
        while time.monotonic() < deadline and over_disk() is None:
            events = poll.poll(WATCH_S * 1000)
            output.drain(sys.maxsize)
            if events and events[0][1] & select.POLLHUP and not events[0][1] & select.POLLIN:
                return bytes(output.kept), True
        return bytes(output.kept), False

    # -- what lives --------------------------------------------------------------------------------------------------

    def _living(self) -> set[processes.Process]:
        self.shells.reap()
        return processes.living()

    # -- states ------------------------------------------------------------------------------------------------------

    def _pause(self, *, discard: bool = False, root: bool = False, checkpoint: bool = False) -> None:
        """Get ready for other layers below: no shell may stand in the old ones. Tell the driver of the state.

        checkpoint: where something lives, stay as it is, and name the process whose tree can be dumped instead.
        """
        alive = bool(self.alive) and not discard
        if alive and (not checkpoint or root or (why := self._outside_the_tree())):
            self._reply({"not_freezable": why if checkpoint and not root else self.alive.who})
            return
        self.stillness.saw(wrote=self.changes.look())
        linked = self.changes.linked
        if linked and not discard and not root:
            # Over a frozen layer, writing to one name of a file leaves its other names behind: a later call would
            # see the difference.
            self._reply({"not_freezable": f"hard links would not stay one file: {', '.join(linked[:4])}"})
            return
        if alive and self.shells.anchor is not None:
            self.shells.ready_all()
            self.held_from = time.monotonic()
            self._reply({"tree": self.shells.anchor.pid})
            return
        if self.changes.written:
            self.shells.end()
        self._reply(self._told())

    def _told(self) -> dict[str, Any]:
        known = {"sessions": self.shells.sessions, "pristine": self.shells.pristine}
        return {**known, **self.changes.told(), **self._state()}

    def _state(self) -> dict[str, Any]:
        alive = bool(self.alive)
        return {
            **self.changes.state(self.shells.sessions, alive=alive),
            "restless": alive and self.stillness.restless,
        }

    def _look(self) -> None:
        """Tell of the state while all processes stand still, and what must be known of them to take them over."""
        self.stillness.saw(wrote=self.changes.look())
        self.stillness.stood_still(time.monotonic() - self.held_from)
        checkpoint = {
            **self.shells.remember(),
            "restless": self.stillness.restless,
            "servers": [server.remember() for server in self.servers],
            "left": [process.remember() for process in self.left],
            "pids": sorted(pid for pid, _ in processes.living()),
            "last_pid": processes.last_pid(),
        }
        self._reply({**self._told(), "checkpoint": checkpoint})

    def _outside_the_tree(self) -> str:
        """Say what lives here that no checkpoint would hold; empty where there is nothing."""
        if self.alive.has_ipc_objects:
            return "System V IPC objects exist, and a checkpoint does not hold them"
        if why := self.left.outside:
            return why
        anchor = self.shells.anchor
        if anchor is None or not processes.descend(lambda: (pid for pid, _ in processes.living()), anchor.pid):
            return "processes live that have lost the sandbox's anchor, because a command killed it"
        return ""

    def adopt(
        self,
        anchor: Anchor,
        shells: list[Shell],
        servers: list[dict[str, Any]],
        logs: list[int],
        left: list[tuple[dict[str, Any], dict[int, int]]],
        *,
        restless: bool,
    ) -> None:
        """Take over what a checkpoint brought back."""
        self.stillness.saw(wrote=restless)
        self.shells.adopt(anchor, shells)
        self.servers.adopt(servers, logs)
        for told, ends in left:
            process = self._left(told["told"], ends, death_of(told["pid"]), told["pid"])
            process.recall(told)
            self.left.add(process)
        self.alive.settle(patient=False)

    def _show(self, fields: dict[str, Any]) -> None:
        """Serve who looks at this state."""
        if fields["op"] == "look":
            self._look()
        elif fields["op"] == "terminal":
            columns, rows = fields["size"]
            given = (self.shells.sessions.get("main"), self.shells.environment, self.shells.workdir)
            terminal.give(self.driver, lambda: terminal.start_shell(*given, (columns, rows)))
        else:
            self.changes.look()
            known = {"sessions": self.shells.sessions, "pristine": self.shells.pristine}
            self._reply({"delta": self.changes.now, **known})

    def _switched(self, message: Message) -> None:
        """Go on over other layers; message carries the new upper and lower directories, if they did change."""
        if message.fds:
            upper, lower = message.fds
            self.changes.switched(upper, lower, message.fields["added_bytes"])
        self._reply({})
        self.shells.renew(list(self.shells.sessions) or ["main"])
