"""E2B's control plane: sandboxes are rollouts, snapshots are nodes. It is answered from memory; all of it lasts."""

import contextlib
import re
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import parse_qsl

import orjson

from proxy.compat.e2b import responses as e2b_told
from proxy.compat.e2b.lifetimes import Lifetimes, is_over
from proxy.compat.e2b.requests import Control, variables
from proxy.dialects.base import Local, Request
from proxy.engine import Engine
from proxy.names import named
from proxy.refusals import RefusalError
from proxy.tree.environments import EnvironmentRequest
from proxy.tree.rollout import Rollout, Task
from proxy.tree.tree import Node, Tree
from sandboxes.errors import NotFreezableError

SandboxNote = dict[str, Any]
"""What is remembered of a sandbox: `template`, `metadata`, `envs`, `started`, `ends`, `paused`, `snapshots`.

Of one that was made as such, that it is `mortal`; then whether it `pauses` at its end, whether it `resumes` when it is
asked something, and how many `seconds` it was given.
"""

DEFAULT_TEMPLATE = "base"
"""What SDKs ask for where their user names none: the task's own environment."""
DEFAULT_TIMEOUT_S = 300
MAX_FORKS = 100
_PROTOCOL = "e2b"
_NONE: SandboxNote = {}
_SNAPSHOT = re.compile(r"n([0-9]{1,18})")
_REMEMBERED = 4096
_PAGE = 100


class Sandboxes:
    """E2B's names for rollouts, and what was said of them.

    end: ends a rollout, and tells its streams why. cut: ends its streams alone.
    """

    def __init__(
        self, engine: Engine, end: Callable[[Rollout, str], Awaitable[None]], cut: Callable[[Rollout, str], None]
    ) -> None:
        self._engine, self._end, self._cut = engine, end, cut
        self._lifetimes = Lifetimes(self._over)
        engine.beside.append(self._lifetimes.aclose)
        self._notes: dict[int, SandboxNote] = {}
        self._read: set[str] = set()
        self._created: OrderedDict[tuple[str, str], str] = OrderedDict()

    # -- rollouts ----------------------------------------------------------------------------------------------------

    async def running(self, task: str, name: str) -> tuple[Rollout, SandboxNote] | None:
        """Return the sandbox of this name; None where none runs."""
        rollout = self._engine.tasks.rollouts.get((task, name)) or await self._engine.tasks.running(task, name)
        if rollout is None:
            return None
        note = self._note(rollout)
        if is_over(note, time.time()):
            # What is under way in it may take a while to end.
            self._lifetimes.watch(rollout, note)
            if not note["pauses"]:
                return None
            self._set_aside(rollout, note)
        return rollout, self._notes[rollout.id]

    async def _known(self, task: str, name: str) -> tuple[Rollout, SandboxNote]:
        found = await self.running(task, name)
        if found is None:
            raise RefusalError(404, "no-such-sandbox", f"sandbox {name!r} was not found")
        return found

    def _note(self, rollout: Rollout) -> SandboxNote:
        if rollout.task not in self._read:
            for name, text in self._engine.store.rollouts.notes(rollout.task, _PROTOCOL).items():
                of = self._engine.tasks.rollouts.get((rollout.task, name))
                if of is not None:
                    self._notes[of.id] = {**_new_note(DEFAULT_TEMPLATE), **orjson.loads(text)}
                    self._lifetimes.watch(of, self._notes[of.id])
            self._read.add(rollout.task)
        # One that was begun in another way is a sandbox too.
        return self._notes.setdefault(rollout.id, _new_note(DEFAULT_TEMPLATE))

    def forget(self, rollout: Rollout) -> None:
        """Let go of what is remembered of one that has ended."""
        self._lifetimes.forget(rollout)
        self._notes.pop(rollout.id, None)

    def resume(self, rollout: Rollout, note: SandboxNote) -> SandboxNote:
        """Let a sandbox that was set aside go on, if it was made to when it is asked; return its note."""
        if note["paused"] and note.get("resumes"):
            note = {**note, "paused": False, "ends": time.time() + note["seconds"]}
            self._write(rollout, note)
        return note

    async def _over(self, rollout: Rollout) -> None:
        note = self._notes.get(rollout.id)
        if note is None or rollout.finished:
            return
        if not is_over(note, time.time()):
            self._lifetimes.watch(rollout, note)
        elif note["pauses"]:
            self._set_aside(rollout, note)
        else:
            await self._end(rollout, "its time is over")

    def _set_aside(self, rollout: Rollout, note: SandboxNote) -> None:
        self._write(rollout, {**note, "paused": True})
        self._cut(rollout, f"the sandbox {rollout.name!r} was paused")

    def _write(self, rollout: Rollout, note: SandboxNote) -> None:
        self._notes[rollout.id] = note
        self._lifetimes.watch(rollout, note)
        self._engine.store.rollouts.put_note(rollout.id, _PROTOCOL, orjson.dumps(note).decode())

    # -- requests ----------------------------------------------------------------------------------------------------

    async def answer(self, task: str, asked: Control, request: Request) -> Local:
        """Answer a request to the control plane but `kill`.

        Raises:
            Refused: 400 to 409.
        """
        match asked.verb:
            case "create":
                return await self._create(task, asked.body, request)
            case "list":
                return await self._list(task, asked.query, request)
            case "snapshots":
                return await self._snapshots(task, asked.query)
            case "forget":
                return await self._forget(task, asked.sandbox)
        return await self._of_one(*await self._known(task, asked.sandbox), asked, request)

    async def _of_one(self, rollout: Rollout, note: SandboxNote, asked: Control, request: Request) -> Local:
        match asked.verb:
            case "info":
                return _json(e2b_told.detail(rollout.name, note, rollout.tree.spec))
            case "timeout":
                self._extend(rollout, note, asked.body)
                return Local(204, headers=())
            case "pause":
                return self._pause(rollout, note, asked.body)
            case "connect":
                return self._connect(rollout, note, asked.body)
            case "snapshot":
                return await self._snapshot(rollout, note, asked.body)
            case "fork":
                return await self._fork(rollout, note, asked.body, request)
            case "metrics":
                return _json([])
            case "logs":
                return _json({"logs": [], "logEntries": []})
        raise AssertionError(asked.verb)

    async def _create(self, task: str, body: dict[str, Any], request: Request) -> Local:
        key = request.header("idempotency-key")
        again = await self.running(task, self._created.get((task, key), "")) if key else None
        if again is not None:
            return _json(e2b_told.sandbox(again[0].name, again[1]), 201)
        note = _new_note(_word(body, "templateID") or DEFAULT_TEMPLATE) | {
            "metadata": _strings(body, "metadata"), "envs": variables(body.get("envVars")), "mortal": True,
            "pauses": body.get("autoPause") is True, "resumes": _resumes(body), "seconds": _seconds(body),
        }  # fmt: skip
        if body.get("volumeMounts"):
            raise RefusalError(501, "unimplemented", "there are no volumes here: upload what the sandbox needs.")
        note["ends"] = note["started"] + note["seconds"]
        name = await self._new_name(task, request)
        rollout = await self._begin(task, name, note["template"])
        self._write(rollout, note)
        if key:
            self._created[task, key] = name
            if len(self._created) > _REMEMBERED:
                self._created.popitem(last=False)
        return _json(e2b_told.sandbox(name, note), 201)

    async def _begin(self, task: str, name: str, template: str) -> Rollout:
        """Begin a rollout at a snapshot's node, or at the root of what template names, of the task's own by default."""
        tasks = self._engine.tasks
        if _SNAPSHOT.fullmatch(template):
            opened = await tasks.open(task)
            return tasks.begin(opened, name, *self._place(opened, template))
        base = self._engine.settings.e2b_templates.get(template)
        wanted = None if template == DEFAULT_TEMPLATE and base is None else EnvironmentRequest(template, base=base)
        return await tasks.opened(task, name, wanted=wanted)

    def _place(self, task: Task, snapshot: str) -> tuple[Tree, Node]:
        """Return the node of a snapshot, with its tree."""
        found = _SNAPSHOT.fullmatch(snapshot)
        assert found is not None
        place = self._engine.tasks.place(task, int(found[1]))
        if place is None:
            raise RefusalError(404, "no-such-snapshot", f"snapshot {snapshot!r} was not found in task {task.name!r}")
        return place

    async def _new_name(self, task: str, request: Request) -> str:
        if request.rollout and await self._engine.tasks.running(task, request.rollout) is None:
            return request.rollout
        # The URL's rollout runs: one more sandbox of the same agent, or of the next one that was given its name.
        return named("rollout", f"{request.rollout}-{request.fresh}" if request.rollout else f"i{request.fresh}")

    async def _list(self, task: str, query: dict[str, str], request: Request) -> Local:
        await self._engine.tasks.open(task)
        wanted = dict(parse_qsl(query.get("metadata", "")))
        states = set(query["state"].split(",")) if query.get("state") else {"running", "paused"}
        found, now = [], time.time()
        for (of, name), rollout in self._engine.tasks.rollouts.items():
            note = self._note(rollout) if of == task else _NONE
            if of != task or name.startswith("~") or not _within(name, request.rollout) or is_over(note, now):
                continue
            told = e2b_told.detail(name, note, rollout.tree.spec)
            if wanted.items() <= note["metadata"].items() and told["state"] in states:
                found.append(told)
        found.sort(key=lambda told: (told["startedAt"], told["sandboxID"]), reverse=query.get("order") != "asc")
        return _page(found, query)

    def _extend(self, rollout: Rollout, note: SandboxNote, body: dict[str, Any]) -> None:
        seconds = _seconds({"timeout": body.get("timeout", body.get("duration"))})
        self._write(rollout, {**note, "ends": time.time() + seconds})

    def _pause(self, rollout: Rollout, note: SandboxNote, body: dict[str, Any]) -> Local:
        _require_memory(body)
        if note["paused"]:
            raise RefusalError(409, "paused", f"sandbox {rollout.name!r} is already paused")
        self._set_aside(rollout, note)
        return Local(204, headers=())

    def _connect(self, rollout: Rollout, note: SandboxNote, body: dict[str, Any]) -> Local:
        _require_memory(body)
        status = 201 if note["paused"] else 200
        ends = max(0.0 if note["paused"] else note["ends"], time.time() + _seconds(body))
        note = {**note, "paused": False, "ends": ends}
        self._write(rollout, note)
        return _json(e2b_told.sandbox(rollout.name, note), status)

    async def _snapshot(self, rollout: Rollout, note: SandboxNote, body: dict[str, Any]) -> Local:
        """Keep the state at which rollout stands, and pin it, so that it is there whatever becomes of the budget."""
        _require_memory(body)
        async with rollout.turn:
            node = rollout.node
        # A second attempt has it better: the first may wait for a sandbox for longer than its client does.
        node.pinned = True
        self._engine.store.records.save_node(node)
        # What cannot be frozen is reached by its calls.
        with contextlib.suppress(NotFreezableError):
            await self._engine.attach.keep(rollout.tree, node)
        named_so = _word(body, "name")
        told = {"snapshotID": f"n{node.id}", "names": [named_so] if named_so else []}
        note = self._note(rollout)
        self._write(rollout, {**note, "snapshots": [*note["snapshots"], told]})
        return _json(told, 201)

    async def _snapshots(self, task: str, query: dict[str, str]) -> Local:
        opened = await self._engine.tasks.open(task)
        found: list[dict[str, Any]] = []
        for rollout in opened.rollouts.values():
            if query.get("sandboxID", rollout.name) == rollout.name:
                found += [told for told in self._note(rollout)["snapshots"] if told not in found]
        if query.get("name"):
            found = [told for told in found if query["name"] in told["names"]]
        return _page(found, query)

    async def _forget(self, task: str, template: str) -> Local:
        if _SNAPSHOT.fullmatch(template) is None:
            raise RefusalError(
                404, "no-such-template", f"template {template!r} was not found: only snapshots are here."
            )
        opened = await self._engine.tasks.open(task)
        _, node = self._place(opened, template)
        node.pinned = False
        self._engine.store.records.save_node(node)
        for rollout in opened.rollouts.values():
            note = self._note(rollout)
            left = [told for told in note["snapshots"] if told["snapshotID"] != template]
            if len(left) < len(note["snapshots"]):
                self._write(rollout, {**note, "snapshots": left})
        return Local(204, headers=())

    async def _fork(self, rollout: Rollout, note: SandboxNote, body: dict[str, Any], request: Request) -> Local:
        count = body.get("count", 1)
        if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MAX_FORKS:
            raise RefusalError(400, "count", f"count must be 1 to {MAX_FORKS}.")
        async with rollout.turn:
            tree, node = rollout.tree, rollout.node
        told = []
        for number in range(count):
            seconds = _seconds(body)
            now = time.time()
            new = {
                **_new_note(DEFAULT_TEMPLATE),
                **note,
                "mortal": True,
                "started": now,
                "ends": now + seconds,
                "seconds": seconds,
                "snapshots": [],
            }
            name = named("rollout", f"{rollout.name}-{request.fresh}{number}")
            task = await self._engine.tasks.open(rollout.task)
            self._write(self._engine.tasks.begin(task, name, tree, node), new)
            told.append({"sandbox": e2b_told.sandbox(name, new)})
        return _json(told, 201)


def _new_note(template: str) -> SandboxNote:
    now = time.time()
    return {
        "template": template, "metadata": {}, "envs": {}, "started": now, "ends": now + DEFAULT_TIMEOUT_S,
        "paused": False, "snapshots": [], "pauses": False, "resumes": False, "seconds": DEFAULT_TIMEOUT_S,
    }  # fmt: skip


def _within(name: str, rollout: str) -> bool:
    """Whether a sandbox is one of those that a base URL with this rollout has created."""
    return not rollout or name == rollout or name.startswith(f"{rollout}-")


def _page(found: list[dict[str, Any]], query: dict[str, str]) -> Local:
    """Return one page of a list; its client asks for the next with the token that it is given."""
    limit, token = query.get("limit", str(_PAGE)), query.get("nextToken", "0")
    if not (limit.isascii() and limit.isdigit() and token.isascii() and token.isdigit() and 0 < int(limit) <= 1000):
        raise RefusalError(400, "page", "limit is 1 to 1000, and nextToken what the last page gave.")
    at = int(token)
    more = (("x-next-token", str(at + int(limit))),) if at + int(limit) < len(found) else ()
    return _json(found[at : at + int(limit)], 200, more)


def _json(value: Any, status: int = 200, headers: tuple[tuple[str, str], ...] = ()) -> Local:
    return Local(status, orjson.dumps(value), (("content-type", "application/json"), *headers))


def _seconds(body: dict[str, Any]) -> float:
    given = body.get("timeout", DEFAULT_TIMEOUT_S)
    if given is None:
        return DEFAULT_TIMEOUT_S
    if not isinstance(given, int | float) or isinstance(given, bool) or not 0 <= given <= 10**9:
        raise RefusalError(400, "timeout", "timeout must be a number of seconds.")
    return float(given)


def _resumes(body: dict[str, Any]) -> bool:
    """Whether a sandbox that pauses goes on when it is asked something."""
    given = body.get("autoResume")
    return given is True or (isinstance(given, dict) and given.get("enabled") is True)


def _require_memory(body: dict[str, Any]) -> None:
    """Refuse, as E2B does where it has none, a state without what runs in it.

    Raises:
        Refused: 400.
    """
    if body.get("memory") is False:
        raise RefusalError(
            400, "snapshot_filesystem_only_disabled", "states are kept with what runs in them, not without."
        )


def _word(body: dict[str, Any], name: str) -> str:
    value = body.get(name) or ""
    if not isinstance(value, str) or len(value) > 1000:
        raise RefusalError(400, name, f"{name} must be a string.")
    return value


def _strings(body: dict[str, Any], name: str) -> dict[str, str]:
    value = body.get(name) or {}
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise RefusalError(400, name, f"{name} must map names to strings.")
    return dict(value)
