"""Projects: containers that share a network, such as those of a compose file, as one rollout and one sandbox.

1. *Planned.* Clients create its network, volumes and containers, and start them, in memory only: there is no rollout.
   Services are reported as healthy, because no call will meet them in another state.
2. *Begun.* The first call (an exec, a copy, `logs`, `top`) begins the rollout: the containers that are running then are
   its main container and its services (`members.environment`). From now on no container can be added, stopped
   for a while or started again: such a state is refused, not invented.
3. *Ended.* The rollout ends with the project's last container, and its volumes with it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from proxy.compat.docker.containers import Container, ContainerState
from proxy.compat.docker.members import PROJECT, ProjectMember, environment, main_member, member
from proxy.compat.docker.mounts import mounts_of
from proxy.compat.docker.networks import Names
from proxy.compat.docker.registry import ContainerRegistry
from proxy.refusals import RefusalError
from proxy.tree.environments import EnvironmentRequest
from proxy.tree.rollout import Rollout

Begin = Callable[[EnvironmentRequest], Awaitable[Rollout]]


@dataclass(slots=True, eq=False)
class Plan:
    """A project that has not begun."""

    # What each of its containers means, by the container's ID.
    members: dict[str, ProjectMember] = field(default_factory=dict)
    # What each would be without the others, by its ID.
    requests: dict[str, EnvironmentRequest] = field(default_factory=dict)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # Held while its rollout begins.


class Projects:
    """The projects, networks and volumes of all tasks."""

    def __init__(self, registry: ContainerRegistry) -> None:
        self._registry = registry
        self._names: dict[tuple[str, str], Names] = {}
        self._plans: dict[tuple[str, str, str], Plan] = {}

    def names(self, task: str, owner: str) -> Names:
        """Return the networks and volumes of a URL."""
        return self._names.setdefault((task, owner), Names())

    def forget(self, task: str) -> None:
        """Forget everything of a task."""
        for known in [key for key in self._names if key[0] == task]:
            del self._names[known]
        for planned in [key for key in self._plans if key[0] == task]:
            del self._plans[planned]

    def name_of(self, task: str, owner: str, body: Mapping[str, Any]) -> str:
        """Return the project of a new container, or an empty text. Raises RefusalError (400) for another's network."""
        names, project = self.names(task, owner), str((body.get("Labels") or {}).get(PROJECT) or "")
        settings = (body.get("NetworkingConfig") or {}).get("EndpointsConfig") or {}
        mode = str((body.get("HostConfig") or {}).get("NetworkMode") or "")
        for name in (*settings, mode):
            network = names.network(name) if name else None
            if network is None:
                continue
            project = project or network.project
            if network.project != project:
                raise RefusalError(
                    400, "docker", f"Network {network.name!r} does not belong to project {project!r}. A project is one "
                    "state, with networks of its own: remove `external` from the compose file.",
                )  # fmt: skip
        return project

    def plan(self, container: Container, config: Mapping[str, Any], request: EnvironmentRequest) -> None:
        """Add a new container to its project; alone it would be `request`. Raises RefusalError (400, 409)."""
        key = (container.task, container.owner, container.project)
        others = self._registry.project(*key)
        if any(not other.is_planned for other in others):
            raise RefusalError(
                409, "docker", f"Project {container.project!r} has made calls already, so no container can be added to "
                "its state. End it first (docker compose down).",
            )  # fmt: skip
        plan = self._plans.setdefault(key, Plan())
        running = [plan.members[other.id].name for other in others if other.is_running and other.id in plan.members]
        volumes = self._use_volumes(container)
        made = member(container.name, container.spec, config, volumes, running)
        plan.members[container.id], plan.requests[container.id] = made, request

    def _use_volumes(self, container: Container) -> dict[str, str]:
        """Return what the spec calls each volume that a container mounts; from now on they belong to its project."""
        names, spec = self.names(container.task, container.owner), container.spec
        used = {}
        for name, _ in mounts_of(spec.body.get("HostConfig") or {}).volumes:
            # As in Docker, a container can name a volume that does not exist yet.
            volume = names.use_volume(name)
            if volume.ended:
                raise RefusalError(
                    409, "docker", f"Volume {name!r} was part of a state that has ended, and its files with it. Remove "
                    "it first (docker compose down --volumes).",
                )  # fmt: skip
            if volume.project not in ("", container.project):
                raise RefusalError(400, "docker", f"Volume {name!r} belongs to project {volume.project!r} already.")
            volume.project = container.project
            used[name] = volume.name_in_spec
        return used

    def forget_member(self, container: Container) -> None:
        """Note that a container was removed. With the last one, the project and its volumes end."""
        key = (container.task, container.owner, container.project)
        plan = self._plans.get(key)
        if plan is not None:
            plan.members.pop(container.id, None)
            plan.requests.pop(container.id, None)
        if self._registry.project(*key):
            return
        self._plans.pop(key, None)
        for volume in self.names(container.task, container.owner).volumes.values():
            if volume.project == container.project:
                # A planned project has put nothing into them.
                volume.project, volume.ended = "", volume.ended or not container.is_planned

    def is_planned(self, container: Container) -> bool:
        """Return whether the project of a container has made no call yet."""
        return (container.task, container.owner, container.project) in self._plans

    async def begin(self, container: Container, begin: Begin) -> None:
        """Begin a container's project before its first call. Raises RefusalError (409) if it cannot be one state."""
        key = (container.task, container.owner, container.project)
        plan = self._plans.get(key)
        if not container.is_planned or plan is None:
            return
        async with plan.turn:
            if self._plans.get(key) is not plan:
                # Another call has begun it meanwhile.
                return
            started = [other for other in self._registry.project(*key) if other.is_running]
            if container not in started:
                raise RefusalError(409, "docker", f"Container {container.id} is not running")
            members = {other.id: plan.members[other.id] for other in started}
            named = {plan.members[id_].name: plan.requests[id_] for id_ in members}
            if len(named) < len(members):
                raise RefusalError(
                    409, "docker", "Two containers of a project have one name. A service has one container."
                )
            main = main_member(list(members.values()))
            rollout = await begin(environment(list(members.values()), named))
            for other in started:
                other.rollout = rollout.name
                other.service = "" if members[other.id] is main else members[other.id].name
            self._registry.save(container)
            del self._plans[key]

    def require_whole(self, container: Container) -> None:
        """Raise RefusalError (409) if a container of a begun project was stopped: its processes still run."""
        if not container.project:
            return
        for other in self._registry.project(container.task, container.owner, container.project):
            if not other.is_planned and other.state is ContainerState.EXITED:
                raise RefusalError(
                    409, "docker", f"Container {other.name} was stopped, and the services of a project run together. "
                    "End the project (docker compose down), and start it again.",
                )  # fmt: skip
