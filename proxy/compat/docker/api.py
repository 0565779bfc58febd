"""Routes requests of Docker's Engine API to the services of this room.

Three ways lead in, so that what can be answered without an await is:

1. `known` answers whole requests from memory, without a task: inspection, lists, creation of exec instances.
2. `answer` answers every other request. It may run calls, and may return a response that is sent piece by piece.
3. `stream_known` and `stream` answer requests whose connection becomes a stream: `exec start` and `attach`.

Creating a container begins a rollout, but no sandbox is started before the first miss.
"""

import secrets
import time
from collections.abc import Mapping
from typing import Any, Protocol, cast

import orjson

from proxy.compat.docker import requests, responses
from proxy.compat.docker.calls import ContainerCalls
from proxy.compat.docker.containers import Container
from proxy.compat.docker.execs import ContainerExecs
from proxy.compat.docker.lifecycle import ContainerLifecycle, StreamedResponse
from proxy.compat.docker.registry import ContainerRegistry
from proxy.compat.docker.requests import NO_PAGE, DockerRequest
from proxy.compat.docker.stream import StreamConnection
from proxy.dialects.base import Local
from proxy.engine import Engine
from proxy.http.access import Grant
from proxy.http.address import Address
from proxy.http.answer_cache import Answers, response
from proxy.http.exchange import raw
from proxy.http.lru_cache import LruCache
from proxy.refusals import RefusalError
from proxy.tree.environments import EnvironmentRequest
from proxy.tree.rollout import Rollout
from sandboxes.errors import SpecError
from sandboxes.spec import SHELLLESS_DRIVERS

_LISTED_IMAGES = 1000
"""Names of listed images that are kept by id. A client that inspects an older id gets the id as its name."""


class Images(Protocol):
    """The part of the container driver that knows images."""

    async def config(self, image: str) -> dict[str, Any]:
        """Return an image's ID and defaults.

        Raises:
            SpecError: The image does not exist.
        """
        ...

    async def tags(self) -> list[str]:
        """Return the names of all images."""
        ...


class DockerApi:
    """Answers the requests below the endpoint `docker` of all tasks."""

    def __init__(self, engine: Engine, answers: Answers) -> None:
        self._engine = engine
        self._registry = ContainerRegistry(engine.store, engine.tasks)
        engine.lifecycle.at_drop.append(self._registry.forget)
        max_stdin_bytes = engine.settings.max_body_bytes
        self._listed_images = LruCache[str, str](_LISTED_IMAGES)
        self._calls = ContainerCalls(engine, answers)
        self._execs = ContainerExecs(self._registry, self._calls, max_stdin_bytes=max_stdin_bytes)
        self._lifecycle = ContainerLifecycle(
            self._registry, self._execs, self._calls, max_stdin_bytes=max_stdin_bytes, closing=engine.lifecycle.closing
        )
        # Names of containers and of rollouts that creations under way have taken: a creation awaits several times.
        self._reserved_names: set[tuple[str, str, str]] = set()
        self._reserved_rollouts: set[tuple[str, str]] = set()

    def known(self, method: str, address: Address, query: bytes, body: bytes) -> bytes | None:
        """Return the whole HTTP response; None if it needs an await, or if the request is invalid: see `answer`."""
        try:
            request = requests.read(method, address.raw.decode("latin-1"), query.decode("latin-1"), body)
            local = self._from_memory(request, address.task, address.rollout)
        except RefusalError:
            return None
        if local is None:
            return None
        headers = raw(local.headers)
        # RFC 9110, 8.6: a 204 has no Content-Length.
        if local.status != 204:
            headers.append((b"content-length", b"%d" % len(local.body)))
        return response(local.status, headers, local.body)

    async def answer(
        self, method: str, address: Address, query: bytes, body: bytes, grant: Grant
    ) -> Local | StreamedResponse:
        """Answer a request that does not take its connection over.

        Raises:
            RefusalError: The request is refused, in Docker's words where Docker has some.
        """
        request = requests.read(method, address.raw.decode("latin-1"), query.decode("latin-1"), body)
        task, owner = address.task, address.rollout
        # A ping must not create the task.
        if request.segments[:1] == ("_ping",):
            return responses.ping(method)
        await self._load(task)
        return self._from_memory(request, task, owner) or await self._act(request, task, owner, grant)

    async def stream(self, address: Address, query: bytes, body: bytes, connection: StreamConnection) -> None:
        """Answer a request whose connection becomes a stream.

        Raises:
            RefusalError: The request is refused. If the stream is open, the caller reports it there.
        """
        request = requests.read("POST", address.raw.decode("latin-1"), query.decode("latin-1"), body)
        await self._load(address.task)
        match request.segments:
            case ("exec", name, "start"):
                await self._execs.start(self._execs.find(address.task, address.rollout, name), connection)
            case ("containers", name, "attach"):
                container = self._registry.find(address.task, address.rollout, name)
                await self._lifecycle.attach(request, container, connection)
            case _:
                raise NO_PAGE

    def stream_known(self, address: Address, body: bytes, connection: StreamConnection) -> bool:
        """Answer the start of an exec that the tree knows, without an await; return False for any other request."""
        match requests.read("POST", address.raw.decode("latin-1"), "", body).segments:
            case ("exec", name, "start"):
                return self._execs.start_known(self._execs.find(address.task, address.rollout, name), connection)
        return False

    async def aclose(self) -> None:
        """Stop watching main commands, at shutdown."""
        await self._lifecycle.aclose()

    # -- answered from memory ----------------------------------------------------------------------------------------

    def _from_memory(self, request: DockerRequest, task: str, owner: str) -> Local | None:
        match (request.method, *request.segments):
            case ("GET" | "HEAD", "_ping"):
                return responses.ping(request.method)
            case ("GET", "version"):
                return responses.version()
            case ("GET", "networks"):
                return responses.json_response([])
            case ("GET", "volumes"):
                return responses.json_response({"Volumes": [], "Warnings": None})
        return self._container_from_memory(request, task, owner) if self._registry.is_loaded(task) else None

    def _container_from_memory(self, request: DockerRequest, task: str, owner: str) -> Local | None:
        match (request.method, *request.segments):
            case ("GET", "info"):
                return responses.info(self._registry.of(task, owner))
            case ("GET", "containers", "json"):
                return self._list(request, task, owner)
            case ("GET", "containers", name, "json"):
                container = self._registry.find(task, owner, name)
                # A rollout that is not in memory may have been finished: that needs an await to find out.
                return responses.container_details(container) if self._registry.rollout(container) else None
            case ("POST", "containers", name, "exec"):
                container = self._registry.find(task, owner, name)
                return self._execs.create(request, container) if self._registry.rollout(container) else None
            case ("GET", "exec", name, "json"):
                return responses.exec_details(self._execs.find(task, owner, name))
        return None

    def _list(self, request: DockerRequest, task: str, owner: str) -> Local:
        filters = _filters(request)
        with_stopped = request.flag("all") or "status" in filters
        containers = [
            container
            for container in self._registry.of(task, owner)
            if (with_stopped or container.is_running) and responses.matches(container, filters)
        ]
        return responses.container_list(containers, time.time())

    # -- answered with an await --------------------------------------------------------------------------------------

    async def _act(self, request: DockerRequest, task: str, owner: str, grant: Grant) -> Local | StreamedResponse:
        match (request.method, *request.segments):
            case ("POST", "images", "create"):
                return await self._pull(request, task)
            case ("GET", "images", "json"):
                return await self._images(request, task)
            case ("GET", "images", *name, "json") if name:
                named = "/".join(name)
                image = self._listed_images.get(named) or named
                return responses.image(image, await self._config(task, image))
            case ("POST", "containers", "create"):
                return await self._create(request, task, owner, grant)
            case ("POST", "exec", name, "start"):
                return await self._execs.start_detached(self._execs.find(task, owner, name), request)
            case ("POST", "exec", name, "resize"):
                # Output does not depend on a terminal's size here, so resizing only checks that the instance exists.
                self._execs.find(task, owner, name)
                return Local(200, headers=())
            case (_, "containers", name, *_) if name not in {"json", "create", "prune"}:
                container = self._registry.find(task, owner, name)
                # Loads the rollout, after which the request may be one that memory answers.
                rollout = await self._registry.require_rollout(container)
                return self._container_from_memory(request, task, owner) or await self._in_container(
                    request, container, rollout
                )
        raise NO_PAGE

    async def _in_container(
        self, request: DockerRequest, container: Container, rollout: Rollout
    ) -> Local | StreamedResponse:
        match (request.method, *request.segments[2:]):
            case ("POST", "start" | "stop" | "restart" | "kill" | "wait" as verb):
                return await self._lifecycle.change(verb, request, container)
            case ("POST", "resize"):
                return Local(200, headers=())
            case ("GET", "logs"):
                return await self._lifecycle.logs(request, container)
            case ("GET", "top"):
                return await self._lifecycle.top(request, container)
            case ("HEAD" | "GET" | "PUT", "archive"):
                return await self._calls.copy(request, container, rollout)
            case ("DELETE",):
                return await self._lifecycle.remove(request, container)
        raise NO_PAGE

    async def _load(self, task: str) -> None:
        if not self._registry.is_loaded(task):
            await self._registry.load(task)
        opened = await self._engine.tasks.open(task)
        if opened.spec.driver in SHELLLESS_DRIVERS or opened.spec.upstreams:
            raise RefusalError(404, "docker", f"This task's driver, {opened.spec.driver!r}, runs no processes.")

    # -- images ------------------------------------------------------------------------------------------------------

    async def _config(self, task: str, image: str) -> Mapping[str, Any]:
        """Return the defaults of an image.

        A task that was created with an environment decides what its containers are made of, whatever image the client
        names. Then the defaults are those of the environment's image, or empty if its driver has no images.

        Raises:
            RefusalError: 404, the image does not exist.
        """
        opened = await self._engine.tasks.open(task)
        spec = opened.spec if opened.origin is not None else None
        driver = spec.driver if spec is not None else "container"
        if driver == "container" and driver in self._engine.drivers:
            real_image = spec.image if spec is not None and spec.image else image
            try:
                return await cast("Images", self._engine.drivers[driver]).config(real_image)
            except SpecError:
                raise RefusalError(404, "docker", f"No such image: {real_image}") from None
        if spec is None and not self._engine.settings.any_image:
            raise RefusalError(
                404, "docker", f"No such image: {image}. PUT the task with an environment, or serve with the driver "
                "container (FORKPOINT_DRIVERS), or with any_image."
            )  # fmt: skip
        return {}

    async def _images(self, request: DockerRequest, task: str) -> Local:
        """List the images that containers of this task can name. Harnesses look here before they build an image."""
        opened = await self._engine.tasks.open(task)
        driver = self._engine.drivers.get("container")
        wanted = _filters(request).get("reference", [])
        names = list(wanted)
        if opened.origin is not None:
            # What the containers are made of is decided; any name that a client asks for stands for it.
            names = names or [opened.spec.image or "forkpoint"]
        elif driver is not None:
            tags = await cast("Images", driver).tags()
            names = [tag for tag in tags if not wanted or any(_is_tag(tag, name) for name in wanted)]
        entries = []
        for name in names:
            try:
                entry = responses.image_entry(name, await self._config(task, name))
            except RefusalError:
                # The filter's name does not exist, or the image was removed meanwhile.
                continue
            # Docker's SDK inspects each listed image by its id, and takes the names from there.
            self._listed_images[entry["Id"]] = name
            entries.append(entry)
        return responses.json_response(entries)

    async def _pull(self, request: DockerRequest, task: str) -> Local:
        name, tag = request.query.get("fromImage", ""), request.query.get("tag", "")
        full = f"{name}@{tag}" if tag.startswith("sha256:") else f"{name}:{tag}" if tag else name
        if not name:
            raise RefusalError(400, "docker", "Forkpoint imports no images. Name one in fromImage.")
        try:
            await self._config(task, full)
        except RefusalError as error:
            raise RefusalError(
                404, "docker", f"{error} Forkpoint pulls no images. Run docker pull on its host."
            ) from None
        return responses.pulled(full)

    # -- containers --------------------------------------------------------------------------------------------------

    async def _create(self, request: DockerRequest, task: str, owner: str, grant: Grant) -> Local:
        body, name = request.json(), requests.name_of(request.query)
        image = body.get("Image")
        config = await self._config(task, image) if isinstance(image, str) and image else {}
        spec = requests.container_spec(body, config)
        container_id = secrets.token_hex(32)
        name = name or f"forkpoint_{container_id[:12]}"
        self._require_free(task, owner, name)
        # From here to `add` there are awaits: a concurrent create with this name must fail.
        self._reserved_names.add((task, owner, name))
        try:
            rollout = await self._begin(task, owner, container_id, requests.environment(body, config), grant)
            self._registry.add(Container(container_id, name, task, owner, rollout, spec, time.time()))
        finally:
            self._reserved_names.discard((task, owner, name))
        return responses.json_response({"Id": container_id, "Warnings": []}, 201)

    def _require_free(self, task: str, owner: str, name: str) -> None:
        if (task, owner, name) in self._reserved_names:
            raise RefusalError(
                409, "docker", f'Conflict. The container name "/{name}" is being taken by another request.'
            )
        for other in self._registry.of(task, owner):
            if other.name == name:
                raise RefusalError(
                    409, "docker", f'Conflict. The container name "/{name}" is already in use by container '
                    f'"{other.id}". You have to remove (or rename) that container to be able to reuse that name.',
                )  # fmt: skip

    async def _begin(
        self, task: str, owner: str, container_id: str, environment: EnvironmentRequest, grant: Grant
    ) -> str:
        """Begin the rollout that a container is.

        Returns:
            The rollout's name: the URL's rollout if no other container is that yet, else that name with a number. If
            the URL has no rollout, the container's ID.

        Raises:
            RefusalError: 403, the request's token stands for a rollout that is a container already.
        """
        reserved = (name for reserved_task, name in self._reserved_rollouts if reserved_task == task)
        taken = {*self._registry.rollout_names(task), *reserved}
        names = (owner if n == 1 else f"{owner}~{n}" for n in range(1, 1 << 16))
        name = next(name for name in names if name not in taken) if owner else container_id
        grant.require_rollout(name)
        self._reserved_rollouts.add((task, name))
        try:
            await self._engine.tasks.open_rollout(task, name, environment=environment)
        finally:
            self._reserved_rollouts.discard((task, name))
        return name


def _filters(request: DockerRequest) -> dict[str, list[str]]:
    """Return the filters of a listing, by name.

    Raises:
        RefusalError: 400, the filters are no JSON object.
    """
    try:
        filters = orjson.loads(request.query.get("filters") or b"{}")
    except orjson.JSONDecodeError:
        raise RefusalError(400, "docker", "invalid filter") from None
    if not isinstance(filters, dict):
        raise RefusalError(400, "docker", "invalid filter")
    # Older clients send {"label": {"a": true}}, newer ones {"label": ["a"]}.
    return {name: list(map(str, values)) for name, values in filters.items() if isinstance(values, list | dict)}


def _is_tag(tag: str, name: str) -> bool:
    """Return whether a name means an image's tag: Docker's default tag may be left out."""
    return tag in (name, f"{name}:latest") or tag.rpartition(":")[0] == name
