"""Routes that export and import trees."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from fastapi import Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from starlette.concurrency import iterate_in_threadpool
from starlette.requests import ClientDisconnect

from proxy.address import TOTAL
from proxy.control.routes.files import chunks
from proxy.control.routes.params import WHOLE, ControlDep, TaskDep, TaskName, TreeDep, api_router, confined, granted
from proxy.control.views.resources import NodeName, node_name
from proxy.refusals import RefusalError
from proxy.storage.backup import known_nodes
from proxy.transfer.backup import pieces

MEDIA_TYPE = "application/x-tar"
BACKUP_TYPE = "application/vnd.sqlite3"
_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}


router = api_router("data")


class ImportView(BaseModel):
    """The result of an import.

    Attributes:
        task: Name of the task that has the tree now.
        exported_from: Name of the task that the tree was exported from.
        root: Root of the tree in this proxy.
        current: Whether it is the task's current tree. If not, it serves rollouts that request its environment.
        snapshots_left_out: Number of snapshots that the file lacks or that do not fit; replays reach their states.
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
    control: ControlDep, request: Request, task: TaskDep, tree: TreeDep, *, snapshots: bool = False
) -> StreamingResponse:
    """Download a tree with its answers as a tar file with digests.

    With `snapshots`, the file includes the snapshots that do not hold live processes. A token for all tasks also gets
    the recorded responses of hosts outside, which all tasks of an equal environment share.
    """
    recordings = granted(request).whole
    export = partial(control.transfer.export, task.name, tree, current=tree is task.tree, recordings=recordings)
    total = await asyncio.to_thread(control.transfer.estimated_bytes, tree, snapshots=snapshots)
    headers = {
        "content-disposition": f'attachment; filename="{task.name}.forkpoint.tar"',
        "x-accel-buffering": "no",
        TOTAL: str(total),
    }

    async def with_snapshots() -> AsyncIterator[bytes]:
        with control.transfer.lend_states(tree) as states:
            async for chunk in iterate_in_threadpool(export(states)):
                yield chunk

    body = with_snapshots() if snapshots else export()
    return StreamingResponse(body, media_type=MEDIA_TYPE, headers=headers)


@router.post("/tasks/{task}/import", status_code=201, openapi_extra=_BODY)
async def import_task(control: ControlDep, task: TaskName, request: Request) -> ImportView:
    """Import a tree into a task that has none yet. An incomplete file changes nothing.

    If the tree was not the current tree of the exported task, the environment of the importing task stays as it is. The
    tree then serves rollouts that request its environment.
    """
    try:
        imported = await control.transfer.take(task, request.stream(), partial(confined, request))
    except ClientDisconnect as error:
        raise RefusalError(
            400, "import", "the upload ended before the end of the file. Nothing was imported: upload the file again."
        ) from error
    manifest = imported.manifest
    return ImportView(
        task=task, exported_from=manifest.task, root=node_name(imported.root), current=imported.current,
        nodes=manifest.nodes, records=manifest.records,
        snapshots=imported.snapshots, snapshots_left_out=imported.left_out,
    )  # fmt: skip


@router.get(
    "/backup",
    response_class=StreamingResponse,
    responses={200: {"content": {BACKUP_TYPE: {}, MEDIA_TYPE: {}}}},
    dependencies=[WHOLE],
)
async def download_backup(control: ControlDep, *, snapshots: bool = False) -> StreamingResponse:
    """Download a consistent backup of the whole store, while calls are answered. `forkpoint restore` reads it.

    With `snapshots`, the file includes the snapshots that do not hold live processes. In a cluster, any member answers
    with the tasks of all of them, each as of one moment, and with its own snapshots.
    """
    # In the directory that is emptied at each start.
    draft = control.settings.data / "imports" / f"backup-{secrets.token_hex(8)}"
    try:
        await control.back_up(draft)
        kept = [snapshot.node for snapshot in control.snapshots] if snapshots else []
        nodes = await asyncio.to_thread(known_nodes, draft, kept)
        # The file is freed when it is closed, also by a kill.
        backup = draft.open("rb")
    finally:
        draft.unlink(missing_ok=True)
    headers = {"content-disposition": 'attachment; filename="forkpoint.backup"', "x-accel-buffering": "no"}
    size = backup.seek(0, 2)
    backup.seek(0)
    if not snapshots:
        return StreamingResponse(
            chunks(backup, size), media_type=BACKUP_TYPE, headers=headers | {"content-length": str(size)}
        )

    async def with_snapshots() -> AsyncIterator[bytes]:
        with control.transfer.lend_all_states() as states:
            async for piece in iterate_in_threadpool(pieces(backup, states, nodes)):
                yield piece

    total = size + sum(snapshot.size_bytes for snapshot in control.snapshots)
    return StreamingResponse(with_snapshots(), media_type=MEDIA_TYPE, headers=headers | {TOTAL: str(total)})
