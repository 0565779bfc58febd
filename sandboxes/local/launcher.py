"""The process that every sandbox's pid 1 is forked from: it makes mounts, and forks. One thread, few imports.

It is root, or, where the driver is not, root of a user namespace of its own: whatever follows is the same code.
It ends when the driver's end of its socket closes, and with it, by their death signal, all sandboxes.
"""

import gc
import os
import signal
import socket
import sys
from typing import Any

from sandboxes.guest.criu_launch import operate
from sandboxes.ipc.frames import Inbox, Message, pack, receive
from sandboxes.linux import mounts as rootfs
from sandboxes.linux import syscalls as kernel
from sandboxes.local import init


class Launcher:
    def __init__(self, driver: socket.socket, *, privileged: bool) -> None:
        self.driver = driver
        self.privileged = privileged
        self.own_mounts = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
        self.own_pids = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)

    def serve(self) -> None:
        """Answer requests until the driver is gone."""
        inbox = Inbox()
        while True:
            data, fds = receive(self.driver)
            if not data:
                return
            inbox.feed(data, fds)
            while (message := inbox.take()) is not None:
                self._answer(message)

    def _answer(self, message: Message) -> None:
        reply: dict[str, Any] = {}
        fds: list[int] = []
        try:
            match message.fields["op"]:
                case "fork":
                    fds = [self._fork(message)]
                case "mount":
                    fds = self._mount(message.fields["stack"])
                case "switch":
                    fds = self._switch(message)
                case "operate":
                    self._operate(message)
        except OSError as error:
            reply = {"error": str(error)}
        frame = pack(reply, fds=len(fds))
        sent = socket.send_fds(self.driver, [frame], fds)
        if sent < len(frame):
            self.driver.sendall(frame[sent:])
        for fd in [*fds, *message.fds]:
            os.close(fd)

    def _fork(self, message: Message) -> int:
        """Fork a pid 1; return its process descriptor. The rest of its setting up is its own and in parallel."""
        kernel.unshare(kernel.CLONE_NEWPID)
        try:
            pid = os.fork()
            if pid == 0:
                self._become_init(message)
        finally:
            kernel.setns(self.own_pids, kernel.CLONE_NEWPID)
        return os.pidfd_open(pid)

    def _become_init(self, message: Message) -> None:
        code = 1
        try:
            self.driver.close()
            os.close(self.own_mounts)
            os.close(self.own_pids)
            init.run(message.fds[0], message.fields["cgroups"], privileged=self.privileged)
            code = 0
        except SystemExit:
            code = 0
        except BaseException as error:  # noqa: BLE001 - the last frame of a process: tell the driver, then end
            init.say_last_words(message.fds[0], error)
        finally:
            os._exit(code)

    def _switch(self, message: Message) -> list[int]:
        """Give a sandbox, named by its mount namespace, new layers; return its new upper and lower directories."""
        overlay, *rest = self._mount(message.fields["stack"])
        try:
            kernel.setns(message.fds[0], kernel.CLONE_NEWNS)
            try:
                rootfs.switch(overlay, message.fields["binds"])
            finally:
                kernel.setns(self.own_mounts, kernel.CLONE_NEWNS)
                os.chdir("/")
        except OSError:
            for fd in rest:
                os.close(fd)
            raise
        finally:
            os.close(overlay)
        return rest

    def _operate(self, message: Message) -> None:
        """Start CRIU inside a sandbox, named by its pid 1, in a child that talks to the driver itself."""
        pid = os.fork()
        if pid:
            return
        try:
            self.driver.close()
            sandbox, reply, host_root, *files = message.fds
            kernel.setns(sandbox, init.NAMESPACES | kernel.CLONE_NEWPID | kernel.CLONE_NEWCGROUP)
            os.chdir("/")
            operate(host_root, message.fields["program"], reply, files, survey=True)
        except OSError as error:
            init.say_last_words(message.fds[1], error)
        finally:
            os._exit(1)

    def _mount(self, stack: dict[str, Any]) -> list[int]:
        """Return descriptors: the whole stack as one detached mount, its upper directory, and what lies below that.

        Where stack names the root state's layers, what these show comes fourth.
        """
        fds = [kernel.overlay(stack["lowers"], stack["upper"], stack["work"])]
        try:
            fds.append(os.open(stack["upper"], os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            fds.append(kernel.overlay(stack["lowers"], None, None))
            if "root" in stack:
                same = stack["root"] == stack["lowers"]
                fds.append(os.dup(fds[2]) if same else kernel.overlay(stack["root"], None, None))
        except OSError:
            for fd in fds:
                os.close(fd)
            raise
        return fds


def _become_root_of_a_namespace() -> None:
    """Go on as root of a new user namespace, and as pid 1 of a pid namespace that it owns.

    Only in one of its own may this process come back from each sandbox's pid namespace that it makes.
    """
    uid, gid = os.geteuid(), os.getegid()
    kernel.unshare(kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS | kernel.CLONE_NEWPID)
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:  # noqa: PTH123 - pathlib is not loaded here
            file.write(text)
    pid = os.fork()
    if pid:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.closerange(3, 1 << 16)
        os.waitpid(pid, 0)
        os._exit(0)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)


def _show_host(place: str) -> None:
    """Mount the host's root at place/root, in this process's mounts only.

    An overlay of its own, because overlayfs refuses a layer that lies inside another one: our layers are in the host's
    root, but not in this view of it.
    """
    kernel.mount("tmpfs", place, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755,size=16k,nr_inodes=8")
    for name in ("empty", "root"):
        os.mkdir(f"{place}/{name}")  # noqa: PTH102
    mounted = kernel.overlay(["/", f"{place}/empty"], None, None)
    kernel.attach(mounted, f"{place}/root")
    os.close(mounted)


def main() -> None:
    """Serve on the descriptor, and with the directory for the host's view, that argv names."""
    driver = socket.socket(fileno=int(sys.argv[1]))
    driver.set_inheritable(False)
    # Event loops pass on more than they are asked to; nothing of the driver's process may reach a sandbox.
    os.closerange(3, driver.fileno())
    os.closerange(driver.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
    # The terminal's Ctrl-C is for the driver, who closes the sandboxes in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Children are reaped by the kernel; the driver watches them by their process descriptors.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    privileged = os.geteuid() == 0
    try:
        if privileged:
            kernel.unshare(kernel.CLONE_NEWNS)
        else:
            _become_root_of_a_namespace()
        kernel.mount("", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
        if privileged:
            _show_host(sys.argv[2])
        # Forked memory stays shared as long as nobody writes to it; the collector would.
        gc.collect()
        gc.freeze()
        gc.disable()
        driver.sendall(pack({"ready": True, "privileged": privileged}))
    except OSError as error:
        driver.sendall(pack({"error": str(error)}))
        return
    Launcher(driver, privileged=privileged).serve()


if __name__ == "__main__":
    main()
