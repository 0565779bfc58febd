"""Calls in Docker's containers, and the copies among them."""

import orjson

from proxy.compat.docker import archives as docker_archives
from proxy.compat.docker.requests import DockerRequest
from proxy.compat.docker.responses import Container
from proxy.compat.docker.stream import Audience
from proxy.dialects.base import Local
from proxy.engine import Engine
from proxy.http.answer_cache import Answers
from proxy.refusals import RefusalError
from proxy.tree.keys import CallKey, call_key
from proxy.tree.rollout import Rollout
from proxy.tree.tree import Record
from sandboxes.calls import ToolCall


class ContainerCalls:
    """From the tree where it knows them, by running them where it does not."""

    def __init__(self, engine: Engine, answers: Answers) -> None:
        self._engine, self._answers = engine, answers

    def known(self, rollout: Rollout, call: ToolCall) -> tuple[Record, bytes] | None:
        """Return a process's record and answer if the tree knows it, and take the step; see `Step.known`."""
        record = self._engine.step.known(rollout, call_key(call))
        return None if record is None else (record, self._answers.of(record).body)

    async def run(self, rollout: Rollout, call: ToolCall, audience: Audience | None = None) -> bytes:
        """Return a process's answer; audience hears it while it comes, if it does run."""
        return self._answers.of(await self._record(rollout, call, call_key(call), audience)).body

    def recorded(self, rollout: Rollout, call: ToolCall) -> bytes | None:
        """Return what a first call of this task answered, as long as it is known."""
        record = rollout.tree.root.records.get(call_key(call))
        return None if record is None else self._answers.of(record).body

    async def copy(self, asked: DockerRequest, container: Container, rollout: Rollout) -> Local:
        """Copy an archive in or out, or look at a path.

        Raises:
            Refused: 404, there is nothing there; 400 and others, it cannot be done.
        """
        path = asked.query.get("path", "")
        if not path or "\0" in path:
            raise RefusalError(400, "docker", "invalid path")
        path = path if path.startswith("/") else f"/{path}"
        if asked.method == "PUT":
            call = ToolCall(
                "archive", "extract", {"path": path, "no_overwrite": asked.flag("noOverwriteDirNonDir")}, asked.body
            )
            status, body = await self._files(rollout, call, docker_archives.extract_key(call), path, container)
            return Local(status, body, headers=())
        call = ToolCall("archive", "stat" if asked.method == "HEAD" else "pack", {"path": path})
        _, body = await self._files(rollout, call, call_key(call), path, container)
        head, _, packed = body.partition(b"\n")
        headers = (("x-docker-container-path-stat", docker_archives.path_stat(orjson.loads(head))),)
        kind = "application/json" if asked.method == "HEAD" else "application/x-tar"
        return Local(200, packed, (*headers, ("content-type", kind)))

    async def _files(
        self, rollout: Rollout, call: ToolCall, key: CallKey, path: str, container: Container
    ) -> tuple[int, bytes]:
        record = await self._record(rollout, call, key, None)
        ready = self._answers.of(record)
        if ready.status == 404:
            raise RefusalError(404, "docker", f"Could not find the file {path} in container {container.id}")
        if ready.status >= 400:
            raise RefusalError(ready.status, "docker", str(orjson.loads(ready.body)["detail"]))
        return ready.status, ready.body

    async def _record(self, rollout: Rollout, call: ToolCall, key: CallKey, audience: Audience | None) -> Record:
        record = self._engine.step.known(rollout, key)
        if record is not None:
            return record
        return (await self._engine.step.run(rollout, call, key, audience)).record
