"""Routes that make a container image of a node's state, as `docker commit` does of a container."""

import secrets
from pathlib import Path
from typing import Annotated

from fastapi import Query, Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field

from proxy.control.parts import ControlPlane
from proxy.control.routes.files import chunks
from proxy.control.routes.nodes import leased_state
from proxy.control.routes.params import ControlDep, PositionDep, TaskDep, api_router, granted
from proxy.control.routes.transfer import MEDIA_TYPE
from proxy.control.views.resources import node_name
from proxy.refusals import RefusalError
from proxy.tree.tree import Node, Tree
from sandboxes.driver import fulfils
from sandboxes.portability import ImagingDriver, NoImageError

IMAGE = "x-forkpoint-image"
"""The header with the id of an image that is downloaded."""
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_HOST = r"[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?(?::[0-9]+)?"
_IMAGE_NAME = rf"^(?:{_HOST}/)?{_PART}(?:/{_PART})*(?::[A-Za-z0-9_][A-Za-z0-9_.-]{{0,127}})?$"
"""Names of images, as Docker defines them (distribution/reference), without digests."""

router = api_router("data")


class NewImage(BaseModel):
    """An image to make in the Docker daemon, such as `repository:tag`. Another image of this name loses it."""

    name: str = Field(pattern=_IMAGE_NAME, max_length=255)


class ImageView(BaseModel):
    """An image that was made in the Docker daemon; `id` is `sha256:` and a digest."""

    id: str
    name: str


@router.post("/tasks/{task}/nodes/{node}/image")
async def make_image(control: ControlDep, request: Request, position: PositionDep, image: NewImage) -> ImageView:
    """Give the Docker daemon an image of a node's files. Live processes are not part of it."""
    if not granted(request).whole:
        detail = "with a token for some tasks, no image of other tasks may be replaced. Download the image instead."
        raise RefusalError(403, "hidden", detail)
    return ImageView(id=await _image(control, *position, image.name, None), name=image.name)


@router.get(
    "/tasks/{task}/nodes/{node}/image", response_class=StreamingResponse, responses={200: {"content": {MEDIA_TYPE: {}}}}
)
async def download_image(
    control: ControlDep,
    task: TaskDep,
    position: PositionDep,
    name: Annotated[
        str | None, Query(pattern=_IMAGE_NAME, max_length=255, description="Name of the image in the archive.")
    ] = None,
) -> StreamingResponse:
    """Download an image of a node's files as an archive that `docker load` and readers of OCI archives take."""
    # In the directory that is emptied at each start.
    draft = control.settings.data / "imports" / f"image-{secrets.token_hex(8)}"
    try:
        id_ = await _image(control, *position, name or "", draft.resolve())
        # The file is freed when it is closed, also by a kill.
        archive = draft.open("rb")
    finally:
        draft.unlink(missing_ok=True)
    size = archive.seek(0, 2)
    headers = {
        "content-disposition": f'attachment; filename="{task.name}-{node_name(position[1])}.tar"',
        "content-length": str(size),
        "x-accel-buffering": "no",
        IMAGE: id_,
    }
    archive.seek(0)
    return StreamingResponse(chunks(archive, size), media_type=MEDIA_TYPE, headers=headers)


async def _image(control: ControlPlane, tree: Tree, node: Node, name: str, target: Path | None) -> str:
    driver = control.drivers.get(tree.spec.driver)
    if not fulfils(driver, ImagingDriver):
        raise RefusalError(409, "no-image", f"states of driver {tree.spec.driver!r} cannot become images.")
    async with leased_state(control, tree, node) as frozen:
        try:
            return await driver.image(tree.spec, frozen, name, target)
        except NoImageError as reason:
            raise RefusalError(409, "no-image", f"node {node_name(node)} cannot become an image: {reason}") from reason
