"""How the processes of a sandbox are looked at while CRIU holds them still."""

import contextlib
import os
import select
from collections.abc import Callable, Iterator

from sandboxes.linux import syscalls as kernel
from sandboxes.linux.descriptors import Opened


class NotDumpableError(Exception):
    """The processes must not be dumped; the text says why."""


def in_child(act: Callable[[], list[bytes]]) -> list[bytes]:
    """Return what a function returns in a child, which belongs to the pid namespace that this process has entered."""
    # What is returned has no zero bytes.
    reading, writing = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        reason, answers = "its processes cannot be looked at", list[bytes]()
        try:
            answers = act()
            reason = ""
        except NotDumpableError as error:
            reason = str(error)
        except OSError as error:
            reason = f"its processes cannot be looked at: {error}"
        finally:
            with os.fdopen(writing, "wb") as answer:
                answer.write(b"\0".join((reason.encode()[:1024], *answers)))
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        text, *answers = answer.read().split(b"\0")
    os.waitpid(pid, 0)
    if text:
        raise NotDumpableError(text.decode(errors="replace"))
    return answers


@contextlib.contextmanager
def taken(pid: int, number: int) -> Iterator[int]:
    """Yield a duplicate of a descriptor of another process, in the sandbox's pid namespace (`in_child`)."""
    with Opened(os.pidfd_open(pid)) as process, Opened(kernel.take_descriptor(process, number)) as fd:
        yield fd


def described(pid: int, number: int) -> list[tuple[str, str]]:
    """Return the lines that tell about a descriptor (proc_pid_fdinfo(5)), each as its name and its text."""
    with open(f"/proc/{pid}/fdinfo/{number}") as file:  # noqa: PTH123
        pairs = (line.partition(":") for line in file)
        return [(name.strip(), text.strip()) for name, _, text in pairs]


def kernel_text(directory: str, name: str) -> str:
    """Return what a file of the kernel shows; empty if there is none, as of a process that has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError), open(f"{directory}/{name}") as file:  # noqa: PTH123
        return file.read().strip()
    return ""


def events(fd: int) -> int:
    """Return which of `POLLOUT`, `POLLRDHUP`, `POLLHUP` and `POLLERR` hold now."""
    poll = select.poll()
    poll.register(fd, select.POLLOUT | select.POLLRDHUP)
    return next((found for _, found in poll.poll(0)), 0)
