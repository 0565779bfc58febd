"""Images as Docker's clients see them: those that sandboxes run, or names that a task's environment stands for."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from proxy.compat.docker import responses
from proxy.compat.docker.requests import NO_PAGE, DockerRequest
from proxy.compat.endpoints import EndpointContext
from proxy.dialects.base import Local
from proxy.http.lru_cache import LruCache
from proxy.refusals import RefusalError
from sandboxes.errors import SpecError

if TYPE_CHECKING:
    from sandboxes.images.images import Images
    from sandboxes.local.driver import LocalDriver

_LISTED_IMAGES = 1000
"""Names of listed images that are kept by id. A client that inspects an older id gets the id as its name."""


class ImageRequests:
    """Answers requests about images."""

    def __init__(self, context: EndpointContext) -> None:
        self._context = context
        self._listed = LruCache[str, str](_LISTED_IMAGES)

    async def answer(self, request: DockerRequest, task: str) -> Local:
        """Answer a request about images. Raises RefusalError (404) if there is no such image or page."""
        match (request.method, *request.segments):
            case ("POST", "images", "create"):
                return await self._pull(request, task)
            case ("GET", "images", "json"):
                return await self._list(request, task)
            case ("GET", "images", *name, "json") if name:
                named = "/".join(name)
                image = self._listed.get(named) or named
                return responses.image(image, await self.config(task, image))
        raise NO_PAGE

    async def has_images(self, task: str) -> bool:
        """Return whether the containers of a task are made from the images that clients name."""
        opened = await self._context.tasks.open(task)
        return opened.origin is None and self._context.settings.runs_images

    async def config(self, task: str, image: str) -> Mapping[str, Any]:
        """Return the defaults of an image. Raises RefusalError (404) if the image does not exist.

        For a task that was created with an environment, they are those of the environment's image, whatever image the
        client names; empty if its driver has no images.
        """
        opened = await self._context.tasks.open(task)
        spec = opened.spec if opened.origin is not None else None
        if spec is None and self._context.settings.runs_images and image.startswith("/"):
            raise RefusalError(404, "docker", f"No such image: {image}. Only a task's environment names a file.")
        if self._context.settings.runs_images and (spec is None or spec.image):
            real_image = spec.image if spec is not None and spec.image else image
            try:
                return await self._of_driver.config(real_image)
            except SpecError:
                raise RefusalError(404, "docker", f"No such image: {real_image}") from None
        if spec is None and not self._context.settings.any_image:
            raise RefusalError(
                404, "docker", f"No such image: {image}. PUT the task with an environment, or serve with the driver "
                "local (FORKPOINT_DRIVERS), or with any_image."
            )  # fmt: skip
        return {}

    @property
    def _of_driver(self) -> "Images":
        return cast("LocalDriver", self._context.drivers["local"]).images

    async def _list(self, request: DockerRequest, task: str) -> Local:
        """List the images that containers of this task can name. Harnesses look here before they build an image."""
        opened = await self._context.tasks.open(task)
        wanted = request.filters().get("reference", [])
        names = list(wanted)
        if opened.origin is not None:
            # What the containers are made of is decided; any name that a client asks for stands for it.
            names = names or [opened.spec.image or "forkpoint"]
        elif self._context.settings.runs_images:
            tags = await self._of_driver.tags()
            names = [tag for tag in tags if not wanted or any(_is_tag(tag, name) for name in wanted)]
        entries = []
        for name in names:
            try:
                entry = responses.image_entry(name, await self.config(task, name))
            except RefusalError:
                # The filter's name does not exist, or the image was removed meanwhile.
                continue
            # Docker's SDK inspects each listed image by its id, and takes the names from there.
            self._listed[entry["Id"]] = name
            entries.append(entry)
        return responses.json_response(entries)

    async def _pull(self, request: DockerRequest, task: str) -> Local:
        name, tag = request.query.get("fromImage", ""), request.query.get("tag", "")
        full = f"{name}@{tag}" if tag.startswith("sha256:") else f"{name}:{tag}" if tag else name
        if not name:
            raise RefusalError(400, "docker", "Forkpoint imports no images. Name one in fromImage.")
        try:
            await self.config(task, full)
        except RefusalError as error:
            raise RefusalError(
                404, "docker", f"{error} Forkpoint pulls no images. Run docker pull on its host."
            ) from None
        return responses.pulled(full)


def _is_tag(tag: str, name: str) -> bool:
    """Return whether a name means an image's tag: Docker's default tag may be left out."""
    return tag in (name, f"{name}:latest") or tag.rpartition(":")[0] == name
