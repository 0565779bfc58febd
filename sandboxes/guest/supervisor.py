"""The loop that runs a sandbox's calls, one at a time, in pid 1 of a local sandbox."""

# Theory of operation.
#
# The supervisor is a single thread between two kinds of peers that it trusts differently:
#
# 1. The proxy, over one socket. It sends a request and waits for the answer. While a call runs it may send one thing
#    more: that the client has detached, or, during a call to a tool server, how that call goes on.
# 2. The agent's processes, over pipes. They may print without end, never read, kill each other, or be gone at any
#    moment. So every wait is a `poll` with a deadline over all that may happen, and no pipe is ever read or written
#    blockingly.
#
# A call is: note the state, let the call run, then compare. What the call changed (files, session, processes) goes into
# the answer together with the digest of the new state, because the proxy names a node of its tree by it. Between calls
# the supervisor keeps draining the output of whatever still runs: a full pipe would stop those processes.
#
# What follows a call, because the sandbox's files lie in layers, is the caller's part: `local.pid_one.PidOne`.

import hashlib
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from select import POLLHUP, POLLIN, POLLRDHUP, poll

from sandboxes.effects import StateDigest
from sandboxes.guest import dir_watch, process_call
from sandboxes.guest.anchored_processes import ChildDeaths, known
from sandboxes.guest.anchors.anchor import ShellStartError
from sandboxes.guest.anchors.shell_kit import narrow
from sandboxes.guest.background import BackgroundProcesses, PendingOutput
from sandboxes.guest.bash.session import MalformedDumpError, is_lost, without_loss
from sandboxes.guest.driver_link import DriverLink
from sandboxes.guest.files import child as file_child
from sandboxes.guest.files import deleted_files
from sandboxes.guest.files.changes import Changes, Stillness
from sandboxes.guest.files.disk_watch import WATCH_S, limit_note
from sandboxes.guest.performed import Performed, not_started
from sandboxes.guest.process_io import OVER_DISK, TIMED_OUT
from sandboxes.guest.shell import Output, Shell
from sandboxes.guest.shell_looks import ShellLooks
from sandboxes.guest.shells import Shells, folder_of, unless_broken
from sandboxes.guest.survivors import Survivors
from sandboxes.guest.tool_servers import Servers, ToolServerError
from sandboxes.ipc.codec import Envelope, IpcMessage
from sandboxes.ipc.messages import (
    CallDone,
    CommandOutcome,
    CourseExpected,
    Described,
    DescribeState,
    Detach,
    Done,
    ExpectCourse,
    FileOutcome,
    ResourcesUsed,
    RunCommand,
    RunFileOperation,
    RunProcess,
    ServerOutcome,
    StateSummary,
    UseBackgroundProcess,
)
from sandboxes.ipc.server_messages import (
    FinishServerCall,
    ServerConnected,
    ServerFailed,
    ServerOrder,
    StartServers,
    UseServer,
)
from sandboxes.linux import confine, outlet, user_counts
from sandboxes.linux.live_state import LiveState
from sandboxes.linux.processes import Process, fields_of_processes, last_pid, list_processes, ran_between, run_counts
from sandboxes.linux.sandbox_groups import GroupFiles, MemoryLimit, PidsLimit, ResourceMeter
from sandboxes.linux.socket_queues import SocketQueues

_NO_DESCRIPTORS = (
    b"\n[forkpoint: the session stays as it was before this call: the command has closed all descriptors up to 1000, "
    b"or left its shell too few of them (ulimit -n)]\n"
)
CallRequest = RunCommand | RunFileOperation | RunProcess | UseBackgroundProcess | UseServer
"""Requests that are calls: their effects are measured and reported."""


class Supervisor:
    """Runs the calls of one sandbox and reports what each of them changed."""

    def __init__(
        self,
        link: DriverLink,
        shells: Shells,
        servers: Servers,
        background: BackgroundProcesses,
        changes: Changes,
        sockets: SocketQueues | None,
        groups: GroupFiles,
    ) -> None:
        self.link, self.shells, self.servers = link, shells, servers
        self.background, self.changes = background, changes
        self.survivors = Survivors(shells, background, self.living)
        self.stillness = Stillness()
        self._sockets, self._looks = sockets, ShellLooks(shells)
        self._deaths, self._limit, self._meter = ChildDeaths(), PidsLimit(groups), ResourceMeter(groups)
        self._memory = MemoryLimit(groups)
        self._reached: set[str] = set()
        shells.make_room = self._make_room
        self._live: LiveState | None = None
        self._repeats = False

    # -- waiting -----------------------------------------------------------------------------------------------------

    def next_request(self) -> Envelope[IpcMessage] | None:
        """Wait for a request and return it; None if the proxy is gone. Meanwhile drain the output of what runs."""
        while (envelope := self.link.take()) is None:
            outputs = self._outputs if self.survivors else {}
            if not self._listen(outputs, self.background.within_ms if self.survivors else None):
                return None
            self._collect()
            self.background.drain()
            if self.survivors:
                self._require_bounds()
        return envelope

    def _require_bounds(self) -> None:
        """End this process, and so the sandbox, if what runs between calls holds too much: no call could end it."""
        ending = self.changes.over_disk(self._pids)
        is_hidden = ending == "host" and deleted_files.are_hidden(self._pids())
        if ending in ("disk", "depth") or is_hidden or (user_counts.are_exhausted() and self._holds_too_much()):
            sys.exit(1)

    @property
    def _outputs(self) -> dict[int, Output | PendingOutput]:
        return {**self.shells.outputs, **self.servers.outputs, **self.background.outputs}

    def _listen(self, outputs: Mapping[int, Output | PendingOutput], within_ms: int | None) -> bool:
        """Wait for the proxy or for output, for at most within_ms; return False if the proxy is gone."""
        waiting = poll()
        for fd in (self.link.fileno(), self._deaths.fileno(), *outputs):
            waiting.register(fd, POLLIN)
        events = waiting.poll(within_ms)
        for fd, event in events:
            if fd in outputs:
                # A full pipe would stop the process that writes to it.
                outputs[fd].drain(self.background.max_bytes)
                if not event & POLLIN:
                    # Hung up: nothing writes there any more. `poll` would report this at once, again and again.
                    self.servers.close_log(fd)
            elif fd == self.link.fileno():
                return self.link.receive()
        return True

    def _collect(self) -> None:
        """Collect the children of this process that have ended; what they ended with is kept for `status_of`."""
        self._deaths.clear()
        self.shells.reap()

    def _require_peers(self, readable: set[int]) -> None:
        """End this process if the proxy has hung up: no request comes from it during a call but `Detach`."""
        if self.link.fileno() in readable:
            sys.exit(0)

    def _client_detached(self) -> bool:
        if not self.link.receive():
            sys.exit(0)
        envelope = self.link.take()
        return envelope is not None and isinstance(envelope.message, Detach)

    def _call_watch(self) -> Callable[[], str | None]:
        """Return a function to be called again and again during a call; it says which limit is exceeded."""
        # It also collects orphans, which have no other parent, and drains servers and background processes: they run
        # during the call, and a full pipe would stop them.
        takes_too_much = user_counts.watch(self._pids)

        def watch() -> str | None:
            self._collect()
            self.background.look()
            for log in self.servers.outputs.values():
                log.drain()
            # The last one is the machine's failure and not the call's: it depends on what other sandboxes hold.
            reached = self._limit.reached() or ("host" if takes_too_much() else self.changes.over_disk(self._pids))
            self._reached |= set() if reached is None else {reached}
            return reached

        return watch

    def living(self, ours: Collection[int] = ()) -> dict[Process, list[bytes]]:
        """Return all processes of the sandbox but some, with their fields. Ended ones are collected first."""
        self.shells.reap()
        return fields_of_processes(ours)

    def _pids(self) -> list[int]:
        return [pid for pid, _ in self.living() if pid not in self.shells.hidden_pids]

    def _holds_too_much(self) -> bool:
        return user_counts.held(self._pids()) > user_counts.SHARE

    # -- calls -------------------------------------------------------------------------------------------------------

    def call(self, request: CallRequest, envelope: Envelope[IpcMessage]) -> tuple[CallDone, bytes, list[str]] | None:
        """Run a call; return its answer, its body, and the sessions that need a fresh shell."""
        # The sessions count only if nothing survives. None if a tool server failed: then the answer has been sent.
        self._limit.begin()
        self._memory.begin()
        self._reached.clear()
        before, free = self.survivors.now, self.changes.free_bytes()
        there = set(self.survivors.processes)
        session = request.session if isinstance(request, RunCommand) else None
        self.shells.reap()
        pid_before = self._ready_shells(session)
        self.survivors.begin()
        runs = run_counts(self.survivors.processes)
        live = self._live_state(runs)
        self._looks.note(session, stays=bool(before))
        self._meter.begin()
        began_at = time.perf_counter()
        try:
            performed = self._perform(request, envelope)
        except ToolServerError as error:
            # The proxy gives this sandbox up: how far the call came is not known.
            self.link.send(ServerFailed(error.kind, str(error)))
            return None
        seconds, used = time.perf_counter() - began_at, self._meter.end()
        # Before files are looked at: processes that are about to end may still be writing.
        self.survivors.settle([process for process, count in runs.items() if count >= 0])
        if self._memory.was_reached:
            self._reached.add("memory")
        if isinstance(request, RunFileOperation) and seconds >= request.timeout_s:
            self._reached.add("timeout")
        if (reached := self._limit.reached()) is not None:
            self._reached.add(reached)
            performed = self._end_at_limit(performed, there, reached)
        short = user_counts.are_exhausted()
        host_full = performed.host_full or (short and bool(self.survivors) and self._holds_too_much())
        # Compared as a whole: a process that ended and one that came in its place are a change.
        came_or_went = self.survivors.now != before
        changed, fresh = came_or_went, [] if session is None else [session]
        if not (performed.read or changed):
            # A process that answers has worked. After a call that only reads, only comings and goings count.
            changed = ran_between(runs, run_counts(self.survivors.processes))
        # A process that sleeps may have been changed by the call all the same.
        touched = not (performed.read or changed) and self._touched(session, live)
        changed |= touched and bool(before)
        if not self.survivors and (touched or before):
            # What no dump has of the other shells would be seen by later calls, and a restored sandbox lacks it.
            fresh = self.shells.end_idle(session)
        wrote_files = self.changes.look()
        self.stillness.saw(wrote=wrote_files, moved=came_or_went)
        if self.changes.too_deep:
            self._reached.add("disk")
            performed = performed.nested_too_deep(self.changes.disk_bytes)
        if performed.may_be_broken and self.changes.lack_shell():
            performed = replace(performed, is_broken=True)
        # Before counts as well as after: a write may have failed because others had filled the disk, and the disk may
        # have room again. Nothing tells whether the call noticed, so no result of a moment without room is recorded.
        disk_low = min(free, self.changes.free_bytes()) < self.changes.reserve_bytes
        # One answer carries everything, so that a call costs one round trip.
        answer = CallDone(
            performed.outcome,
            seconds,
            changed_session=performed.session_changed,
            changed_processes=changed,
            changed_files=wrote_files,
            settling=self.survivors.moving and came_or_went and not performed.awaited,
            host_full=host_full or disk_low,
            short=short,
            state=self.state(),
            order=None if self.survivors else self.changes.order,
            last_pid=pid_before,
            resources=None if used is None else ResourcesUsed(*used),
            marks=performed.marks(self._reached),
        )
        return answer, performed.body, fresh

    def _expect_pids(self, wanted: int) -> int:
        now = last_pid()
        begun = not self.survivors and any(
            shell.pid == now == wanted + 1 and not shell.waits_as_template for shell in self.shells
        )
        self._repeats = wanted > 0 and not begun
        return wanted if begun else now

    def _ready_shells(self, session: str | None) -> int:
        """Get the shells ready for a call of a session; return the pid that was assigned last before that shell's."""
        # A replay gets the same pids whether a shell is a template's fork, which begins with the call, or was started
        # ahead: it starts such a shell again, as does a call whose shell is not the last process. With several sessions
        # they may differ.
        before, repeats, self._repeats = last_pid(), self._repeats, False
        if session is None or self.survivors or not self.shells.sessions.keys() <= {session}:
            self.shells.ready_all()
            return before
        for shell in self.shells:
            if shell.name == session and not shell.waits_as_template and (repeats or shell.pid != before):
                with unless_broken():
                    # Its pipes are lent again only once they are empty.
                    self.shells.ready(session)
                    self.shells.renew([session], templates=False)
        self.shells.ready_all()
        now = last_pid()
        return now - 1 if any((shell.name, shell.pid) == (session, now) for shell in self.shells) else before

    def _end_at_limit(self, performed: Performed, there: AbstractSet[Process], reached: str) -> Performed:
        """End what a call has started, because a process could not be started; return what came of the call."""
        # What was there before goes on, unless it holds most of the processes that may be.
        if reached == "host":
            return replace(performed, host_full=True)
        idle = self.shells.idle_pids
        self.shells.kill_except(there | {process for process in list_processes() if process[0] in idle})
        if self._limit.is_crowded:
            self.shells.kill_except(set())
        self.survivors.settle()
        return performed.out_of_processes()

    def _make_room(self) -> bool:
        """End all processes if the limit of processes is why one of ours does not start; return whether it is."""
        if self._limit.reached() != "pids":
            return False
        self.shells.kill_except(set())
        return True

    def _touched(self, session: str | None, live: LiveState | None) -> bool:
        """Return whether a call has changed another shell, or what survives. Both looks serve the next call too."""
        touched = self._looks.touched(session)
        return (live is not None and live.changed()) or touched

    def _live_state(self, runs: Mapping[Process, int]) -> LiveState | None:
        """Return a look at what survives, taken before a call; None if no process does."""
        # The look after the last call serves if nothing has run since then, which halves the cost.
        live, shells = self._live, frozenset(self.shells.idle_pids)
        if live is not None and (live.spent or live.subjects != (runs, shells) or -1 in runs.values()):
            live.close()
            live = None
        if live is None and runs:
            live = LiveState(runs, shells, self._sockets, hidden=self.shells.hidden_pids)
        self._live = live
        return live

    def _perform(self, request: CallRequest, envelope: Envelope[IpcMessage]) -> Performed:
        match request:
            case RunCommand():
                return self._run_command(request, envelope.body)
            case RunProcess():
                return self._run_process(request, envelope.body)
            case UseServer():
                return self._use_server(request.server, envelope.body)
            case UseBackgroundProcess():
                enter = self._become_agent
                status, media_type, body = dir_watch.perform(self.background, request, envelope.body, enter)
                return Performed(FileOutcome(status, media_type), body)
            case RunFileOperation():
                enter, over_disk = self._become_agent, self._call_watch()
                if "session" in request.arguments:
                    # A path is relative to the directory in which the session's next command would run.
                    folder = folder_of(self.shells, request.arguments["session"])
                    arguments = {**request.arguments, "path": f"{folder}/{request.arguments['path']}"}
                    request = RunFileOperation(request.tool, arguments, request.timeout_s)
                return Performed(*file_child.run(request, envelope.body, envelope.fds, enter, over_disk))

    def _become_agent(self) -> None:
        user = self.shells.user
        confine.stop_looking()
        if not user.is_root:
            confine.become_user(user.uid, user.gid, user.groups)

    def _run_process(self, request: RunProcess, stdin: bytes) -> Performed:
        return process_call.run(
            self.link, self.shells, self.background, self.servers, request, stdin,
            self._call_watch(), self._client_detached, self.changes, self._deaths.fileno(), self._limit,
        )  # fmt: skip

    def state(self) -> StateSummary:
        """Return what every answer reports of the state."""
        running = self.survivors.moving
        digest, witness = self.changes.digests(self.shells.sessions, alive=running)
        if digest is not None and (jobs := self.survivors.jobs):
            # `content` is what a replay must reach, and a replay has other pids.
            exact = hashlib.blake2b(digest.exact + repr(jobs).encode(), digest_size=32).digest()
            digest = StateDigest(exact, digest.content)
        return StateSummary(digest, witness, restless=running and self.stillness.restless)

    def outside_checkpoint(self) -> str:
        """Return why CRIU would lose something that survives; empty if nothing is known against a checkpoint."""
        if reason := self.survivors.outside_checkpoint:
            return reason
        if self._sockets is not None and self._sockets.datagrams:
            return "datagrams wait in a socket, and a checkpoint does not hold them"
        if outlet.connected():
            return outlet.CONNECTED
        return self.background.outside_checkpoint

    def answer(self, request: StartServers | ExpectCourse | DescribeState) -> None:
        """Answer a request that is no call."""
        match request:
            case StartServers():
                self._start_servers(request.servers)
            case ExpectCourse():
                if request.order is not None:
                    self.changes.expect(request.order)
                self.link.send(CourseExpected(self._expect_pids(request.last_pid)))
            case DescribeState():
                self.changes.look()
                self.link.send(Described(self.changes.shown(), self.shells.sessions, self.shells.pristine))

    # -- commands ----------------------------------------------------------------------------------------------------

    def _run_command(self, request: RunCommand, command: bytes) -> Performed:
        # After a timeout everything is killed but what was there before: survivors, and the other sessions' shells.
        spared = list_processes() if self.survivors else set()
        try:
            shell = self.shells.for_command(request.session)
        except ShellStartError as error:
            return not_started(error)
        shell.out.tail_bytes = shell.err.tail_bytes = self.shells.tail_bytes
        self.shells.watch_anchor()
        # Idle shells of other sessions are no part of the command.
        others = {other.pid for other in self.shells if other is not shell}
        if spared or others:
            # The anchor goes together with its shells, unless others have to stay.
            others |= self.shells.anchor_pids
            spared |= {process for process in list_processes() if process[0] in others}
        shell.run(command)
        return self._finish_command(shell, request.timeout_s, lambda: self.shells.kill_except(spared, first=shell.pid))

    def _finish_command(self, shell: Shell, timeout_s: float, kill: Callable[[], None]) -> Performed:
        ending = self._wait(shell, timeout_s)
        if ending in {"dump", "died"}:
            # A command can end before the watch looks.
            ending = self._limit.reached() or ending
        code, changed, notes = 0, False, b""
        if ending == "dump":
            try:
                code, changed = self.shells.take_dump(shell)
            except MalformedDumpError as error:
                ending, code = "malformed", 1
                notes = f"\n[forkpoint: the session stays as it was before this call: {error}]\n".encode()
        elif ending == "died":
            code = known(self.shells.status_of(shell.pid))
        else:
            # Everything goes, not only the shell: the command's children would go on otherwise.
            kill()
            code = TIMED_OUT if ending == "timeout" else OVER_DISK
            notes = limit_note(ending, self.changes.disk_bytes) if ending == "disk" else b""
        # The writers are gone or idle now: what is still in the pipes is the last of the command's output.
        for output in (shell.out, shell.err):
            output.drain(self.background.max_bytes)
        lost = ending == "died" and is_lost(
            code, *(bytes(output.end or output.data) for output in (shell.out, shell.err))
        )
        truncated = bool(shell.out.dropped or shell.err.dropped)
        out, err = shell.out.take(), shell.err.take()
        # Also those of a shell that stays, because processes live.
        narrow((shell.out.fd, shell.err.fd, shell.dump_fd))
        if lost:
            # One bash would go on. Not its session but our access to it is gone.
            code, notes, (out, err) = 1, _NO_DESCRIPTORS, without_loss(out, err)
        if ending != "dump":
            # One whose dump was malformed still runs.
            (self.shells.kill if ending == "malformed" else self.shells.forget)(shell)
        outcome = CommandOutcome(code, ending == "timeout", truncated=truncated, stdout_bytes=len(out))
        return Performed(outcome, out + err + notes, session_changed=changed, host_full=ending == "host")

    def _wait(self, shell: Shell, timeout_s: float) -> str:
        """Wait for a shell's dump; return "dump", "died", "timeout", "disk", "depth", "pids" or "host"."""
        deadline, watch = time.monotonic() + timeout_s, self._call_watch()
        waiting = poll()
        outputs = {output.fd: output for output in (shell.out, shell.err)}
        for fd in (*outputs, shell.dump_fd, shell.death):
            waiting.register(fd, POLLIN)
        # Not POLLIN: the proxy sends no request during a command, so only its hanging up matters.
        waiting.register(self.link, POLLHUP | POLLRDHUP)
        waiting.register(self._deaths, POLLIN)
        while (remaining_s := deadline - time.monotonic()) > 0:
            events = {fd for fd, _ in waiting.poll(max(1, min(remaining_s, WATCH_S) * 1000))}
            for fd in events & outputs.keys():
                outputs[fd].drain(self.background.max_bytes)
            self._require_peers(events)
            # The dump comes first: a shell that wrote it whole and then died has ended the call as usual.
            if shell.dump_fd in events and shell.read_dump():
                return "dump"
            if shell.death in events:
                return "died"
            if (over := watch()) is not None:
                return over
        return "timeout"

    # -- servers -----------------------------------------------------------------------------------------------------

    def _start_servers(self, orders: Sequence[ServerOrder]) -> None:
        try:
            for order in orders:
                self.servers.start(order, self._server_watch())
        except ToolServerError as error:
            self.link.send(ServerFailed(error.kind, str(error)))
            return
        self.survivors.settle()
        self.changes.look()
        self.link.send(Done())

    def _use_server(self, order: ServerOrder, first: bytes) -> Performed:
        """Give the proxy a connection to a server, and wait until the proxy says that the server has answered."""
        # `first` is what to send over the connection before the proxy has it.
        watch = self._server_watch()
        while True:
            fds, fresh = self.servers.connect(order, watch, first)
            # The note tells the proxy what earlier calls agreed on with this very process.
            self.link.hand_over(ServerConnected(fresh, self.servers.note(order.name)), fds)
            while (envelope := self.link.take()) is None:
                if not self._listen(self._outputs, int(WATCH_S * 1000)):
                    sys.exit(0)
                watch()
            if isinstance(envelope.message, FinishServerCall):
                return self._finish_server_call(order, envelope.message, fresh=fresh)
            # The proxy needs another connection to the same server.
            first = b""

    def _finish_server_call(self, order: ServerOrder, finish: FinishServerCall, *, fresh: bool) -> Performed:
        if finish.note is not None:
            self.servers.take_note(order.name, finish.note)
        log = self.servers.log((order.behind or order).name) if finish.log else ""
        # A server that was started for this call was waited for; other processes may still be starting.
        return Performed(ServerOutcome(log), read=finish.read, awaited=fresh)

    def _server_watch(self) -> Callable[[], None]:
        """Return a function to be called while a server starts or answers."""
        # It ends the servers if the sandbox holds too much, and this process if the proxy is gone.
        watch = self._call_watch()
        waiting = poll()
        waiting.register(self.link, POLLHUP | POLLRDHUP)

        def watch_server() -> None:
            self._require_peers({fd for fd, _ in waiting.poll(0)})
            if watch() is not None:
                self.shells.kill_except(set())

        return watch_server
