"""Routes of the files of a node: they are read from the layers of its snapshot, without a sandbox."""

import os
import re
from collections.abc import Iterator
from typing import Annotated, BinaryIO
from urllib.parse import quote, unquote_to_bytes

from fastapi import Path, Request, Response
from pydantic import BaseModel
from starlette.responses import JSONResponse, StreamingResponse

from proxy.control.parts import ControlPlane
from proxy.control.routes.nodes import leased_state
from proxy.control.routes.params import ControlDep, PositionDep, api_router
from proxy.control.views.diff import FileFacts, file_facts, json_text
from proxy.control.views.resources import node_name
from proxy.refusals import RefusalError
from proxy.tree.tree import Node, Tree
from sandboxes.driver import fulfils
from sandboxes.inspection import FrozenPath, ReadableStates

_CHUNK = 1 << 20
"""Bytes of a file that are read at a time."""
_RAW = re.compile(rb"/nodes/n[0-9]+/files(?:/|$)(.*)", re.DOTALL)
"""The path of a file within the path of a request. Its bytes need not be UTF-8, as those of decoded paths are."""
_MAX_PATH = 4095
"""Longest path, in bytes (path_resolution(7))."""
_SAFE = {"content-security-policy": "default-src 'none'; sandbox", "x-content-type-options": "nosniff"}

router = api_router("trees")


class EntryView(FileFacts):
    """An entry of a directory.

    Attributes:
        name: The name. Bytes that are no UTF-8 are shown as U+FFFD.
        url: The name as URLs have it: percent-encoded, with all of its bytes.
    """

    name: str
    url: str


class FolderView(BaseModel):
    """A directory of a node.

    Attributes:
        truncated: Whether there are more entries.
        base: Whether the files of the base are among them. Without it, only what set-up and calls have changed is.
    """

    node: str
    path: str
    entries: list[EntryView]
    truncated: bool
    base: bool


@router.get(
    "/tasks/{task}/nodes/{node}/files/{path:path}",
    response_model=FolderView,
    responses={200: {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}},
)
async def read_node_file(
    control: ControlDep,
    position: PositionDep,
    request: Request,
    path: Annotated[str, Path(description="Path from the root; empty for the root itself.", max_length=1000)],
) -> Response:
    """Read a file of a node: its bytes, or the list of a directory. Links are named and not followed.

    A node without a snapshot gets one first.
    """
    wanted, name = _path_of(request, path), node_name(position[1])
    found = await _opened(control, *position, wanted)
    shown, entry = json_text("/" + wanted), found.entry
    if found.file is not None:
        headers = {**_SAFE, "content-length": str(entry.size_bytes), "content-disposition": "attachment"}
        return StreamingResponse(
            chunks(found.file, entry.size_bytes), media_type="application/octet-stream", headers=headers
        )
    if entry.kind == "directory":
        entries = [
            EntryView(name=json_text(name), url=quote(os.fsencode(name)), **file_facts(each))
            for name, each in found.entries.items()
        ]
        view = FolderView(node=name, path=shown, entries=entries, truncated=found.truncated, base=found.base)
        return JSONResponse(view.model_dump(), headers=_SAFE)
    if entry.kind == "symlink":
        raise RefusalError(
            409, "link", f"{shown} is a link to {json_text(entry.target or '')}. Ask for the path it names."
        )
    if entry.kind == "other":
        raise RefusalError(409, "no-file", f"{shown} is a device, a socket or a pipe, and has no content.")
    where = "" if found.base else " Its base is the proxy's machine, of which only changed files are read."
    detail = f"node {name} has no {shown}, or a link or a file is on the way to it.{where} List the directories above."
    raise RefusalError(404, "no-such-file", detail)


def _path_of(request: Request, decoded: str) -> str:
    """Return the path that a request names, with each byte that is no UTF-8 as a surrogate (PEP 383)."""
    raw = _RAW.search(request.scope.get("raw_path") or b"")
    path = os.fsdecode(unquote_to_bytes(raw[1])) if raw is not None else decoded
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if "\0" in path or ".." in parts or len(os.fsencode(path)) > _MAX_PATH:
        raise RefusalError(422, "file-path", f"a file's path has no NUL, no '..' and at most {_MAX_PATH} bytes.")
    return "/".join(parts)


async def _opened(control: ControlPlane, tree: Tree, node: Node, path: str) -> FrozenPath:
    driver = control.drivers.get(tree.spec.driver)
    if not fulfils(driver, ReadableStates):
        raise RefusalError(409, "no-files", f"states of driver {tree.spec.driver!r} have no files to read.")
    async with leased_state(control, tree, node) as frozen:
        return await driver.open_frozen(tree.spec, frozen, path)


def chunks(file: BinaryIO, size_bytes: int) -> Iterator[bytes]:
    """Yield as many bytes as were promised. A layer never changes, so a shorter file is a damaged one."""
    with file:
        while size_bytes > 0 and (chunk := file.read(min(_CHUNK, size_bytes))):
            size_bytes -= len(chunk)
            yield chunk
