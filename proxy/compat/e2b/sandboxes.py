"""E2B's control plane: creates, lists, extends, pauses, connects, forks and ends sandboxes."""

import time
from collections import OrderedDict
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qsl

from proxy.compat.e2b import responses
from proxy.compat.e2b.control_requests import (
    ControlRequest,
    fork_count,
    name_field,
    page,
    require_memory,
    resumes_on_request,
    string_map,
    timeout_s,
    variables,
)
from proxy.compat.e2b.responses import json_response
from proxy.compat.e2b.sandbox_note import DEFAULT_TEMPLATE, SandboxNote
from proxy.compat.e2b.sandbox_registry import RunningSandbox, SandboxRegistry
from proxy.compat.e2b.snapshots import SandboxSnapshots, is_snapshot
from proxy.compat.endpoints import EndpointContext
from proxy.dialects.base import Local, Request
from proxy.http.access import Grant
from proxy.http.sent_labels import owned
from proxy.names import named
from proxy.refusals import RefusalError
from proxy.tree.environments import EnvironmentRequest
from proxy.tree.labels import Labels
from proxy.tree.rollout import Rollout
from sandboxes.errors import SpecError

MAX_IDEMPOTENCY_KEYS = 4096
"""How many idempotency keys are remembered, the latest ones. SDKs retry within seconds."""
_NO_CONTENT = Local(204, headers=())


_BEYOND_ONE_SANDBOX = frozenset({"create", "fork", "snapshots", "forget"})
"""Requests that begin sandboxes, or read or change what all sandboxes of a task share."""


class SandboxControl:
    """Answers the control plane's requests about the sandboxes of all tasks."""

    def __init__(self, context: EndpointContext, registry: SandboxRegistry) -> None:
        self._context, self._registry = context, registry
        self._snapshots = SandboxSnapshots(context, registry)
        self._created: OrderedDict[tuple[str, str], str] = OrderedDict()

    async def answer(self, task: str, control: ControlRequest, request: Request, grant: Grant) -> Local:
        """Answer a parsed request, by what the client's token may see. Raises RefusalError (400 to 501)."""
        if control.verb in _BEYOND_ONE_SANDBOX:
            grant.require_no_rollout()
        elif control.verb != "list":
            grant.require_rollout(control.sandbox)
        match control.verb:
            case "create":
                return await self._create(task, control.body, request, grant)
            case "list":
                return await self._list(task, control.query, request, grant)
            case "snapshots":
                return await self._snapshots.list(task, control.query)
            case "forget":
                return await self._snapshots.delete(task, control.sandbox)
        return await self._answer_for(await self._registry.require(task, control.sandbox), control, request, grant)

    async def _answer_for(
        self, sandbox: RunningSandbox, control: ControlRequest, request: Request, grant: Grant
    ) -> Local:
        match control.verb:
            case "kill":
                await self._registry.end(sandbox.rollout, "it was killed")
                return _NO_CONTENT
            case "info":
                return json_response(_detail(sandbox))
            case "timeout":
                return self._extend(sandbox, control.body)
            case "pause":
                return self._pause(sandbox, control.body)
            case "connect":
                return self._connect(sandbox, control.body)
            case "snapshot":
                return await self._snapshots.create(sandbox, control)
            case "fork":
                return await self._fork(sandbox, control.body, request, grant)
            case "metrics":
                return json_response([])
            case "logs":
                return json_response({"logs": [], "logEntries": []})
        raise AssertionError(control.verb)

    async def _create(self, task: str, body: dict[str, Any], request: Request, grant: Grant) -> Local:
        idempotency_key = request.header("idempotency-key")
        if idempotency_key:
            existing = await self._registry.find(task, self._created.get((task, idempotency_key), ""))
            if existing is not None:
                return json_response(responses.sandbox(existing.rollout.name, existing.note), 201)
        template = name_field(body, "templateID") or DEFAULT_TEMPLATE
        now, limit_s = time.time(), timeout_s(body)
        note = SandboxNote(
            template=template, metadata=string_map(body, "metadata"), envs=variables(body.get("envVars")),
            started_at=now, ends_at=now + limit_s, mortal=True, pauses=body.get("autoPause") is True,
            resumes=resumes_on_request(body), timeout_s=limit_s,
        )  # fmt: skip
        if body.get("volumeMounts"):
            raise RefusalError(501, "unimplemented", "Volumes are not supported. Upload the files that are needed.")
        name = await self._new_name(task, request)
        self._registry.write(await self._begin(task, name, template, owned({}, grant)), note)
        if idempotency_key:
            self._created[task, idempotency_key] = name
            if len(self._created) > MAX_IDEMPOTENCY_KEYS:
                self._created.popitem(last=False)
        return json_response(responses.sandbox(name, note), 201)

    async def _begin(self, task: str, name: str, template: str, labels: Labels) -> Rollout:
        """Begin a rollout at a snapshot's node, or at the root of the environment that a template names."""
        tasks = self._context.tasks
        if is_snapshot(template):
            opened = await tasks.open(task)
            return tasks.rollouts.begin(opened, name, *self._snapshots.node(opened, template), labels=labels)
        base = self._context.settings.e2b_templates.get(template)
        is_default = template == DEFAULT_TEMPLATE and base is None
        environment = None if is_default else EnvironmentRequest(template, base=base)
        try:
            return await tasks.open_rollout(task, name, environment=environment, labels=labels)
        except SpecError as error:
            if is_default:
                raise
            raise RefusalError(404, "not-found", f"template {template!r} cannot be used: {error}") from error

    async def _new_name(self, task: str, request: Request) -> str:
        if request.rollout and await self._context.tasks.running(task, request.rollout) is None:
            return request.rollout
        # The URL's rollout runs already, so this is a further sandbox below the same base URL.
        return named("rollout", f"{request.rollout}-{request.fresh}" if request.rollout else f"i{request.fresh}")

    async def _list(self, task: str, query: dict[str, str], request: Request, grant: Grant) -> Local:
        await self._context.tasks.open(task)
        metadata = dict(parse_qsl(query.get("metadata", "")))
        states = set(query["state"].split(",")) if query.get("state") else {"running", "paused"}
        listed, now = [], time.time()
        for (rollout_task, name), rollout in self._context.tasks.rollouts.running.items():
            # Names that begin with ~ belong to the proxy's own forks.
            if rollout_task != task or name.startswith("~") or not _is_below(request.rollout, name):
                continue
            if grant.rollout and name != grant.rollout:
                continue
            note = self._registry.note(rollout)
            detail = _detail(RunningSandbox(rollout, note))
            if not note.is_over(now) and metadata.items() <= note.metadata.items() and detail["state"] in states:
                listed.append(detail)
        # The newest first, as E2B lists them; the ID makes the order of equal times stable across pages.
        listed.sort(key=lambda detail: (detail["startedAt"], detail["sandboxID"]), reverse=query.get("order") != "asc")
        return page(listed, query)

    def _extend(self, sandbox: RunningSandbox, body: dict[str, Any]) -> Local:
        extension_s = timeout_s({"timeout": body.get("timeout", body.get("duration"))})
        self._registry.write(sandbox.rollout, replace(sandbox.note, ends_at=time.time() + extension_s))
        return _NO_CONTENT

    def _pause(self, sandbox: RunningSandbox, body: dict[str, Any]) -> Local:
        require_memory(body)
        if sandbox.note.paused:
            raise RefusalError(409, "paused", f"sandbox {sandbox.rollout.name!r} is already paused")
        self._registry.pause(sandbox)
        return _NO_CONTENT

    def _connect(self, sandbox: RunningSandbox, body: dict[str, Any]) -> Local:
        """Resume a paused sandbox, or extend a running one: connecting never shortens its time."""
        require_memory(body)
        rollout, note = sandbox
        status = 201 if note.paused else 200
        ends_at = max(0.0 if note.paused else note.ends_at, time.time() + timeout_s(body))
        note = replace(note, paused=False, ends_at=ends_at)
        self._registry.write(rollout, note)
        return json_response(responses.sandbox(rollout.name, note), status)

    async def _fork(self, sandbox: RunningSandbox, body: dict[str, Any], request: Request, grant: Grant) -> Local:
        """Begin rollouts at the sandbox's node. Nothing is copied: the tree shares the state."""
        rollout, count, duration_s = sandbox.rollout, fork_count(body), timeout_s(body)
        async with self._context.step.order.hold(rollout):
            tree, node = rollout.tree, rollout.node
        forks = []
        for number in range(count):
            # A fork is a sandbox of its own: it keeps labels and variables, but has its own timeout and no snapshots.
            now = time.time()
            note = replace(
                sandbox.note, mortal=True, started_at=now, ends_at=now + duration_s, timeout_s=duration_s, snapshots=[]
            )
            name = named("rollout", f"{rollout.name}-{request.fresh}{number}")
            task = await self._context.tasks.open(rollout.task)
            fork = self._context.tasks.rollouts.begin(task, name, tree, node, labels=owned({}, grant))
            self._registry.write(fork, note)
            forks.append({"sandbox": responses.sandbox(name, note)})
        return json_response(forks, 201)


def _detail(sandbox: RunningSandbox) -> dict[str, Any]:
    return responses.detail(sandbox.rollout.name, sandbox.note, sandbox.rollout.tree.spec)


def _is_below(rollout: str, name: str) -> bool:
    """Return whether a sandbox was created below a base URL with this rollout; empty stands for any."""
    return not rollout or name == rollout or name.startswith(f"{rollout}-")
