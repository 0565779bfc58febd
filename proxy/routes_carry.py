"""Routes by which trees travel: export and import."""

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from starlette.requests import ClientDisconnect

from proxy.engine import Engine
from proxy.errors import Refused
from proxy.routing import TaskName

MEDIA_TYPE = "application/x-tar"
_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}


class ImportView(BaseModel):
    """What was imported. exported_from: the task that it was, where it was exported."""

    task: str
    exported_from: str
    nodes: int
    records: int


def carry_routes(router: APIRouter, engine: Engine) -> None:
    """Add the routes."""

    @router.get(
        "/tasks/{task}/export", response_class=StreamingResponse, responses={200: {"content": {MEDIA_TYPE: {}}}}
    )
    async def export_task(task: TaskName) -> StreamingResponse:
        """Download a task's tree with its answers, as one file with digests."""
        found = await engine.tasks.find(task)
        headers = {"content-disposition": f'attachment; filename="{task}.forkpoint.tar"', "x-accel-buffering": "no"}
        return StreamingResponse(engine.carrying.export(task, found.tree), media_type=MEDIA_TYPE, headers=headers)

    @router.post("/tasks/{task}/import", status_code=201, openapi_extra=_BODY)
    async def import_task(task: TaskName, request: Request) -> ImportView:
        """Import a tree as that of a task which has none yet. A file that is not whole changes nothing."""
        try:
            manifest = await engine.carrying.take(task, request.stream())
        except ClientDisconnect as error:
            raise Refused(400, "import", "the upload ended before the file did. Nothing was imported.") from error
        return ImportView(task=task, exported_from=manifest.task, nodes=manifest.nodes, records=manifest.records)
