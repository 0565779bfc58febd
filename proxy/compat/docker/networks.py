"""Docker's networks and volumes: names that the containers of a project have in common.

All services of a project share one network without a way out, and a volume is a directory of the state. So both are
kept in memory only, and a volume ends with its project.
"""

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from proxy.compat.docker import responses
from proxy.compat.docker.containers import Container
from proxy.compat.docker.members import PROJECT, VOLUME
from proxy.compat.docker.requests import DockerRequest
from proxy.dialects.base import Local
from proxy.refusals import RefusalError

_MAX_ENTRIES = 1000
"""Networks, and volumes, of one URL. Their labels are kept in memory, so a client must not create them without end."""


@dataclass(slots=True, eq=False)
class Network:
    """A network."""

    id: str  # 64 hexadecimal digits.
    name: str
    body: Mapping[str, Any]  # What the create request said.
    created_at: float  # Seconds since 1970.

    @property
    def project(self) -> str:
        """The project whose containers it connects."""
        return str((self.body.get("Labels") or {}).get(PROJECT) or self.name)


@dataclass(slots=True, eq=False)
class Volume:
    """A named volume."""

    name: str
    labels: Mapping[str, str]
    created_at: float  # Seconds since 1970.
    project: str = ""  # The one that uses it; empty for none.
    ended: bool = False  # The project has ended, and what was in the volume with it.

    @property
    def name_in_spec(self) -> str:
        """Its name in the compose file: the full name differs in each project."""
        return str(self.labels.get(VOLUME) or self.name)


@dataclass(slots=True)
class Names:
    """The networks and volumes of one URL, by name."""

    networks: dict[str, Network] = field(default_factory=dict)
    volumes: dict[str, Volume] = field(default_factory=dict)

    def network(self, name: str) -> Network | None:
        """Return the network with this name or ID; None if there is none."""
        by_id = (network for network in self.networks.values() if len(name) >= 12 and network.id.startswith(name))
        return self.networks.get(name) or next(by_id, None)

    def require_network(self, name: str) -> Network:
        """Return the network with this name or ID. Raises RefusalError (404) if there is none."""
        network = self.network(name)
        if network is None:
            raise RefusalError(404, "docker", f"network {name} not found")
        return network

    def require_volume(self, name: str) -> Volume:
        """Return the volume of this name. Raises RefusalError (404) if there is none."""
        if name not in self.volumes:
            raise RefusalError(404, "docker", f"get {name}: no such volume")
        return self.volumes[name]

    def answer(self, request: DockerRequest, containers: Sequence[Container]) -> Local | None:
        """Answer a request about networks or volumes, for the containers that the URL shows; None for any other."""
        match (request.method, *request.segments):
            case ("GET", "networks"):
                filters = request.filters()
                shown = [network for network in self.networks.values() if _passes(network.id, network, filters)]
                return responses.json_response([self._network(network, containers) for network in shown])
            case ("POST", "networks", "create"):
                return self._create_network(request)
            case ("POST", "networks" | "volumes" as kind, "prune"):
                return self._prune(kind, containers)
            case ("GET", "networks", name):
                return responses.json_response(self._network(self.require_network(name), containers))
            case ("DELETE", "networks", name):
                return self._remove_network(self.require_network(name), containers)
            case ("GET", "volumes"):
                filters = request.filters()
                listed = [_volume(volume) for volume in self.volumes.values() if _passes("", volume, filters)]
                return responses.json_response({"Volumes": listed, "Warnings": None})
            case ("POST", "volumes", "create"):
                return self._create_volume(request)
            case ("GET", "volumes", name):
                return responses.json_response(_volume(self.require_volume(name)))
            case ("DELETE", "volumes", name):
                return self._remove_volume(self.require_volume(name), containers)
        return None

    def _create_network(self, request: DockerRequest) -> Local:
        body = request.json()
        name, driver = str(body.get("Name") or ""), str(body.get("Driver") or "bridge")
        if not name:
            raise RefusalError(400, "docker", "A network needs a Name.")
        if driver not in {"bridge", "default"}:
            raise RefusalError(
                400, "docker", f"Network {name!r} has the driver {driver!r}. A project has one network without a way "
                "out: leave `driver` out of the compose file.",
            )  # fmt: skip
        if name in self.networks or name in {"bridge", "host", "none"}:
            raise RefusalError(409, "docker", f"network with name {name} already exists")
        self._require_room(len(self.networks))
        network = Network(secrets.token_hex(32), name, body, time.time())
        self.networks[name] = network
        return responses.json_response({"Id": network.id, "Warning": ""}, 201)

    def _create_volume(self, request: DockerRequest) -> Local:
        body = request.json()
        name = str(body.get("Name") or secrets.token_hex(32))
        if str(body.get("Driver") or "local") != "local" or body.get("DriverOpts"):
            raise RefusalError(
                400, "docker", f"Volume {name!r} has a driver or options. A volume is a directory of the state: leave "
                "`driver` and `driver_opts` out of the compose file.",
            )  # fmt: skip
        return responses.json_response(_volume(self.use_volume(name, dict(body.get("Labels") or {}))), 201)

    def use_volume(self, name: str, labels: Mapping[str, str] | None = None) -> Volume:
        """Return the volume of this name; as in Docker, it is made if there is none."""
        if name not in self.volumes:
            self._require_room(len(self.volumes))
            self.volumes[name] = Volume(name, labels or {}, time.time())
        return self.volumes[name]

    def _require_room(self, present: int) -> None:
        if present >= _MAX_ENTRIES:
            raise RefusalError(409, "docker", f"There are {_MAX_ENTRIES} already: remove what is not needed.")

    def _remove_network(self, network: Network, containers: Sequence[Container]) -> Local:
        if self._users(network, containers):
            raise RefusalError(
                409, "docker", f"error while removing network: network {network.name} has active endpoints"
            )
        del self.networks[network.name]
        return Local(204, headers=())

    def _remove_volume(self, volume: Volume, containers: Sequence[Container]) -> Local:
        if users := self._mounting(volume, containers):
            raise RefusalError(409, "docker", f"remove {volume.name}: volume is in use - [{', '.join(users)}]")
        del self.volumes[volume.name]
        return Local(204, headers=())

    def _prune(self, kind: str, containers: Sequence[Container]) -> Local:
        if kind == "networks":
            unused = [network for network in self.networks.values() if not self._users(network, containers)]
            for network in unused:
                del self.networks[network.name]
            return responses.json_response({"NetworksDeleted": [network.name for network in unused]})
        free = [volume for volume in self.volumes.values() if not self._mounting(volume, containers)]
        for volume in free:
            del self.volumes[volume.name]
        return responses.json_response({"VolumesDeleted": [volume.name for volume in free], "SpaceReclaimed": 0})

    def _users(self, network: Network, containers: Sequence[Container]) -> list[Container]:
        return [container for container in containers if {network.name, network.id} & container.networks.keys()]

    def _mounting(self, volume: Volume, containers: Sequence[Container]) -> list[str]:
        return [container.id for container in containers if volume.project and container.project == volume.project]

    def _network(self, network: Network, containers: Sequence[Container]) -> dict[str, Any]:
        body = network.body
        return {
            "Name": network.name, "Id": network.id, "Created": responses.timestamp(network.created_at),
            "Scope": "local", "Driver": "bridge", "EnableIPv6": False, "Internal": bool(body.get("Internal")),
            "Attachable": bool(body.get("Attachable")), "Ingress": False, "ConfigFrom": {"Network": ""},
            "ConfigOnly": False, "Options": body.get("Options") or {}, "Labels": body.get("Labels") or {},
            "IPAM": {"Driver": "default", "Options": None, "Config": (body.get("IPAM") or {}).get("Config") or []},
            "Containers": {
                container.id: {"Name": container.name, "EndpointID": "", "MacAddress": "", "IPv4Address": "127.0.0.1/8",
                               "IPv6Address": ""}
                for container in self._users(network, containers) if container.is_running
            },
        }  # fmt: skip


def _volume(volume: Volume) -> dict[str, Any]:
    return {
        "Name": volume.name, "Driver": "local", "Mountpoint": "", "CreatedAt": responses.timestamp(volume.created_at),
        "Labels": volume.labels, "Scope": "local", "Options": None,
    }  # fmt: skip


def _passes(entry_id: str, entry: Network | Volume, filters: Mapping[str, Sequence[str]]) -> bool:
    """Return whether a network or volume passes the filters of a list: name, id and label. Others are ignored."""
    labels = entry.labels if isinstance(entry, Volume) else entry.body.get("Labels") or {}
    checks: dict[str, Callable[[str], bool]] = {
        "label": lambda value: responses.has_label(labels, value),
        "name": lambda value: value.strip("^$") in entry.name,
        "id": entry_id.startswith,
    }
    return responses.passes(filters, checks)
