"""Calls in Docker's containers: commands, and archives that are copied in and out."""

from collections.abc import Awaitable, Callable

import orjson

from proxy.compat.docker import archives
from proxy.compat.docker.containers import Container
from proxy.compat.docker.output import OutputListener
from proxy.compat.docker.requests import DockerRequest
from proxy.compat.endpoints import EndpointContext
from proxy.dialects.base import Local
from proxy.execution.errors import StateLostError
from proxy.http.answer_cache import Answers, PreparedAnswer
from proxy.refusals import RefusalError
from proxy.tree.keys import CallKey, call_key, private_key
from proxy.tree.rollout import Rollout
from proxy.tree.tree import Record
from sandboxes.calls import ToolCall

NoteLoss = Callable[[Rollout, str], Awaitable[None]]
"""Notes that the state of a rollout is lost, and why."""


class ContainerCalls:
    """Answers calls of containers' rollouts from the tree, or by running them."""

    def __init__(self, context: EndpointContext, answers: Answers) -> None:
        self._context, self._answers = context, answers
        self.at_loss: list[NoteLoss] = []

    def known(self, rollout: Rollout, call: ToolCall) -> tuple[Record, PreparedAnswer] | None:
        """Return a command's record and answer, and take the step; None if the tree does not know it."""
        record = self._context.step.known(rollout, call_key(call))
        return None if record is None else (record, self._answers.of(record))

    async def run(self, rollout: Rollout, call: ToolCall, listener: OutputListener | None = None) -> bytes:
        """Return a command's result; see `answer`."""
        return (await self.answer(rollout, call, listener)).body

    async def answer(self, rollout: Rollout, call: ToolCall, listener: OutputListener | None = None) -> PreparedAnswer:
        """Return a command's answer. The listener receives the output while it runs; on a hit it receives nothing."""
        return self._answers.of(await self._record(rollout, call, call_key(call), listener))

    def recorded(self, rollout: Rollout, call: ToolCall) -> bytes | None:
        """Return the result of a rollout's first call without taking a step; None if that was another call, or none."""
        # The main command is the first call of its rollout, so its record is at the root, where another's may be, too.
        key, records = call_key(call), rollout.tree.root.records
        own = [records.get(key), records.get(private_key(key, rollout.id, 0))]
        first = [number for _, number, _ in self._context.store.rollouts.steps(rollout.id, " ORDER BY turn LIMIT 1")]
        return next((self._answers.of(record).body for record in own if record and record.id in first), None)

    async def copy(self, request: DockerRequest, container: Container, rollout: Rollout) -> Local:
        """Copy an archive in (PUT) or out (GET), or describe a path (HEAD). Raises RefusalError (404 without it)."""
        path = request.query.get("path", "")
        if not path or "\0" in path:
            raise RefusalError(400, "docker", "invalid path")
        path = path if path.startswith("/") else f"/{path}"
        service = {"service": container.service} if container.service else {}
        if request.method == "PUT":
            arguments = {"path": path, "no_overwrite": request.flag("noOverwriteDirNonDir"), **service}
            # The key is made from the archive's members, not from its bytes; see `extract_key`.
            call = ToolCall("archive", "extract", arguments, request.body)
            status, body = await self._copy(rollout, call, archives.extract_key(call), path, container)
            return Local(status, body, headers=())
        call = ToolCall("archive", "stat" if request.method == "HEAD" else "pack", {"path": path, **service})
        _, body = await self._copy(rollout, call, call_key(call), path, container)
        # The result is a line of JSON about the path, then the archive.
        description, _, archive = body.partition(b"\n")
        media_type = "application/json" if request.method == "HEAD" else "application/x-tar"
        headers = (
            ("x-docker-container-path-stat", archives.path_stat(orjson.loads(description))),
            ("content-type", media_type),
        )
        return Local(200, archive, headers)

    async def _copy(
        self, rollout: Rollout, call: ToolCall, key: CallKey, path: str, container: Container
    ) -> tuple[int, bytes]:
        """Return the status and the body of a copy that succeeded."""
        answer = self._answers.of(await self._record(rollout, call, key, None))
        if answer.status == 404:
            raise RefusalError(404, "docker", f"Could not find the file {path} in container {container.id}")
        if answer.status >= 400:
            raise RefusalError(answer.status, "docker", str(orjson.loads(answer.body)["detail"]))
        return answer.status, answer.body

    async def _record(self, rollout: Rollout, call: ToolCall, key: CallKey, listener: OutputListener | None) -> Record:
        record = self._context.step.known(rollout, key)
        if record is not None:
            return record
        try:
            return (await self._context.step.run(rollout, call, key, listener)).record
        except StateLostError as error:
            for note in self.at_loss:
                await note(rollout, str(error))
            raise
