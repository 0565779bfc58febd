"""The in-memory driver: a few shell commands over a dictionary of files.

It replaces `local` where a test needs thousands of sandboxes a second. It passes the same contract suite. Commands are
joined by `;` and `&&`; words: `cat F`, `echo WORDS`, `echo WORDS > F`, `echo WORDS >> F`, `rm F`, `mkdir D`, `ls`, `cd
D`, `pwd`, `NAME=v`, `export NAME=v`, `true`, `false`, `exit N`, `sleep N` and `sleep N &`. `$NAME` is expanded.
Anything else is not found (exit 127), as in a shell.
"""

import asyncio
import io
import itertools
import posixpath
import re
import shlex
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from hashlib import blake2b, sha256
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from sandboxes import process_output as process
from sandboxes.calls import Execution, ResourceUse, ToolCall, ToolResult
from sandboxes.driver import FrozenState
from sandboxes.effects import Effect, StateDigest
from sandboxes.errors import NotFreezableError, SandboxError, SpecError
from sandboxes.inspection import GONE, FileEntry, FrozenPath, SessionView, StateView
from sandboxes.listener import Listener
from sandboxes.portability import NoImageError, NotPortableError
from sandboxes.spec import EnvironmentSpec

Gate = Callable[[ToolCall], Awaitable[None]]
"""Awaited before each call runs: a test holds a call here, or raises `SandboxError` to kill its sandbox."""

USED = ResourceUse(0.25, 8 << 20, 4096, None)
"""What every call uses. Like many machines, this one does not know everything."""

_DIRECTORY = None


@dataclass(slots=True)
class _Session:
    cwd: str
    variables: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class _State:
    """Everything that a call can change. `written` orders the files by the time of their last change."""

    files: dict[str, bytes | None]
    written: dict[str, int]
    sessions: dict[str, _Session]
    jobs: int = 0

    def to_json(self) -> dict[str, Any]:
        return {
            "files": {path: data if data is None else data.decode("latin-1") for path, data in self.files.items()},
            "order": sorted(self.written, key=self.written.__getitem__),
            "sessions": {name: [s.cwd, s.variables] for name, s in self.sessions.items()},
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "_State":
        return cls(
            {path: data if data is None else data.encode("latin-1") for path, data in value["files"].items()},
            {path: -len(value["order"]) + n for n, path in enumerate(value["order"])},
            {name: _Session(cwd, dict(variables)) for name, (cwd, variables) in value["sessions"].items()},
        )

    def parts(self) -> tuple[bytes, bytes, int]:
        """Return the files, the sessions and the jobs, from which effects are detected."""
        value = self.to_json()
        # The times and not their order: writing the same bytes again is an effect that may lead to the same state.
        return _canonical([value["files"], self.written]), _canonical(value["sessions"]), self.jobs

    def digest(self) -> StateDigest | None:
        if self.jobs:
            return None
        return StateDigest(blake2b(_canonical(self.to_json()), digest_size=32).digest(), self.content())

    def content(self) -> bytes:
        return blake2b(_canonical(self.to_json() | {"order": []}), digest_size=32).digest()


def _canonical(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)


def _parts(payload: dict[str, Any]) -> tuple[str, ...]:
    data = _canonical(payload)
    return (f"{blake2b(data, digest_size=16).hexdigest()}-{len(data)}",)


class MemoryPorter:
    """A `Porter`, and its `Unpacking`: all that a state needs is in its payload, so its parts are empty."""

    def carries(self, kind: str) -> bool:
        """Return True for plain data, the only kind that is frozen."""
        return kind == "files"

    def pack(self, part: str) -> Iterator[bytes]:  # noqa: ARG002
        """Yield nothing: parts are empty."""
        return iter(())

    def unpacking(self) -> "AbstractContextManager[MemoryPorter]":
        """Return a context of this object, which is its own unpacking."""
        return nullcontext(self)

    def part(self, name: str, data: BinaryIO, sha256: str) -> None:
        """Ignore a part, which is empty."""

    def state(self, frozen: FrozenState) -> FrozenState:
        """Check the payload of a state and name its part."""
        try:
            state = _State.from_json(frozen.payload)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise NotPortableError(f"its payload cannot be read: {error!r}") from error
        if frozen.state is None or state.digest() != frozen.state:
            raise NotPortableError("its digest is another")
        parts = _parts(frozen.payload)
        return replace(frozen, parts=parts, size_bytes=int(parts[0].rpartition("-")[2]))


class MemoryDriver:
    """A `Driver` without a machine under it. `executed` lists the commands that really ran, in order."""

    name = "memory"

    def __init__(self, gate: Gate | None = None, sandbox: "type[MemorySandbox] | None" = None) -> None:
        self.gate = gate
        self._sandbox = sandbox or MemorySandbox
        self.porter = MemoryPorter()
        self.executed: list[str] = []
        self.live: dict[str, MemorySandbox] = {}
        self._ids = itertools.count(1)
        self._clock = itertools.count(1)

    async def open(self) -> None:
        """Nothing outlives a process that holds all in memory."""

    async def identity(self, spec: EnvironmentSpec) -> str:
        if spec.base != "host" or spec.archives:
            raise SpecError("the memory driver has no bases and archives: use 'host' and none.")
        return "memory-1"

    async def start(self, spec: EnvironmentSpec) -> "MemorySandbox":
        await self.identity(spec)
        files: dict[str, bytes | None] = {path: text.encode() for path, text in spec.files.items()}
        state = _State(files, dict.fromkeys(files, 0), {})
        sandbox = self._adopt(spec, state)
        for command in spec.setup:
            result = _Shell(state, _session(state, "main", spec), self).run(command)
            if result["exit_code"]:
                await sandbox.close()
                raise SpecError(f"set-up command {command!r} exited {result['exit_code']}: {result['stderr'].strip()}")
        state.sessions.clear()
        return sandbox

    async def restore(self, spec: EnvironmentSpec, frozen: FrozenState) -> "MemorySandbox":
        await asyncio.sleep(0)
        return self._adopt(spec, _State.from_json(frozen.payload))

    async def image(self, spec: EnvironmentSpec, frozen: FrozenState, name: str, target: Path | None) -> str:
        """Its archives are JSON, and there is no daemon. The variable `REFUSED` stands for what no image can be."""
        if "REFUSED" in spec.env:
            raise NoImageError("its base is refused.")
        archive = _canonical([name, frozen.payload["files"]])
        if target is not None:
            await asyncio.to_thread(target.write_bytes, archive)
        return f"sha256:{sha256(archive).hexdigest()}"

    async def open_frozen(self, spec: EnvironmentSpec, frozen: FrozenState, path: str) -> FrozenPath:  # noqa: ARG002
        files = _State.from_json(frozen.payload).files
        data = files.get(f"/{path}", b"") if path not in ("", "root") else _DIRECTORY
        if data is _DIRECTORY:
            if not path:
                home = {"root": FileEntry("directory", 0o755)}
                return FrozenPath(FileEntry("directory", 0o755), entries=home)
            folder = f"/{path}/"
            inner = {
                file.removeprefix(folder): FileEntry("directory", 0o755) if data is None else FileEntry("file", 0o644)
                for file, data in sorted(files.items()) if file.startswith(folder) and "/" not in file[len(folder) :]
            }  # fmt: skip
            return FrozenPath(FileEntry("directory", 0o755), entries=inner)
        if f"/{path}" not in files:
            return FrozenPath(GONE)
        return FrozenPath(FileEntry("file", 0o644, size_bytes=len(data)), io.BytesIO(data))

    async def collect(self, keep: Iterable[str]) -> int:
        """Frozen states hold all they need, so nothing is deleted; the name of a part of ours ends with its bytes."""
        sizes = (part.partition("-")[2] for part in set(keep))
        return sum(int(size) for size in sizes if size.isdecimal())

    async def aclose(self) -> None:
        for sandbox in list(self.live.values()):
            await sandbox.close()

    def _adopt(self, spec: EnvironmentSpec, state: _State) -> "MemorySandbox":
        sandbox = self._sandbox(f"memory-{next(self._ids)}", spec, state, self)
        self.live[sandbox.id] = sandbox
        return sandbox

    def tick(self) -> int:
        """Return the next moment of this driver's clock."""
        return next(self._clock)


class MemorySandbox:
    """A `Sandbox` over one `_State`."""

    def __init__(self, name: str, spec: EnvironmentSpec, state: _State, driver: MemoryDriver) -> None:
        self.id = name
        self.alive = True
        self._spec, self._state, self._driver = spec, state, driver

    async def execute(self, call: ToolCall, listener: Listener | None = None) -> Execution:
        self._require_alive()
        driver = self._driver
        try:
            await asyncio.sleep(0)
            if driver.gate is not None:
                await driver.gate(call)
        except BaseException:
            # The call was cancelled or killed midway, so its effect is unknown.
            self.kill()
            raise
        self._require_alive()
        before = self._state.parts()
        result = self._run(call)
        driver.executed.append(_command_of(call))
        if listener is not None:
            await listener.head(200, (("Content-Type", result.media_type),))
            for kind, data in process.frames(result.body):
                if kind != process.END:
                    await listener.data(process.frame(kind, data))
        after = self._state.parts()
        flags = (Effect.FILES, Effect.SESSION, Effect.PROCESSES)
        effect = Effect.NONE
        for flag, old, new in zip(flags, before, after, strict=True):
            if old != new:
                effect |= flag
        witness = self._state.content() if self._state.jobs else None
        return Execution(result, effect, 0.01, self._state.digest(), witness, resources=USED)

    async def freeze(self) -> FrozenState:
        self._require_alive()
        await asyncio.sleep(0)
        if self._state.jobs:
            raise NotFreezableError(f"{self._state.jobs} processes live")
        payload = self._state.to_json()
        parts = _parts(payload)
        return FrozenState("memory", "files", payload, len(_canonical(payload)), self._state.digest(), parts)

    async def inspect(self) -> StateView:
        """Return the differences from the root state, which is the files of the spec."""
        self._require_alive()
        root: dict[str, bytes | None] = {path: text.encode() for path, text in self._spec.files.items()}
        now = self._state.files
        files = {
            path: repr(now.get(path, "gone")) for path in root.keys() | now if root.get(path, b"-") != now.get(path)
        }
        sessions = {name: SessionView(s.cwd, dict(s.variables)) for name, s in self._state.sessions.items()}
        return StateView(files, sessions, SessionView(self._spec.directory, dict(self._spec.env)))

    async def entries(self, paths: Sequence[str], *, content_bytes: int) -> Mapping[str, FileEntry]:
        """Return what paths lead to."""
        self._require_alive()
        return {path: self._entry(path, content_bytes) for path in paths}

    def _entry(self, path: str, content_bytes: int) -> FileEntry:
        if path not in self._state.files:
            return GONE
        data = self._state.files[path]
        if data is _DIRECTORY:
            return FileEntry("directory", 0o755)
        return FileEntry("file", 0o644, size_bytes=len(data), content=data if len(data) <= content_bytes else None)

    async def close(self) -> None:
        self.kill()

    def kill(self) -> None:
        """Die without notice, as a real sandbox may."""
        self.alive = False
        self._driver.live.pop(self.id, None)

    def _require_alive(self) -> None:
        if not self.alive:
            raise SandboxError(f"sandbox {self.id} is dead")

    def _run(self, call: ToolCall) -> ToolResult:
        if call.tool == "exec":
            # A session is kept only if the call changed it: naming a session changes nothing.
            name = str(call.arguments["session"])
            session = _session(self._state, name, self._spec)
            answer = _Shell(self._state, session, self._driver).run(str(call.arguments["command"]))
            if session == _fresh(self._spec):
                self._state.sessions.pop(name, None)
            else:
                self._state.sessions[name] = session
            return ToolResult(200, "application/json", orjson.dumps(answer))
        return self._process(call) if call.endpoint == "process" else self._file(call)

    def _process(self, call: ToolCall) -> ToolResult:
        """Run `sh -c COMMAND` in a session that is then dropped; any other program runs as a command of the shell."""
        argv, arguments = list(call.arguments["argv"]), call.arguments
        session = _fresh(self._spec)
        session.cwd = arguments.get("cwd") or session.cwd
        session.variables |= arguments.get("env") or {}
        command = argv[-1] if "-c" in argv[1:-1] or argv[1:2] == ["-lc"] else shlex.join(argv)
        result = _Shell(self._state, session, self._driver).run(command)
        frames = process.Frames()
        frames.add(process.OUT, result["stdout"].encode() + call.body)
        frames.add(process.ERR, result["stderr"].encode())
        return ToolResult(200, process.MEDIA_TYPE, frames.end(result["exit_code"]))

    def _file(self, call: ToolCall) -> ToolResult:
        path, state = str(call.arguments["path"]), self._state
        payload = {"type": "about:blank", "title": "No such file", "status": 404, "detail": f"{path} does not exist"}
        missing = ToolResult(404, "application/problem+json", orjson.dumps(payload))
        if call.tool == "put":
            existed = path in state.files
            state.files[path] = call.body
            state.written[path] = self._driver.tick()
            return ToolResult(204 if existed else 201, "application/octet-stream", b"")
        if path not in state.files:
            return missing
        if call.tool == "get":
            return ToolResult(200, "application/octet-stream", state.files[path] or b"")
        del state.files[path]
        state.written.pop(path, None)
        return ToolResult(204, "application/octet-stream", b"")


def _command_of(call: ToolCall) -> str:
    if call.endpoint == "process":
        return str(call.arguments["argv"][-1])
    return str(call.arguments.get("command", call.tool))


def _fresh(spec: EnvironmentSpec) -> _Session:
    return _Session(spec.directory, dict(spec.env))


def _session(state: _State, name: str, spec: EnvironmentSpec) -> _Session:
    known = state.sessions.get(name)
    return _fresh(spec) if known is None else replace(known, variables=dict(known.variables))


class _Exit(Exception):  # noqa: N818 - control flow of the little shell
    def __init__(self, code: int) -> None:
        self.code = code


class _Shell:
    """Runs one command line on a state, in a session."""

    def __init__(self, state: _State, session: _Session, clock: MemoryDriver) -> None:
        self._state, self._session, self._clock = state, session, clock
        self._out: list[str] = []
        self._err: list[str] = []

    def run(self, command: str) -> dict[str, Any]:
        code = 0
        before = replace(self._session, variables=dict(self._session.variables))
        try:
            for part in command.split(";"):
                for piece in part.split("&&"):
                    code = self._one(piece.strip())
                    if code:
                        break
        except _Exit as leave:
            # As in a real session: a shell that exits loses what this call changed in it.
            code, self._session.cwd, self._session.variables = leave.code, before.cwd, before.variables
        answer = {"stdout": "".join(self._out), "stderr": "".join(self._err), "exit_code": code}
        return answer | {"timed_out": False, "truncated": False}

    def _one(self, text: str) -> int:
        if not text:
            return 0
        if text.endswith("&"):
            self._state.jobs += 1
            return 0
        try:
            words = [self._expand(word) for word in shlex.split(text)]
            handler = getattr(self, f"_do_{words[0]}", None)
            code: int = self._assign(words[0]) if handler is None else handler(words[1:])
        except (ValueError, IndexError):
            return self._fail(f"syntax error in {text!r}", 2)
        return code

    def _expand(self, word: str) -> str:
        return re.sub(r"\$(\w+)", lambda match: self._session.variables.get(match[1], ""), word)

    def _path(self, word: str) -> str:
        return posixpath.normpath(posixpath.join(self._session.cwd, word))

    def _fail(self, text: str, code: int = 1) -> int:
        self._err.append(text + "\n")
        return code

    def _assign(self, word: str) -> int:
        name, equals, value = word.partition("=")
        if not equals or not name.isidentifier():
            return self._fail(f"{word}: command not found", 127)
        self._session.variables[name] = value
        return 0

    def _write(self, path: str, data: bytes) -> None:
        self._state.files[path] = data
        self._state.written[path] = self._clock.tick()

    def _do_export(self, words: list[str]) -> int:
        return self._assign(words[0])

    def _do_cat(self, words: list[str]) -> int:
        data = self._state.files.get(self._path(words[0]))
        if data is None:
            return self._fail(f"cat: {words[0]}: No such file or directory")
        self._out.append(data.decode())
        return 0

    def _do_echo(self, words: list[str]) -> int:
        for arrow in (">", ">>"):
            if arrow in words:
                cut = words.index(arrow)
                path = self._path(words[cut + 1])
                old = (self._state.files.get(path) or b"") if arrow == ">>" else b""
                self._write(path, old + " ".join(words[:cut]).encode() + b"\n")
                return 0
        self._out.append(" ".join(words) + "\n")
        return 0

    def _do_rm(self, words: list[str]) -> int:
        path = self._path(words[0])
        if self._state.files.get(path) is None:
            return self._fail(f"rm: cannot remove '{words[0]}': No such file or directory")
        del self._state.files[path], self._state.written[path]
        return 0

    def _do_mkdir(self, words: list[str]) -> int:
        path = self._path(words[0])
        if path in self._state.files:
            return self._fail(f"mkdir: cannot create directory '{words[0]}': File exists")
        self._state.files[path] = _DIRECTORY
        return 0

    def _do_ls(self, _words: list[str]) -> int:
        here = self._session.cwd.rstrip("/") + "/"
        names = sorted(path[len(here) :] for path in self._state.files if path.startswith(here))
        self._out.extend(f"{name}\n" for name in names if "/" not in name)
        return 0

    def _do_cd(self, words: list[str]) -> int:
        path = self._path(words[0])
        if path not in ("/", "/tmp", "/root") and self._state.files.get(path, b"") is not _DIRECTORY:
            return self._fail(f"cd: {words[0]}: No such file or directory")
        self._session.cwd = path
        return 0

    def _do_pwd(self, _words: list[str]) -> int:
        self._out.append(self._session.cwd + "\n")
        return 0

    def _do_true(self, _words: list[str]) -> int:
        return 0

    def _do_false(self, _words: list[str]) -> int:
        return 1

    def _do_sleep(self, _words: list[str]) -> int:
        return 0

    def _do_exit(self, words: list[str]) -> int:
        raise _Exit(int(words[0]) if words else 0)
