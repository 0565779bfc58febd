"""Provisioning: a new sandbox is brought to its spec's root state by archives, files and set-up commands."""

import asyncio
import os
import shlex
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import orjson

from sandboxes.calls import ToolCall
from sandboxes.errors import SpecError
from sandboxes.ipc.messages import FileOutcome, RunFileOperation
from sandboxes.linux.descriptors import Opened
from sandboxes.linux.plain_paths import open_plain
from sandboxes.local.sandbox import LocalSandbox
from sandboxes.local.services import shared
from sandboxes.shell_text import quote
from sandboxes.sources import SourceRules
from sandboxes.spec import EnvironmentSpec

UNPACK_S = 3600.0
"""Timeout for unpacking one archive. Images of several gigabytes take minutes on a slow disk."""
SETUP_SESSION = "set-up"
"""The session of set-up commands, which is never an agent's."""

_PREPARE = (
    'for p in chroot env sleep touch; do command -v $p >/dev/null || { echo "the image has no $p" >&2; exit 1; }; done'
)
"""Checks that the main image has the programs that start services."""


async def prepare_services(sandbox: LocalSandbox, spec: EnvironmentSpec) -> None:
    """Make the directories that services share in a root state; SpecError if that is impossible."""
    if not spec.services:
        return
    await run_set_up(sandbox, spec, "services", _PREPARE)
    for pair in shared(spec):
        for path in map(shlex.quote, pair):
            # A link on the way would lead to another directory in here than in the service.
            check = f'mkdir -p -- {path} && cd -P -- {path} && [ "$(pwd -P)" = {path} ]'
            await run_set_up(sandbox, spec, f"volume {path}", check)


async def furnish(sandbox: LocalSandbox, spec: EnvironmentSpec, sources: SourceRules) -> None:
    """Bring archives and files into a sandbox, and run set-up commands in a session that is then forgotten."""
    # First, because archives and files may lie below it.
    directory = quote(spec.directory)
    # An image without `mkdir` may have the directory.
    await run_set_up(sandbox, spec, "workdir", f"[ -d {directory} ] || mkdir -p -- {directory}")
    for archive in spec.archives:
        with _opened(archive.source, spec, sources) as opened:
            await _unpack(sandbox, archive.source, opened, archive.target)
    for database in spec.databases.values():
        if isinstance(database.source, str) and database.path is not None:
            with _opened(database.source, spec, sources) as opened:
                await _bring(sandbox, Path(database.source), opened, Path(database.path))
    # After the archives, so that a task may replace single files of its image.
    for path, text in spec.files.items():
        answer = (await sandbox.execute(ToolCall("shell", "put", {"path": path}, text.encode()))).result
        if answer.status >= 400:
            raise SpecError(f"file {path!r} cannot be written: {orjson.loads(answer.body)['detail']}")
    # All commands share a session, so a `cd` of an earlier one must not decide where a later one runs.
    for command in spec.setup:
        await run_set_up(sandbox, spec, command, f"cd -- {quote(spec.directory)}\n{command}")


async def run_set_up(sandbox: LocalSandbox, spec: EnvironmentSpec, what: str, command: str) -> None:
    """Run a command of set-up, which `what` names in errors; `SpecError` if its exit code is not 0."""
    arguments = {"command": command, "timeout_s": spec.limits.timeout_s, "session": SETUP_SESSION}
    answer = orjson.loads((await sandbox.execute(ToolCall("shell", "exec", arguments))).result.body)
    if answer["exit_code"] != 0:
        # The end of the output: that is where a failed command says why.
        output = (answer["stderr"] or answer["stdout"])[-2000:]
        raise SpecError(f"set-up command {what!r} ended with exit code {answer['exit_code']}: {output}")


@contextmanager
def _opened(source: str, spec: EnvironmentSpec, sources: SourceRules) -> Iterator[Path]:
    """Open a path of the proxy's machine that a spec names; what may be named is checked now, at its use."""
    with ExitStack() as stack:
        try:
            path = stack.enter_context(open_plain(sources.real(source, confined=spec.confined)))
        except OSError as error:
            raise SpecError(f"{source!r} cannot be read: {error.strerror}. Correct it, then PUT again.") from error
        yield path


async def _bring(sandbox: LocalSandbox, source: Path, opened: Path, path: Path) -> None:
    if await asyncio.to_thread(_has_log, source):
        raise SpecError(
            f"database {str(source)!r} is in use: what is in its -wal would be lost. Close it, then try again."
        )
    # The name goes into a sed expression of tar, where these characters mean something.
    name = path.name.replace("\\", "\\\\").replace("|", "\\|").replace("&", "\\&")
    # Owner and mode are fixed, whatever they are on this machine.
    options = ("-h", "--owner=0", "--group=0", "--mode=0644", f"--transform=s|.*|{name}|", "-C", str(opened.parent))
    await _stream(sandbox, str(source), opened, (*options, "--", opened.name), str(path.parent))


def _has_log(source: Path) -> bool:
    log = source.with_name(f"{source.name}-wal")
    return log.exists() and log.stat().st_size > 0


async def _unpack(sandbox: LocalSandbox, source: str, opened: Path, target: str) -> None:
    """Stream a tarball, or a directory as a tarball, into the sandbox, which unpacks it inside its own root."""
    # In a thread: the path may be on a slow network disk.
    folder = await asyncio.to_thread(opened.is_dir)
    packing = ("--numeric-owner", "-C", str(opened), ".") if folder else ()
    await _stream(sandbox, source, opened, packing, target)


async def _stream(sandbox: LocalSandbox, source: str, opened: Path, packing: tuple[str, ...], target: str) -> None:
    process: asyncio.subprocess.Process | None = None
    if packing:
        # Close-on-exec: a sandbox that starts at this moment must not inherit the pipe and keep it open.
        reading, writing = os.pipe2(os.O_CLOEXEC)
        with Opened(writing):
            # The child has its own copy. Without this close the reader would never see the end.
            # `tar` inherits the descriptor under its number, so the path means the same there.
            process = await asyncio.create_subprocess_exec(
                "tar", "-c", "-f", "-", *packing, stdout=writing, pass_fds=[int(opened.name)]
            )
    else:
        reading = os.open(opened, os.O_RDONLY | os.O_CLOEXEC)
    unpack = RunFileOperation("unpack", {"target": target}, UNPACK_S)
    with Opened(reading):
        # Ours is closed in every case; if the supervisor failed, tar then ends by a broken pipe.
        # The descriptor crosses to the supervisor, so the archive is never held in memory.
        done = await sandbox.guest.ask(unpack, b"", UNPACK_S, [reading])
    # A directory that changed or could not be read gives a tarball that looks whole to the other end.
    if process is not None and await process.wait() != 0:
        raise SpecError(f"archive {source!r} could not be read whole")
    outcome = done.message.outcome
    if not isinstance(outcome, FileOutcome) or outcome.status >= 400:
        raise SpecError(f"archive {source!r} cannot be unpacked: {orjson.loads(done.body)['detail']}")
