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
from typing import Any

from proxy.compat.docker import requests, responses
from proxy.compat.docker.calls import ContainerCalls
from proxy.compat.docker.containers import Container, ShownContainers
from proxy.compat.docker.events import ContainerEvents
from proxy.compat.docker.execs import ContainerExecs, require_running
from proxy.compat.docker.images import ImageRequests
from proxy.compat.docker.lifecycle import ContainerLifecycle, StreamedResponse
from proxy.compat.docker.mounts import notes_of
from proxy.compat.docker.projects import Projects
from proxy.compat.docker.registry import ContainerRegistry
from proxy.compat.docker.requests import NO_PAGE, DockerRequest
from proxy.compat.docker.stream import StreamConnection
from proxy.compat.endpoints import EndpointContext
from proxy.dialects.base import Local
from proxy.http.access import Grant
from proxy.http.address import Address
from proxy.http.answer_cache import Answers, raw, response
from proxy.http.sent_labels import owned
from proxy.refusals import RefusalError
from proxy.tree.environments import EnvironmentRequest
from proxy.tree.rollout import Rollout
from sandboxes.spec import SHELLLESS_DRIVERS


class DockerApi:
    """Answers the requests below the endpoint `docker` of all tasks."""

    def __init__(self, context: EndpointContext, answers: Answers) -> None:
        self._context = context
        self._registry = ContainerRegistry(context.store, context.tasks)
        context.lifecycle.at_drop.append(self._registry.forget)
        max_stdin_bytes = context.settings.max_body_bytes
        self._images, self._events = ImageRequests(context), ContainerEvents()
        self._projects = Projects(self._registry)
        context.lifecycle.at_drop.append(self._projects.forget)
        self._calls = ContainerCalls(context, answers)
        self._execs = ContainerExecs(self._registry, self._calls, max_stdin_bytes=max_stdin_bytes)
        self._lifecycle = ContainerLifecycle(
            self._registry, self._execs, self._calls, self._events, self._projects, max_stdin_bytes=max_stdin_bytes,
            closing=context.lifecycle.closing,
        )  # fmt: skip
        context.tasks.rollouts.at_end.append(self._lifecycle.ended)
        # Names of containers and of rollouts that creations under way have taken: a creation awaits several times.
        self._reserved_names: set[tuple[str, str, str]] = set()
        self._reserved_rollouts: set[tuple[str, str]] = set()

    def known(self, method: str, address: Address, query: bytes, body: bytes, grant: Grant) -> bytes | None:
        """Return the whole HTTP response; None if it needs an await, or if the request is invalid: see `answer`."""
        try:
            request = requests.read(method, address.raw.decode("latin-1"), query.decode("latin-1"), body)
            local = self._from_memory(request, _shown(address, grant))
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
        """Answer a request that keeps HTTP. Raises RefusalError, in Docker's words if Docker has some."""
        request = requests.read(method, address.raw.decode("latin-1"), query.decode("latin-1"), body)
        shown = _shown(address, grant)
        # A ping must not create the task.
        if request.segments[:1] == ("_ping",):
            return responses.ping(method)
        await self._load(shown.task)
        return self._from_memory(request, shown) or await self._act(request, shown, grant)

    async def stream(
        self, address: Address, query: bytes, body: bytes, grant: Grant, connection: StreamConnection
    ) -> None:
        """Answer a request whose connection becomes a stream. Raises RefusalError, which the caller reports in it."""
        request = requests.read("POST", address.raw.decode("latin-1"), query.decode("latin-1"), body)
        await self._load(address.task)
        shown = _shown(address, grant)
        match request.segments:
            case ("exec", name, "start"):
                await self._execs.start(self._execs.find(shown, name), connection)
            case ("containers", name, "attach"):
                container = self._registry.find(shown, name)
                await self._lifecycle.attach(request, container, connection)
            case _:
                raise NO_PAGE

    def stream_known(self, address: Address, body: bytes, grant: Grant, connection: StreamConnection) -> bool:
        """Answer the start of an exec that the tree knows, without an await; return False for any other request."""
        match requests.read("POST", address.raw.decode("latin-1"), "", body).segments:
            case ("exec", name, "start"):
                return self._execs.start_known(self._execs.find(_shown(address, grant), name), connection)
        return False

    def fail_exec(self, address: Address, grant: Grant) -> bool:
        """Note that the exec that a request would start was not run; return whether there is one."""
        try:
            match requests.read("POST", address.raw.decode("latin-1"), "", b"").segments:
                case ("exec", name, "start"):
                    self._execs.fail(self._execs.find(_shown(address, grant), name))
                    return True
        except RefusalError:
            pass
        return False

    async def aclose(self) -> None:
        """Stop watching main commands, at shutdown."""
        await self._lifecycle.aclose()

    # -- answered from memory ----------------------------------------------------------------------------------------

    def _from_memory(self, request: DockerRequest, shown: ShownContainers) -> Local | None:
        match (request.method, *request.segments):
            case ("GET" | "HEAD", "_ping"):
                return responses.ping(request.method)
            case ("GET", "version"):
                return responses.version()
        if not self._registry.is_loaded(shown.task):
            return None
        if request.segments[:1] in (("networks",), ("volumes",)):
            return self._projects.names(shown.task, shown.owner).answer(request, self._registry.of(shown))
        return self._container_from_memory(request, shown)

    def _container_from_memory(self, request: DockerRequest, shown: ShownContainers) -> Local | None:
        match (request.method, *request.segments):
            case ("GET", "info"):
                return responses.info(self._registry.of(shown))
            case ("GET", "containers", "json"):
                return self._list(request, shown)
            case ("GET", "containers", name, "json"):
                container = self._registry.find(shown, name)
                if not (container.is_planned or container.lost or self._registry.rollout(container)):
                    # A rollout that is not in memory may have been finished: that needs an await to find out.
                    return None
                return responses.container_details(container, self._network_ids(shown))
            case ("POST", "containers", name, "exec"):
                container = self._registry.find(shown, name)
                if not container.lost and self._registry.rollout(container) is None:
                    return None
                self._projects.require_whole(container)
                return self._execs.create(request, container)
            case ("GET", "exec", name, "json"):
                return responses.exec_details(self._execs.find(shown, name))
        return None

    def _list(self, request: DockerRequest, shown: ShownContainers) -> Local:
        filters = request.filters()
        with_stopped = request.flag("all") or "status" in filters
        containers = [
            container
            for container in self._registry.of(shown)
            if (with_stopped or container.is_running) and responses.matches(container, filters)
        ]
        return responses.container_list(containers, time.time(), self._network_ids(shown))

    def _network_ids(self, shown: ShownContainers) -> dict[str, str]:
        networks = self._projects.names(shown.task, shown.owner).networks
        return {name: network.id for name, network in networks.items()}

    # -- answered with an await --------------------------------------------------------------------------------------

    async def _act(self, request: DockerRequest, shown: ShownContainers, grant: Grant) -> Local | StreamedResponse:
        task, owner = shown.task, shown.owner
        match (request.method, *request.segments):
            case (_, "images", *_):
                return await self._images.answer(request, task)
            case ("POST", "build", *_):
                raise RefusalError(
                    404, "docker", "Forkpoint builds no images. Build them on its host, and name them with `image`."
                )
            case ("GET", "events"):
                filters = request.filters()
                return self._lifecycle.until_closing(lambda send: self._events.send(shown, filters, send))
            case ("POST", "networks", name, "connect" | "disconnect" as verb):
                return self._change_network(verb, request, shown, name)
            case ("POST", "containers", "create"):
                return await self._create(request, task, owner, grant)
            case ("POST", "exec", name, "start"):
                return await self._execs.start_detached(self._execs.find(shown, name), request)
            case ("POST", "exec", name, "resize"):
                # Output does not depend on a terminal's size here, so resizing only checks that the instance exists.
                self._execs.find(shown, name)
                return Local(200, headers=())
            case (_, "containers", name, *_) if name not in {"json", "create", "prune"}:
                return await self._of_container(request, self._registry.find(shown, name), grant)
        raise NO_PAGE

    async def _of_container(
        self, request: DockerRequest, container: Container, grant: Grant
    ) -> Local | StreamedResponse:
        task, owner = container.task, container.owner
        if _makes_call(request):
            if container.lost:
                require_running(container)
            await self._projects.begin(container, lambda environment: self._begin(task, owner, environment, grant))
            self._projects.require_whole(container)
        # Loads the rollout, after which the request may be one that memory answers.
        in_memory = container.is_planned or container.lost
        rollout = None if in_memory else await self._lifecycle.rollout_of(container)
        return self._container_from_memory(request, ShownContainers(task, owner)) or await self._in_container(
            request, container, rollout
        )

    async def _in_container(
        self, request: DockerRequest, container: Container, rollout: Rollout | None
    ) -> Local | StreamedResponse:
        match (request.method, *request.segments[2:]):
            case ("POST", "start" | "stop" | "restart" | "kill" | "wait" as verb):
                return await self._lifecycle.change(verb, request, container)
            case ("POST", "resize"):
                return Local(200, headers=())
            case ("POST", "rename"):
                return self._rename(request, container)
            case ("GET", "logs"):
                return await self._lifecycle.logs(request, container)
            case ("GET", "top"):
                return await self._lifecycle.top(request, container)
            case ("HEAD" | "GET" | "PUT", "archive") if rollout is not None:
                return await self._calls.copy(request, container, rollout)
            case ("DELETE",):
                return await self._lifecycle.remove(request, container)
        raise NO_PAGE

    async def _load(self, task: str) -> None:
        if not self._registry.is_loaded(task):
            await self._registry.load(task)
        opened = await self._context.tasks.open(task)
        if opened.spec.driver in SHELLLESS_DRIVERS or opened.spec.upstreams:
            raise RefusalError(404, "docker", f"This task's driver, {opened.spec.driver!r}, runs no processes.")

    # -- containers --------------------------------------------------------------------------------------------------

    async def _create(self, request: DockerRequest, task: str, owner: str, grant: Grant) -> Local:
        body, name = request.json(), requests.name_of(request.query)
        image = body.get("Image")
        config = await self._images.config(task, image) if isinstance(image, str) and image else {}
        project = self._projects.name_of(task, owner, body)
        if project and not body.get("Healthcheck"):
            body["Healthcheck"] = config.get("Healthcheck")
        spec = requests.container_spec(body, config, in_project=bool(project))
        container_id = secrets.token_hex(32)
        name = name or f"forkpoint_{container_id[:12]}"
        self._require_free(task, owner, name)
        # From here to `add` there are awaits: a concurrent create with this name must fail.
        self._reserved_names.add((task, owner, name))
        try:
            environment = requests.environment(body, config)
            container = Container(container_id, name, task, owner, "", spec, time.time(), project=project)
            if project:
                grant.require_rollout(owner or container_id)
                await self._plan(container, config, environment)
            else:
                container.rollout = (await self._begin(task, owner, environment, grant, container_id)).name
            self._registry.add(container)
        finally:
            self._reserved_names.discard((task, owner, name))
        self._events.publish("create", container)
        notes = notes_of(body.get("HostConfig") or {})
        return responses.json_response({"Id": container_id, "Warnings": notes}, 201)

    async def _plan(self, container: Container, config: Mapping[str, Any], environment: EnvironmentRequest) -> None:
        has_others = bool(self._registry.project(container.task, container.owner, container.project))
        if has_others and not await self._images.has_images(container.task):
            raise RefusalError(
                400, "docker", "This task's environment is given, so a project has one container. For several, use a "
                "task without a spec, and serve with the driver local (FORKPOINT_DRIVERS), without any_image.",
            )  # fmt: skip
        # No await from here to `add`: another container of the project may be planned at the same time.
        self._projects.plan(container, config, environment)

    def _require_free(self, task: str, owner: str, name: str) -> None:
        if (task, owner, name) in self._reserved_names:
            raise RefusalError(
                409, "docker", f'Conflict. The container name "/{name}" is being taken by another request.'
            )
        for other in self._registry.of(ShownContainers(task, owner)):
            if other.name == name:
                raise RefusalError(
                    409, "docker", f'Conflict. The container name "/{name}" is already in use by container '
                    f'"{other.id}". You have to remove (or rename) that container to be able to reuse that name.',
                )  # fmt: skip

    async def _begin(
        self, task: str, owner: str, environment: EnvironmentRequest, grant: Grant, container_id: str = ""
    ) -> Rollout:
        """Begin the rollout that a container or a project is, and return it.

        Its name is the URL's rollout if no other container is that yet, else that name with a number; without one in
        the URL, the container's ID, or random for a project. Raises RefusalError: 403 if the token stands for a rollout
        that is a container already; 409 if a rollout of this name runs in another environment than the project's.
        """
        reserved = (name for reserved_task, name in self._reserved_rollouts if reserved_task == task)
        taken = {*self._registry.rollout_names(task), *reserved}
        names = (owner if n == 1 else f"{owner}~{n}" for n in range(1, 1 << 16))
        name = next(name for name in names if name not in taken) if owner else container_id or secrets.token_hex(32)
        grant.require_rollout(name)
        self._reserved_rollouts.add((task, name))
        try:
            rollout = await self._context.tasks.open_rollout(
                task, name, environment=environment, labels=owned({}, grant)
            )
        finally:
            self._reserved_rollouts.discard((task, name))
        if rollout.tree.spec.services.keys() != environment.services.keys() and environment.services:
            raise RefusalError(
                409, "docker", f"Rollout {name!r} runs already, without the services of this project. Finish it first."
            )
        return rollout

    def _rename(self, request: DockerRequest, container: Container) -> Local:
        name = requests.name_of(request.query)
        if not name:
            raise RefusalError(400, "docker", "Neither old nor new names may be empty")
        self._require_free(container.task, container.owner, name)
        container.name = name
        self._registry.save(container)
        return Local(204, headers=())

    # -- networks and events -----------------------------------------------------------------------------------------

    def _change_network(self, verb: str, request: DockerRequest, shown: ShownContainers, name: str) -> Local:
        """Connect a container of a project to a network, or disconnect it. Both only change what clients are shown."""
        network, body = self._projects.names(shown.task, shown.owner).require_network(name), request.json()
        container = self._registry.find(shown, str(body.get("Container") or ""))
        if container.project != network.project:
            raise RefusalError(
                400, "docker", f"Container {container.name} is not of network {network.name!r}. Name the network when "
                "you create the container.",
            )  # fmt: skip
        settings = container.spec.body.setdefault("NetworkingConfig", None) or {}
        endpoints = dict(settings.get("EndpointsConfig") or {})
        if verb == "connect":
            endpoints[network.name] = body.get("EndpointConfig") or {}
        else:
            endpoints.pop(network.name, None)
        container.spec.body["NetworkingConfig"] = {**settings, "EndpointsConfig": endpoints}
        self._registry.save(container)
        return Local(200, headers=())


def _shown(address: Address, grant: Grant) -> ShownContainers:
    return ShownContainers(address.task, address.rollout, alone=bool(grant.rollout))


def _makes_call(request: DockerRequest) -> bool:
    """Return whether a request about a container makes a call, so that its project has to begin."""
    match (request.method, *request.segments[2:]):
        case ("POST", "exec") | (_, "archive") | ("GET", "top"):
            return True
        case ("GET", "logs"):
            # A client that follows the output may do so from before the start of the other containers.
            return not request.flag("follow")
    return False
