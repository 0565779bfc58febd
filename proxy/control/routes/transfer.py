"""Routes by which trees travel: export and import."""

from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from starlette.concurrency import iterate_in_threadpool
from starlette.requests import ClientDisconnect

from proxy.control.routes.params import EngineDep, RootQuery, TaskName, tree_of
from proxy.control.views.resources import NodeName, node_name
from proxy.refusals import RefusalError

MEDIA_TYPE = "application/x-tar"
_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}


router = APIRouter()


class ImportView(BaseModel):
    """What was imported. exported_from: the task that it was, where it was exported.

    root: of the tree, here. current: whether it is the tree of the task's spec; else it is that of rollouts which ask
    for its environment. snapshots: kept states that came; snapshots_left_out: those that could not travel or do not
    fit: replays reach them.
    """

    task: str
    exported_from: str
    root: NodeName
    current: bool
    nodes: int
    records: int
    snapshots: int
    snapshots_left_out: int


@router.get("/tasks/{task}/export", response_class=StreamingResponse, responses={200: {"content": {MEDIA_TYPE: {}}}})
async def export_task(
    engine: EngineDep, task: TaskName, *, snapshots: bool = False, root: RootQuery = None
) -> StreamingResponse:
    """Download a task's tree with its answers, as one file with digests.

    snapshots: with its kept states, where they are plain data and not live processes.
    """
    found = await engine.tasks.find(task)
    tree = tree_of(engine, found, root)
    export = partial(engine.transfer.export, task, tree, current=tree is found.tree)
    headers = {"content-disposition": f'attachment; filename="{task}.forkpoint.tar"', "x-accel-buffering": "no"}

    async def states_too() -> AsyncIterator[bytes]:
        with engine.transfer.lend_states(tree) as states:
            async for piece in iterate_in_threadpool(export(states)):
                yield piece

    body = states_too() if snapshots else export()
    return StreamingResponse(body, media_type=MEDIA_TYPE, headers=headers)


@router.post("/tasks/{task}/import", status_code=201, openapi_extra=_BODY)
async def import_task(engine: EngineDep, task: TaskName, request: Request) -> ImportView:
    """Import a tree as that of a task which has none yet. A file that is not whole changes nothing.

    One that was not its task's current tree leaves the task's spec as it is: it is there for rollouts that ask for
    its environment.
    """
    try:
        taken = await engine.transfer.take(task, request.stream())
    except ClientDisconnect as error:
        raise RefusalError(400, "import", "the upload ended before the file did. Nothing was imported.") from error
    manifest = taken.manifest
    return ImportView(
        task=task, exported_from=manifest.task, root=node_name(taken.root), current=taken.current,
        nodes=manifest.nodes, records=manifest.records,
        snapshots=taken.snapshots, snapshots_left_out=taken.left_out,
    )  # fmt: skip
