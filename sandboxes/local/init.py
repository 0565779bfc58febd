"""pid 1 of a sandbox: sets its namespaces up, confines itself, then runs what the driver asks for, one at a time.

After setting up it has no right that the agent's processes lack: what needs more (mounting layers) the launcher does.
It dies with the launcher and when the driver's end of its socket closes; everything in the sandbox dies with it.
"""

import contextlib
import os
import signal
import socket
import sys
import time
from typing import Any

from sandboxes.guest import file_delta as delta
from sandboxes.guest import terminal
from sandboxes.guest.anchor import Anchor, ShellStartError
from sandboxes.guest.background import AllLeft, Left
from sandboxes.guest.changes import Changes, Stillness
from sandboxes.guest.checkpoint_restore import Restoring
from sandboxes.guest.exec_script import PROGRAM, TEXT_FD, text
from sandboxes.guest.process_io import Running, death_of, due_of, failed, new_pipes, open_terminal
from sandboxes.guest.shell import Shell
from sandboxes.guest.shell_pool import Shells
from sandboxes.guest.supervisor import Answered, Supervisor, not_started
from sandboxes.guest.survivors import Alive
from sandboxes.guest.tool_servers import Servers
from sandboxes.ipc.frames import Inbox, Message, pack, receive
from sandboxes.linux import confine, processes
from sandboxes.linux import mounts as rootfs
from sandboxes.linux import syscalls as kernel

NAMESPACES = kernel.CLONE_NEWNS | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS


def run(channel: int, cgroups: list[str], *, privileged: bool) -> None:
    """Be a sandbox until the driver lets go: get ready for whatever spec comes, then begin with one."""
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    kernel.set_process_name("init")
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
    init = Init(driver, inbox, delta.DeltaRoots(upper, lower, root), fields)
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


class Init(Supervisor):
    """A sandbox at work. fields: what the driver told it of its spec and of the frozen state that it goes on from."""

    def __init__(self, driver: socket.socket, inbox: Inbox, roots: delta.DeltaRoots, fields: dict[str, Any]) -> None:
        self.driver = driver
        self.inbox = inbox
        self.output_bytes: int = fields["output_bytes"]
        self.seals: bool = fields["seals"]
        self.shells = Shells(fields["environment"], fields["workdir"], fields["sessions"], fields["pristine"])
        self.servers = Servers(self.shells)
        self.left = AllLeft(self.output_bytes)
        self.changes: Changes = Changes(roots, fields)
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
        except ShellStartError as error:
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
                    self._start_servers(message.fields["servers"])
                case "pause":
                    self._pause(root=message.fields["root"], checkpoint=message.fields["checkpoint"])
                case "look" | "describe" | "terminal":
                    self._show(message.fields)
                case "switched":
                    self._switched(message)

    # -- calls -------------------------------------------------------------------------------------------------------

    def _exec(self, fields: dict[str, Any], command: bytes) -> Answered:
        spared = processes.list_processes() if self.alive else set()
        try:
            shell = self.shells.ready(fields["session"])
        except ShellStartError as error:
            return not_started(error)
        others = {other.pid for other in self.shells if other is not shell}
        if spared or others:
            # The anchor goes with its shells, unless others have to stay.
            others |= self.shells.anchor_pids
        spared |= {process for process in processes.list_processes() if process[0] in others}
        shell.run(command)
        ending = self._wait(shell, fields["timeout_s"])
        return self._conclude(shell, ending, lambda: self.shells.kill_except(spared, first=shell.pid))

    def _let_go(self, shell: Shell, ending: str) -> None:
        if ending == "malformed":
            self.shells.kill(shell)
        else:
            self.shells.forget(shell)

    def _end_servers(self) -> None:
        self.shells.kill_except(set())

    def _answer_call(self, answer: dict[str, Any], body: bytes, touched: str | None) -> None:
        wrote = self.seals and self.changes.written and not self.alive
        discard = wrote and self.changes.undone
        seal = wrote and not discard and not self.changes.linked
        self._reply({**answer, "discard": discard, "seal": seal}, body)
        if discard or seal:
            # What was written goes away or into a layer: the driver is told at once what it would ask next.
            self._pause(discard=discard)
        elif not self.alive:
            self.shells.renew([touched] if touched else [])

    def _process(self, fields: dict[str, Any], stdin: bytes) -> dict[str, Any]:
        """Run a process of its own; the driver gets a socket on which its output comes."""
        heard, to = socket.socketpair()
        with to, heard:
            socket.send_fds(self.driver, [pack({"connected": True}, fds=1)], [heard.fileno()])
            heard.close()
            spared = processes.list_processes()
            try:
                running, pid = self._launch(fields, stdin, to)
            except ShellStartError as error:
                return failed(to, str(error))
            until = time.monotonic() + fields["timeout_s"]
            detach = bool(fields["arguments"].get("detach"))
            over_disk = self._tending()
            ending = running.pump(until, self.driver.fileno(), over_disk, self._client_left, detach=detach)
            if ending in {"timeout", "disk", "host"}:
                self.shells.kill_except(spared)
            elif ending == "left" and "process" in fields["arguments"]:
                ends, death = running.hand_over()
                process = self._left(fields["arguments"], ends, death, pid)
                process.until = until
                self.left.add(process)
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

    # -- what lives --------------------------------------------------------------------------------------------------

    def _living(self) -> set[processes.Process]:
        self.shells.reap()
        return processes.list_processes()

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

    def _look(self) -> None:
        """Tell of the state while all processes stand still, and what must be known of them to take them over."""
        self.stillness.saw(wrote=self.changes.look())
        self.stillness.stood_still(time.monotonic() - self.held_from)
        checkpoint = {
            **self.shells.remember(),
            "restless": self.stillness.restless,
            "servers": [server.remember() for server in self.servers],
            "left": [process.remember() for process in self.left],
            "pids": sorted(pid for pid, _ in processes.list_processes()),
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
        if anchor is None or not processes.all_descend(
            lambda: (pid for pid, _ in processes.list_processes()), anchor.pid
        ):
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
