"""The `local` driver: sandboxes out of namespaces, overlay layers and a live bash, on this machine, with no daemon."""

import asyncio
import contextlib
import fcntl
import hashlib
import os
import secrets
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

import sandboxes
from sandboxes.calls import Execution, ToolCall, ToolResult
from sandboxes.driver import FrozenState, NotFreezable, SandboxError, SpecError
from sandboxes.effects import Effect, StateDigest
from sandboxes.localbox.bases import Base, Bases
from sandboxes.localbox.cgroup import Cgroups, sweep
from sandboxes.localbox.channel import Channel, ChannelLost
from sandboxes.localbox.files import checksum_differs, problem
from sandboxes.localbox.layers import DEEP, Layers, Upper, mergeable, remove_tree
from sandboxes.localbox.wire import Message
from sandboxes.spec import EnvironmentSpec

VERSION = 1
"""Part of every identity: raise it when equal calls would give other answers or other digests than before."""
GRACE_S = 60.0
"""How long over its own time a call may keep pid 1 busy (killing, comparing files) before the sandbox counts as dead."""
START_S = 30.0
SPARES = 2
"""Sandboxes made before anybody asks: joining a control group waits up to 15 ms for the kernel. 3 MB each."""
RESERVE_BYTES = 64 << 20
"""With less free disk than this, a call's failure may be the machine's: an error, not a result."""
ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "USER": "root",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "SHLVL": "0",
    # Without these two, `python x.py` and `git status` would count as changes of files.
    "PYTHONDONTWRITEBYTECODE": "1",
    "GIT_OPTIONAL_LOCKS": "0",
}
_PRESENT = ("/", "/root", "/tmp")  # noqa: S108 - a path inside the sandbox
"""Working directories that every base has."""


@dataclass(frozen=True, slots=True)
class Root:
    """A spec's root state. born_ns: modification times before it are not those of calls."""

    layers: tuple[str, ...]
    born_ns: int


@dataclass(frozen=True, slots=True)
class Spare:
    """A sandbox in the making, with its namespaces and control groups but without a root."""

    id: str
    channel: Channel
    process: int


class LocalDriver:
    """See `sandboxes.driver.Driver`. One instance owns its data directory; a lock in it keeps a second one out."""

    name = "local"

    def __init__(self, data_dir: Path) -> None:
        self.data_dir = data_dir.resolve()
        self.layers = Layers(self.data_dir)
        self.cgroups = Cgroups("")
        self.privileged = os.geteuid() == 0
        self.bases = Bases(self.data_dir, privileged=self.privileged)
        self.sandboxes: dict[str, LocalSandbox] = {}
        self._lock: int | None = None
        self._launcher: Channel | None = None
        self._launcher_process: asyncio.subprocess.Process | None = None
        self._roots: dict[str, Root] = {}
        self._building: dict[str, asyncio.Lock] = {}
        self._held: list[tuple[str, ...]] = []
        self._spares: deque[Spare] = deque()
        self._restocking: asyncio.Task[None] | None = None
        self._background: set[asyncio.Task[None]] = set()

    # -- life --------------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """See `Driver.open`.

        Raises:
            SandboxError: another process uses this data directory, or the machine cannot run sandboxes.
        """
        self.data_dir.mkdir(parents=True, exist_ok=True)
        self._take_lock()
        try:
            await asyncio.to_thread(self._sweep)
            self.cgroups.open()
            (self.data_dir / "instance.json").write_bytes(
                orjson.dumps({"cgroups": sorted({str(path) for path in self.cgroups.parents.values()})})
            )
            await self._start_launcher()
            await self._fill_stock()
        except BaseException:
            await self.aclose()
            raise

    def _take_lock(self) -> None:
        self._lock = os.open(self.data_dir / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            self._lock = None
            raise SandboxError(
                f"{self.data_dir} is in use by another process. Stop it, or choose another data directory."
            ) from error

    def _sweep(self) -> None:
        """Remove what a killed instance left, and get the directories ready."""
        with contextlib.suppress(OSError, ValueError):
            for group in orjson.loads((self.data_dir / "instance.json").read_bytes())["cgroups"]:
                if Path(group).name.startswith("forkpoint-"):
                    sweep(Path(group))
        self.data_dir.chmod(0o700)
        self.layers.open()
        self.bases.open()
        (self.data_dir / "roots").mkdir(exist_ok=True)
        self.cgroups = Cgroups(f"forkpoint-{secrets.token_hex(6)}")

    async def _start_launcher(self) -> None:
        ours, theirs = socket.socketpair()
        package = str(Path(sandboxes.__file__).parent.parent)
        program = (
            f"import sys; sys.path.insert(0, {package!r}); "
            "from sandboxes.localbox.launcher import main; main()"
        )
        try:
            # -I -S: nothing from the user's site and environment; -B: nothing is written next to the sources.
            self._launcher_process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", "-B", "-c", program, str(theirs.fileno()), str(self.bases.host_view),
                pass_fds=[theirs.fileno()], env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}, cwd="/",
                stdin=asyncio.subprocess.DEVNULL,
            )  # fmt: skip
        finally:
            theirs.close()
        self._launcher = Channel(ours)
        try:
            async with asyncio.timeout(START_S):
                ready = await self._launcher.receive()
        except (ChannelLost, TimeoutError) as error:
            raise SandboxError(f"sandboxes cannot be started here: {error}. `forkpoint doctor` says why.") from error
        if "error" in ready.fields:
            raise SandboxError(f"sandboxes cannot be started here: {ready.fields['error']}. Run `forkpoint doctor`.")

    async def aclose(self) -> None:
        """See `Driver.aclose`. Idempotent."""
        await asyncio.gather(*(sandbox.close() for sandbox in list(self.sandboxes.values())))
        launcher, self._launcher = self._launcher, None
        if launcher is not None:
            launcher.close()
        await asyncio.gather(*(self._throw_away(spare) for spare in self._spares))
        self._spares.clear()
        if self._launcher_process is not None:
            await self._launcher_process.wait()
            self._launcher_process = None
        if self._background:
            await asyncio.wait(self._background)
        await asyncio.to_thread(self.cgroups.close)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def later(self, work: Any) -> asyncio.Task[None]:
        """Run a coroutine that nobody waits for, until aclose does."""
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    # -- states ------------------------------------------------------------------------------------------------------

    async def identity(self, spec: EnvironmentSpec) -> str:
        """See `Driver.identity`. 10 ms for the host; a walk or one reading of everything else that spec names."""
        base = await asyncio.to_thread(self.bases.base, spec.base)
        digest = hashlib.blake2b(f"local\0{VERSION}\0{base.identity}".encode(), digest_size=32)
        for archive in spec.archives:
            digest.update((await asyncio.to_thread(self.bases.archive_identity, Path(archive.source))).encode())
        return digest.hexdigest()

    async def start(self, spec: EnvironmentSpec) -> "LocalSandbox":
        """See `Driver.start`. The root state of a spec is built once; then a start takes milliseconds."""
        base = await asyncio.to_thread(self.bases.base, spec.base)
        root = await self._root(spec, base)
        with self._holding(root.layers):
            return await self._launch(spec, base, root, root.layers, {}, {})

    async def restore(self, spec: EnvironmentSpec, frozen: FrozenState) -> "LocalSandbox":
        """See `Driver.restore`."""
        payload = frozen.payload
        layers = tuple(payload["layers"])
        root = Root(layers[len(layers) - payload["root_layers"] :], payload["born_ns"])
        with self._holding(layers):
            if missing := self.layers.missing(layers):
                raise SandboxError(f"layers {', '.join(missing)} of this state are gone; replay its path instead")
            base = await asyncio.to_thread(self.bases.base, spec.base)
            delta = self.layers.meta(layers[0])["delta"] if len(layers) > len(root.layers) else {}
            return await self._launch(spec, base, root, layers, payload["sessions"], delta, payload["pristine"])

    async def collect(self, keep: Iterable[str]) -> int:
        """See `Driver.collect`. Parts are layers; they are deleted in a thread."""
        kept = set(keep)
        live = {layer for sandbox in self.sandboxes.values() for layer in sandbox.stack}
        held = {layer for layers in self._held for layer in layers}
        size = sum(self.layers.size_bytes(layer) for layer in kept if not self.layers.missing([layer]))
        await asyncio.to_thread(self.layers.drop, self.layers.all() - kept - live - held)
        return size

    @contextlib.contextmanager
    def _holding(self, layers: tuple[str, ...]) -> Any:
        """Keep layers from being collected while no sandbox stands for them yet."""
        self._held.append(layers)
        try:
            yield
        finally:
            self._held.remove(layers)

    async def _root(self, spec: EnvironmentSpec, base: Base) -> Root:
        """Return spec's root state; build it where it is not there (any more)."""
        told = orjson.dumps(spec.model_dump(exclude={"limits", "merge", "cache"}), option=orjson.OPT_SORT_KEYS)
        identity = (await self.identity(spec)) if spec.archives else base.identity
        key = hashlib.blake2b(told + identity.encode(), digest_size=16).hexdigest()
        async with self._building.setdefault(key, asyncio.Lock()):
            root = self._roots.get(key) or self._read_root(key)
            if root is None or self.layers.missing(root.layers):
                root = await self._build_root(spec, base)
                path = self.data_dir / "roots" / f"{key}.json"
                path.with_suffix(".part").write_bytes(orjson.dumps({"layers": root.layers, "born_ns": root.born_ns}))
                path.with_suffix(".part").rename(path)
            self._roots[key] = root
            return root

    def _read_root(self, key: str) -> Root | None:
        try:
            found = orjson.loads((self.data_dir / "roots" / f"{key}.json").read_bytes())
            return Root(tuple(found["layers"]), int(found["born_ns"]))
        except (OSError, ValueError, KeyError):
            return None

    async def _build_root(self, spec: EnvironmentSpec, base: Base) -> Root:
        bare = Root((), time.time_ns())
        if not (spec.archives or spec.files or spec.setup or spec.workdir not in _PRESENT):
            return bare
        at_top = spec.model_copy(update={"workdir": "/"})
        sandbox = await self._launch(at_top, base, bare, (), {}, {})
        try:
            await sandbox.furnish(spec)
            state = await sandbox.freeze()
        except NotFreezable as error:
            raise SpecError(f"set-up leaves something running ({error}): end it, or start it in a call instead") from error
        finally:
            await sandbox.close()
        return Root(tuple(state.payload["layers"]), time.time_ns())

    # -- sandboxes ---------------------------------------------------------------------------------------------------

    async def _launch(
        self,
        spec: EnvironmentSpec,
        base: Base,
        root: Root,
        layers: tuple[str, ...],
        sessions: dict[str, Any],
        delta: dict[str, Any] | None,
        pristine: dict[str, Any] | None = None,
    ) -> "LocalSandbox":
        try:
            async with asyncio.timeout(START_S):
                spare = await self._spare()
        except (ChannelLost, TimeoutError, OSError) as error:
            raise SandboxError(f"a sandbox could not be started: {error}") from error
        sandbox = LocalSandbox(self, spare, spec, base, root, layers)
        self.sandboxes[sandbox.id] = sandbox
        try:
            async with asyncio.timeout(START_S):
                await sandbox.begin({"sessions": sessions, "delta": delta, "pristine": pristine})
        except BaseException as error:
            await sandbox.close()
            if isinstance(error, ChannelLost | TimeoutError | OSError):
                raise SandboxError(f"a sandbox could not be started: {error}") from error
            raise
        self._restock()
        return sandbox

    async def _spare(self) -> Spare:
        """Return a sandbox without a spec: one in stock, or a new one."""
        while self._spares:
            spare = self._spares.popleft()
            if spare.channel.lost is None:
                return spare
            self.later(self._throw_away(spare))
        return await self._new_spare()

    async def _new_spare(self) -> Spare:
        name = secrets.token_hex(6)
        ours, theirs = socket.socketpair()
        channel = Channel(ours)
        try:
            forked = await self.ask_launcher({"op": "fork", "cgroups": self.cgroups.create(name)}, [theirs.fileno()])
        except BaseException:
            channel.close()
            raise
        finally:
            theirs.close()
        spare = Spare(name, channel, forked.fds[0])
        try:
            ready = await channel.receive()
        except BaseException:
            self.later(self._throw_away(spare))
            raise
        if "error" in ready.fields:
            self.later(self._throw_away(spare))
            raise SandboxError(f"a sandbox could not be set up: {ready.fields['error']}. `forkpoint doctor` says more.")
        return spare

    def _restock(self) -> None:
        if self._restocking is None or self._restocking.done():
            self._restocking = self.later(self._fill_stock())

    async def _fill_stock(self) -> None:
        with contextlib.suppress(SandboxError, ChannelLost, OSError):
            while len(self._spares) < SPARES and self._launcher is not None:
                self._spares.append(await self._new_spare())

    async def _throw_away(self, spare: Spare) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(spare.process, signal.SIGKILL)
        spare.channel.close()
        await _ended(spare.process)
        os.close(spare.process)
        await self.forget_group(spare.id)

    async def forget_group(self, name: str) -> None:
        """Remove a dead sandbox's control groups, as soon as the kernel lets go of them."""
        for _ in range(200):
            if self.cgroups.remove(name):
                return
            await asyncio.sleep(0.005)

    async def ask_launcher(self, fields: dict[str, Any], fds: list[int]) -> Message:
        """Send the launcher a request.

        Raises:
            SandboxError: it is gone, or the kernel refused.
        """
        if self._launcher is None:
            raise SandboxError("the driver is not open")
        try:
            answer = await self._launcher.request(fields, fds=fds)
        except ChannelLost as error:
            raise SandboxError(f"the launcher of all sandboxes ended: {error}. Restart the proxy.") from error
        if "error" in answer.fields:
            raise SandboxError(f"the kernel refused: {answer.fields['error']}")
        return answer


class LocalSandbox:
    """See `sandboxes.driver.Sandbox`."""

    def __init__(
        self, driver: LocalDriver, spare: Spare, spec: EnvironmentSpec, base: Base, root: Root, layers: tuple[str, ...]
    ) -> None:
        self.id = spare.id
        self.stack = layers
        self._driver = driver
        self._spec = spec
        self._base = base
        self._root = root
        self._upper: Upper = driver.layers.allocate()
        self._channel = spare.channel
        self._process: int | None = spare.process
        self._namespace: int | None = None
        self._pending: asyncio.Task[None] | None = None
        self._merging: asyncio.Task[None] | None = None
        self._replacement: tuple[tuple[str, ...], str] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._dead: str | None = None

    @property
    def alive(self) -> bool:
        return self._dead is None and self._channel.lost is None

    # -- starting ----------------------------------------------------------------------------------------------------

    async def begin(self, state: dict[str, Any]) -> None:
        """Give the spare that this sandbox is made of its layers and its state; return when its shell is ready."""
        limits, cgroups = self._spec.limits, self._driver.cgroups
        memory_bytes = limits.memory_mb << 20
        cgroups.limit(self.id, memory_bytes=memory_bytes, pids=limits.pids)
        order = {**self._mount_order(), "root": self._lowers(self._root.layers)}
        mounted = await self._driver.ask_launcher({"op": "mount", "stack": order}, [])
        fields = {
            "binds": self._base.binds,
            "disk_bytes": limits.disk_mb << 20,
            "memory_bytes": None if cgroups.writable else memory_bytes,
            "pids": None if cgroups.writable else limits.pids,
            "environment": {**ENVIRONMENT, **self._spec.env},
            "workdir": self._spec.workdir,
            "output_bytes": limits.output_bytes,
            "below_bytes": sum(map(self._driver.layers.size_bytes, self._new_layers())),
            "born_ns": self._root.born_ns,
            "reserve_bytes": RESERVE_BYTES,
            **state,
        }
        try:
            ready = await self._talk(fields, b"", mounted.fds)
        finally:
            for fd in mounted.fds:
                os.close(fd)
        self._namespace = ready.fds[0]
        if "cannot_start" in ready.fields and not self.stack:
            raise SpecError(f"base {self._spec.base!r}: {ready.fields['cannot_start']}")

    def _new_layers(self) -> tuple[str, ...]:
        return self.stack[: len(self.stack) - len(self._root.layers)]

    def _mount_order(self) -> dict[str, Any]:
        return {"lowers": self._lowers(self.stack), **self._upper.stack}

    def _lowers(self, layers: tuple[str, ...]) -> list[str]:
        return [*self._driver.layers.lowers(layers), *self._base.lowers]

    async def furnish(self, spec: EnvironmentSpec) -> None:
        """Bring archives and files in and run set-up commands, as calls of a session that is then forgotten.

        Raises:
            SpecError: one of them fails.
        """
        await self._must("workdir", {"command": f"mkdir -p -- {_quoted(spec.workdir)}"})
        for archive in spec.archives:
            await self._unpack(archive.source, archive.target)
        for path, text in spec.files.items():
            call = ToolCall("shell", "put", {"path": path}, text.encode())
            if (answer := (await self.execute(call)).result).status >= 400:  # noqa: PLR2004
                raise SpecError(f"file {path!r} cannot be written: {orjson.loads(answer.body)['detail']}")
        for command in spec.setup:
            await self._must(command, {"command": f"cd -- {_quoted(spec.workdir)}\n{command}"})

    async def _must(self, what: str, arguments: dict[str, Any]) -> None:
        timed = {"timeout_s": self._spec.limits.timeout_s, "session": "set-up", **arguments}
        answer = orjson.loads((await self.execute(ToolCall("shell", "exec", timed))).result.body)
        if answer["exit_code"] != 0:
            said = (answer["stderr"] or answer["stdout"])[-2000:]
            raise SpecError(f"set-up command {what!r} ended with exit code {answer['exit_code']}: {said}")

    async def _unpack(self, source: str, target: str) -> None:
        path = Path(source)
        process = None
        if path.is_dir():
            reading, writing = os.pipe2(os.O_CLOEXEC)
            process = await asyncio.create_subprocess_exec(
                "tar", "-C", source, "-c", "--numeric-owner", "-f", "-", ".", stdout=writing
            )
            os.close(writing)
        else:
            reading = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            answer, _ = await self._ask(
                {"op": "file", "tool": "unpack", "arguments": {"target": target}, "timeout_s": 3600.0}, b"", 3600.0, [reading]
            )
        finally:
            os.close(reading)
        if process is not None and await process.wait() != 0:
            raise SpecError(f"archive {source!r} could not be read whole")
        if answer.fields["status"] >= 400:  # noqa: PLR2004
            raise SpecError(f"archive {source!r} cannot be unpacked: {orjson.loads(answer.body)['detail']}")

    # -- calls -------------------------------------------------------------------------------------------------------

    async def execute(self, call: ToolCall) -> Execution:
        """See `Sandbox.execute`. A cancelled execution leaves a dead sandbox: nobody knows how far it came."""
        refusal = _refuse(call)
        if refusal is not None:
            return Execution(ToolResult(*refusal), Effect.NONE, 0.0, None)
        limits = self._spec.limits
        arguments = dict(call.arguments)
        timeout_s = float(arguments.get("timeout_s", limits.timeout_s))
        if call.tool == "exec":
            fields = {"op": "exec", "session": arguments["session"], "timeout_s": timeout_s}
            body = str(arguments["command"]).encode(errors="surrogateescape")
        else:
            arguments["limit_bytes"] = limits.disk_mb << 20
            fields = {"op": "file", "tool": call.tool, "arguments": arguments, "timeout_s": timeout_s}
            body = call.body
        answer, seconds = await self._ask(fields, body, timeout_s)
        if answer.fields.get("host_full"):
            self._die("the machine's disk is full")
            raise SandboxError(f"sandbox {self.id}: less than {RESERVE_BYTES >> 20} MB free disk at {self._driver.data_dir}")
        if answer.fields["discard"]:
            self._pending = self._driver.later(self._discard_upper())
        return _execution(answer, seconds)

    async def _ask(
        self, fields: dict[str, Any], body: bytes, timeout_s: float, fds: list[int] | None = None
    ) -> tuple[Message, float]:
        """Send pid 1 a call; return its answer and the seconds that the tool itself took."""
        await self._settle()
        try:
            async with asyncio.timeout(timeout_s + GRACE_S):
                answer = await self._talk(fields, body, fds or [])
        except TimeoutError as error:
            self._die("it gave no answer in time")
            raise SandboxError(f"sandbox {self.id} gave no answer within {timeout_s + GRACE_S:.0f} s") from error
        except asyncio.CancelledError:
            self._die("its call was cancelled")
            raise
        return answer, float(answer.fields.get("seconds", 0.0))

    async def _talk(self, fields: dict[str, Any], body: bytes = b"", fds: list[int] | None = None) -> Message:
        if self._dead is not None:
            raise SandboxError(f"sandbox {self.id} died: {self._dead or 'it was closed'}")
        try:
            answer = await self._channel.request(fields, body, fds or [])
        except ChannelLost as error:
            self._die(str(error))
            raise SandboxError(f"sandbox {self.id} died: {error}") from error
        if "error" in answer.fields:
            self._die(str(answer.fields["error"]))
            raise SandboxError(f"sandbox {self.id} died: {answer.fields['error']}")
        return answer

    async def _settle(self) -> None:
        """Wait for what the last call left to do."""
        if self._pending is not None:
            await asyncio.shield(self._pending)
            self._pending = None

    def _die(self, reason: str) -> None:
        self._dead = self._dead or reason
        self._kill()

    def _kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._process, signal.SIGKILL)

    # -- freezing ----------------------------------------------------------------------------------------------------

    async def freeze(self) -> FrozenState:
        """See `Sandbox.freeze`. Cancelled midway, the sandbox is dead."""
        await self._settle()
        try:
            return await self._freeze()
        except asyncio.CancelledError:
            self._die("its freezing was cancelled")
            raise

    async def _freeze(self) -> FrozenState:
        told = (await self._talk({"op": "pause"})).fields
        if "not_freezable" in told:
            raise NotFreezable(f"sandbox {self.id}: {told['not_freezable']}")
        added = 0
        if not told["empty"]:
            added = int(told["size_bytes"])
            await self._switch({"delta": told["delta"], "size_bytes": added})
        payload = {
            "layers": list(self.stack),
            "root_layers": len(self._root.layers),
            "born_ns": self._root.born_ns,
            "sessions": told["sessions"],
            "pristine": told["pristine"],
        }
        return FrozenState("local", "layers", payload, added, _digest(told["state"]), self.stack)

    async def _discard_upper(self) -> None:
        """Throw an upper away in which nothing differs from what lies below: the live sandbox is then the recorded one."""
        with contextlib.suppress(SandboxError):
            await self._talk({"op": "pause", "discard": True})
            await self._switch(None)

    async def _switch(self, meta: dict[str, Any] | None) -> None:
        """Put the sandbox on a fresh upper; with meta, the one it leaves becomes a layer first."""
        layers, left = self._driver.layers, self._upper
        self._adopt_merged()
        if meta is not None:
            self.stack = (layers.freeze(left, meta), *self.stack)
        self._upper = layers.allocate()
        assert self._namespace is not None  # noqa: S101 - set before the first call
        order = {"op": "switch", "stack": self._mount_order(), "binds": self._base.binds}
        try:
            switched = await self._driver.ask_launcher(order, [self._namespace])
        except SandboxError as error:
            self._die(str(error))
            raise
        try:
            added = 0 if meta is None else int(meta["size_bytes"])
            await self._talk({"op": "switched", "added_bytes": added}, b"", switched.fds)
        finally:
            for fd in switched.fds:
                os.close(fd)
        gone = left.path if meta is None else layers.frozen / left.id / "work"
        self._driver.later(asyncio.to_thread(remove_tree, gone))
        self._merge_when_deep()

    def _merge_when_deep(self) -> None:
        above = self._new_layers()
        if len(above) > DEEP and (self._merging is None or self._merging.done()):
            sizes = {layer: self._driver.layers.size_bytes(layer) for layer in above}
            if run := mergeable(above, sizes):
                self._merging = self._driver.later(self._merge(tuple(run)))

    async def _merge(self, run: tuple[str, ...]) -> None:
        with self._driver._holding(run):  # noqa: SLF001 - driver and sandbox are one module
            merged = await asyncio.to_thread(self._driver.layers.merge, run)
        self._replacement = (run, merged)

    def _adopt_merged(self) -> None:
        """From the next mount on, let one merged layer stand for the many it was made of."""
        if self._replacement is None:
            return
        run, merged = self._replacement
        self._replacement = None
        at = self.stack.index(run[0])
        self.stack = (*self.stack[:at], merged, *self.stack[at + len(run) :])

    # -- closing -----------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """See `Sandbox.close`. Runs to its end even when the caller is cancelled."""
        if self._closing is None:
            self._dead = self._dead or "it was closed"
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self._kill()
        self._channel.close()
        if self._process is not None:
            await _ended(self._process)
            os.close(self._process)
            self._process = None
        if self._namespace is not None:
            os.close(self._namespace)
            self._namespace = None
        await self._driver.forget_group(self.id)
        await asyncio.to_thread(remove_tree, self._upper.path)
        self._driver.sandboxes.pop(self.id, None)


async def _ended(process: int) -> None:
    """Wait until the process behind a descriptor, and with it its whole pid namespace, has ended."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(process, ended.set)
    try:
        async with asyncio.timeout(10):
            await ended.wait()
    except TimeoutError:
        # Stuck in the kernel; the next open() sweeps its group.
        return
    finally:
        loop.remove_reader(process)


def _quoted(path: str) -> str:
    return "'" + path.replace("'", "'\\''") + "'"


def _digest(state: list[str] | None) -> StateDigest | None:
    return None if state is None else StateDigest(bytes.fromhex(state[0]), bytes.fromhex(state[1]))


def _refuse(call: ToolCall) -> tuple[int, str, bytes] | None:
    """Return the answer to a call that no sandbox needs to see."""
    if call.tool == "exec":
        if "\0" in str(call.arguments["command"]):
            return problem(400, "Bad command", "a shell command cannot contain NUL: remove it")
        return None
    path = call.arguments.get("path")
    if call.tool in {"put", "get", "delete"} and not (isinstance(path, str) and path.startswith("/") and "\0" not in path):
        return problem(400, "Bad path", "path must be absolute and without NUL")
    if call.tool == "put" and checksum_differs(call.arguments.get("sha256"), call.body):
        return problem(400, "Checksum differs", "the body's SHA-256 is not the announced one: send it again")
    return None


def _execution(answer: Message, seconds: float) -> Execution:
    fields = answer.fields
    if "status" in fields:
        result = ToolResult(fields["status"], fields["media_type"], answer.body)
    else:
        cut = fields["stdout_bytes"]
        body = {
            "stdout": answer.body[:cut].decode(errors="replace"),
            "stderr": answer.body[cut:].decode(errors="replace"),
            **{name: fields[name] for name in ("exit_code", "timed_out", "truncated")},
        }
        result = ToolResult(200, "application/json", orjson.dumps(body))
    effect = Effect.NONE
    for name, flag in (("files", Effect.FILES), ("session", Effect.SESSION), ("processes", Effect.PROCESSES)):
        if fields[name]:
            effect |= flag
    return Execution(result, effect, seconds, _digest(fields["state"]))
