"""Docker's Engine API before the tree: what is answered at once, what opens, runs and ends a rollout.

An exec's creation and inspection are answered here; its start is the call. Nothing is started before the first miss.
"""

import secrets
import time
from collections.abc import Mapping
from typing import Any, Protocol, cast

import orjson

from proxy.compat.docker import requests as docker
from proxy.compat.docker import responses as docker_told
from proxy.compat.docker.calls import ContainerCalls
from proxy.compat.docker.execs import ContainerExecs
from proxy.compat.docker.lifecycle import ContainerLives
from proxy.compat.docker.registry import Containers
from proxy.compat.docker.requests import NO_PAGE, DockerRequest
from proxy.compat.docker.responses import Container
from proxy.compat.docker.stream import HijackedConnection
from proxy.dialects.base import Local
from proxy.engine import Engine
from proxy.http.address import Address
from proxy.http.answer_cache import Answers, response
from proxy.http.exchange import raw
from proxy.refusals import RefusalError
from proxy.tree.environments import EnvironmentRequest
from proxy.tree.rollout import Rollout
from sandboxes.errors import SpecError
from sandboxes.spec import SHELLLESS_DRIVERS


class Images(Protocol):
    """What a driver of containers knows of images."""

    async def config(self, image: str) -> dict[str, Any]:
        """Return an image's id and defaults. Raises SpecError."""
        ...


class EngineApi:
    """Answers what comes below the endpoint `docker`."""

    def __init__(self, engine: Engine, answers: Answers) -> None:
        self._engine = engine
        self.containers = Containers(engine.store, engine.tasks)
        max_input = engine.settings.max_body_bytes
        self._calls = ContainerCalls(engine, answers)
        self._execs = ContainerExecs(self.containers, self._calls, max_input=max_input)
        self._lives = ContainerLives(
            self.containers, self._execs, self._calls, max_input=max_input, closing=engine.closing
        )
        self._reserved: set[tuple[str, str, str]] = set()
        self._beginning: set[tuple[str, str]] = set()

    # -- ways in -----------------------------------------------------------------------------------------------------

    def known(self, method: str, address: Address, query: bytes, body: bytes) -> bytes | None:
        """Return the whole HTTP response where no await is needed; None where one is, or something is wrong."""
        try:
            asked = docker.asked(method, address.raw.decode("latin-1"), query.decode("latin-1"), body)
            local = self._at_once(asked, address.task, address.rollout)
        except RefusalError:
            return None
        if local is None:
            return None
        headers = raw(local.headers)
        if local.status != 204:
            headers.append((b"content-length", b"%d" % len(local.body)))
        return response(local.status, headers, local.body)

    async def answer(self, method: str, address: Address, query: bytes, body: bytes) -> Local:
        """Answer a request that is no stream.

        Raises:
            Streaming: it is one after all.
        """
        asked = docker.asked(method, address.raw.decode("latin-1"), query.decode("latin-1"), body)
        task, owner = address.task, address.rollout
        if asked.words[:1] == ("_ping",):
            return docker_told.ping(method)
        await self._load(task)
        return self._at_once(asked, task, owner) or await self._act(asked, task, owner)

    async def hijacked(self, address: Address, query: bytes, body: bytes, wire: HijackedConnection) -> None:
        """Answer a request whose connection becomes a stream. What goes wrong after its head is told in the stream."""
        asked = docker.asked("POST", address.raw.decode("latin-1"), query.decode("latin-1"), body)
        await self._load(address.task)
        match asked.words:
            case ("exec", name, "start"):
                await self._execs.start(self._execs.find(address.task, address.rollout, name), wire)
            case ("containers", name, "attach"):
                container = self.containers.find(address.task, address.rollout, name)
                await self._lives.attach(asked, container, wire)
            case _:
                raise NO_PAGE

    def hijacked_at_once(self, address: Address, body: bytes, wire: HijackedConnection) -> bool:
        """Answer the start of an exec that wants no input and that the tree knows; False where it is none."""
        match docker.asked("POST", address.raw.decode("latin-1"), "", body).words:
            case ("exec", name, "start"):
                return self._execs.start_known(self._execs.find(address.task, address.rollout, name), wire)
        return False

    async def aclose(self) -> None:
        """See `ContainerLives.aclose`."""
        await self._lives.aclose()

    # -- answered at once --------------------------------------------------------------------------------------------

    def _at_once(self, asked: DockerRequest, task: str, owner: str) -> Local | None:
        match (asked.method, *asked.words):
            case ("GET" | "HEAD", "_ping"):
                return docker_told.ping(asked.method)
            case ("GET", "version"):
                return docker_told.version()
            case ("GET", "images", "json") | ("GET", "networks"):
                return docker_told.told([])
            case ("GET", "volumes"):
                return docker_told.told({"Volumes": [], "Warnings": None})
        return self._of_containers(asked, task, owner) if self.containers.known(task) else None

    def _of_containers(self, asked: DockerRequest, task: str, owner: str) -> Local | None:
        match (asked.method, *asked.words):
            case ("GET", "info"):
                return docker_told.info(self.containers.of(task, owner))
            case ("GET", "containers", "json"):
                return self._list(asked, task, owner)
            case ("GET", "containers", name, "json"):
                container = self.containers.find(task, owner, name)
                return docker_told.inspected(container) if self.containers.rollout(container) else None
            case ("POST", "containers", name, "exec"):
                container = self.containers.find(task, owner, name)
                return self._execs.new(asked, container) if self.containers.rollout(container) else None
            case ("GET", "exec", name, "json"):
                return docker_told.execution_inspected(self._execs.find(task, owner, name))
        return None

    def _list(self, asked: DockerRequest, task: str, owner: str) -> Local:
        try:
            filters = orjson.loads(asked.query.get("filters") or b"{}")
        except orjson.JSONDecodeError:
            raise RefusalError(400, "docker", "invalid filter") from None
        if not isinstance(filters, dict):
            raise RefusalError(400, "docker", "invalid filter")
        # Older clients send {"label": {"a": true}}, newer ones {"label": ["a"]}.
        wanted = {name: list(values) for name, values in filters.items() if isinstance(values, list | dict)}
        every = asked.flag("all") or "status" in wanted
        found = [one for one in self.containers.of(task, owner) if every or one.state == "running"]
        return docker_told.listed([one for one in found if docker_told.fits(one, wanted)], time.time())

    # -- asked for with an await -------------------------------------------------------------------------------------

    async def _act(self, asked: DockerRequest, task: str, owner: str) -> Local:
        match (asked.method, *asked.words):
            case ("POST", "images", "create"):
                return await self._pull(asked, task)
            case ("GET", "images", *name, "json") if name:
                return docker_told.image("/".join(name), await self._config(task, "/".join(name)))
            case ("POST", "containers", "create"):
                return await self._create(asked, task, owner)
            case ("POST", "exec", name, "start"):
                return await self._execs.start_detached(self._execs.find(task, owner, name), asked)
            case ("POST", "exec", name, "resize"):
                self._execs.find(task, owner, name)
                return Local(200, headers=())
            case (_, "containers", name, *_) if name not in {"json", "create", "prune"}:
                container = self.containers.find(task, owner, name)
                rollout = await self.containers.standing(container)
                return self._of_containers(asked, task, owner) or await self._in_container(asked, container, rollout)
        raise NO_PAGE

    async def _in_container(self, asked: DockerRequest, container: Container, rollout: Rollout) -> Local:
        lives = self._lives
        match (asked.method, *asked.words[2:]):
            case ("POST", "start" | "stop" | "restart" | "kill" | "wait" as verb):
                return await lives.tell(verb, asked, container)
            case ("POST", "resize"):
                return Local(200, headers=())
            case ("GET", "logs"):
                raise await lives.logs(asked, container)
            case ("GET", "top"):
                return await lives.top(asked, container)
            case ("HEAD" | "GET" | "PUT", "archive"):
                return await self._calls.copy(asked, container, rollout)
            case ("DELETE",):
                return await lives.remove(asked, container)
        raise NO_PAGE

    async def _load(self, task: str) -> None:
        if not self.containers.known(task):
            await self.containers.load(task)
        opened = await self._engine.tasks.open(task)
        if opened.spec.driver in SHELLLESS_DRIVERS or opened.spec.upstreams:
            raise RefusalError(404, "docker", f"this task's driver, {opened.spec.driver!r}, runs no processes")

    # -- images ------------------------------------------------------------------------------------------------------

    async def _config(self, task: str, image: str) -> Mapping[str, Any]:
        """Return the defaults of what a container of this image would really be made of.

        Raises:
            Refused: 404, there is no such image.
        """
        opened = await self._engine.tasks.open(task)
        given = opened.spec if opened.origin is not None else None
        driver = given.driver if given is not None else "container"
        if driver == "container" and driver in self._engine.drivers:
            real = given.image if given is not None and given.image else image
            try:
                return await cast("Images", self._engine.drivers[driver]).config(real)
            except SpecError:
                raise RefusalError(404, "docker", f"No such image: {real}") from None
        if given is None and not self._engine.settings.any_image:
            raise RefusalError(
                404, "docker", f"No such image: {image}. PUT the task with an environment, or serve with the driver "
                "container (FORKPOINT_DRIVERS), or with any_image."
            )  # fmt: skip
        return {}

    async def _pull(self, asked: DockerRequest, task: str) -> Local:
        name, tag = asked.query.get("fromImage", ""), asked.query.get("tag", "")
        full = f"{name}@{tag}" if tag.startswith("sha256:") else f"{name}:{tag}" if tag else name
        if not name:
            raise RefusalError(400, "docker", "Forkpoint imports no images: fromImage names none")
        try:
            await self._config(task, full)
        except RefusalError as error:
            raise RefusalError(
                404, "docker", f"{error} Forkpoint pulls nothing: docker pull it where it serves."
            ) from None
        return docker_told.pulled(full)

    # -- containers --------------------------------------------------------------------------------------------------

    async def _create(self, asked: DockerRequest, task: str, owner: str) -> Local:
        body, name = asked.json(), docker.name_of(asked.query)
        image = body.get("Image")
        config = await self._config(task, image) if isinstance(image, str) and image else {}
        made = docker.created(body, config)
        number = secrets.token_hex(32)
        name = name or f"forkpoint_{number[:12]}"
        self._require_free(task, owner, name)
        place = (task, owner, name)
        self._reserved.add(place)
        try:
            rollout = await self._begin(task, owner, number, docker.wanted(body, config))
            container = Container(number, name, task, owner, rollout, made, time.time())
            self.containers.add(container)
        finally:
            self._reserved.discard(place)
        return docker_told.told({"Id": number, "Warnings": []}, 201)

    def _require_free(self, task: str, owner: str, name: str) -> None:
        if (task, owner, name) in self._reserved:
            raise RefusalError(
                409, "docker", f'Conflict. The container name "/{name}" is being taken by another request.'
            )
        for other in self.containers.of(task, owner):
            if other.name == name:
                raise RefusalError(
                    409, "docker", f'Conflict. The container name "/{name}" is already in use by container '
                    f'"{other.id}". You have to remove (or rename) that container to be able to reuse that name.',
                )  # fmt: skip

    async def _begin(self, task: str, owner: str, number: str, wanted: EnvironmentRequest) -> str:
        """Begin the rollout that a container is, and return its name: the URL's, if no other container is that yet."""
        taken = {*self.containers.names(task), *(name for other, name in self._beginning if other == task)}
        names = (owner if n == 1 else f"{owner}~{n}" for n in range(1, 1 << 16))
        name = next(name for name in names if name not in taken) if owner else number
        self._beginning.add((task, name))
        try:
            await self._engine.tasks.opened(task, name, wanted=wanted)
        finally:
            self._beginning.discard((task, name))
        return name
