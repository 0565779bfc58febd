"""What create requests of a project mean: which container is the main one, and what a service is."""

from typing import Any

import pytest

from proxy.compat.docker.members import OUTPUT, ProjectMember, environment, main_member, member
from proxy.compat.docker.requests import container_spec
from proxy.refusals import RefusalError
from proxy.tree.environments import EnvironmentRequest, spec_for
from sandboxes.spec import EnvironmentSpec

HEALTHY: dict[str, Any] = {
    "Healthcheck": {"Test": ["CMD", "check"], "StartPeriod": 90 * 10**9, "Interval": 10**9, "Timeout": 10**9}
}
DEPENDS_ON = "com.docker.compose.depends_on"


def made(
    name: str, *command: str, depends: str = "", config: dict[str, Any] | None = None, **body: Any
) -> ProjectMember:
    labels = {"com.docker.compose.service": name, DEPENDS_ON: depends}
    spec = container_spec(
        {"Image": f"{name}:1", "Cmd": list(command), "Labels": labels, **body}, config or {}, in_project=True
    )
    return member(f"p-{name}-1", spec, config or {}, {"p_data": "data"}, running=())


def whole(*members: ProjectMember) -> EnvironmentSpec:
    requests = {each.name: EnvironmentRequest(each.image) for each in members}
    request = environment(list(members), requests)
    return spec_for(request, None, EnvironmentSpec(), runs_images=True, any_image=False)


def test_container_that_waits_is_main() -> None:
    """The agent's container is the main one; its name still leads to the sandbox."""
    agent, web = made("agent", "sleep", "infinity"), made("web", "serve", **HEALTHY)
    spec = whole(web, agent)
    assert (spec.image, list(spec.services)) == ("agent:1", ["web"])
    assert spec.aliases == ("agent",)
    assert spec.services["web"].ready_s == 96.0
    assert f": >/.services/web{OUTPUT}" in spec.setup[0]


def test_further_hosts_that_lead_here_are_names() -> None:
    hosts = ["db.test:127.0.0.1", "db:127.0.0.1", "far:10.0.0.1"]
    spec = whole(made("agent", "sleep", "infinity", HostConfig={"ExtraHosts": hosts}), made("web", "serve", **HEALTHY))
    assert spec.aliases == ("agent", "db")


def test_member_named_main_comes_first() -> None:
    waiting = [made("first", "sleep", "infinity"), made("main", "tail", "-f", "/dev/null")]
    main = main_member(waiting)
    assert main is not None
    assert main.name == "main"
    # The other one is a service that is ready at once.
    service = whole(*waiting).services["first"]
    assert (service.command, service.healthcheck) == (("sleep", "infinity"), ("CMD-SHELL", ":"))


def test_busy_members_are_all_services() -> None:
    """The main container only carries them."""
    spec = whole(made("web", "serve", **HEALTHY), made("db", "store", ExposedPorts={"5432/tcp": {}}))
    assert (spec.image, sorted(spec.services), spec.services["db"].port) == ("db:1", ["db", "web"], 5432)


def test_made_up_names_are_in_no_spec() -> None:
    """Projects and containers are named after directories, which differ in each rollout."""
    endpoints = {"p_default": {"Aliases": ["p-web-1", "web", "www"]}}
    web = made("web", "serve", **HEALTHY, NetworkingConfig={"EndpointsConfig": endpoints})
    assert web.aliases == {"www"}
    assert "p-web-1" not in whole(web).model_dump_json()
    assert "www" in whole(web).aliases


@pytest.mark.parametrize("alias", ["a b", "../x", "x;true", "A", "db.local"])
def test_alias_must_be_a_plain_name(alias: str) -> None:
    """Aliases become names in a file of the sandbox."""
    endpoints = {"p_default": {"Aliases": [alias, "0123456789ab"]}}
    with pytest.raises(RefusalError, match="cannot be a name"):
        whole(made("web", "serve", **HEALTHY, NetworkingConfig={"EndpointsConfig": endpoints}))


def test_shared_volume_belongs_to_its_users() -> None:
    """A volume of one container is its own directory; a volume of two is shared."""
    mount: dict[str, Any] = {"HostConfig": {"Mounts": [{"Type": "volume", "Source": "p_data", "Target": "/data/"}]}}
    web, agent = made("web", "serve", **HEALTHY, **mount), made("agent", "sleep", "infinity", **mount)
    assert whole(web, agent).volumes == {"data": {"web": "/data", "main": "/data"}}
    assert whole(web, made("agent", "sleep", "infinity")).volumes == {}


def test_dependencies_are_those_among_services() -> None:
    web = made("web", "serve", depends="db:service_healthy:false,agent:service_started:false", **HEALTHY)
    db, agent = made("db", "store", **HEALTHY), made("agent", "sleep", "infinity", depends="web:service_healthy:false")
    assert whole(web, db, agent).services["web"].depends_on == ("db",)
    with pytest.raises(RefusalError, match="All services of a project keep running"):
        made("web", "serve", depends="migrate:service_completed_successfully:false", **HEALTHY)


def test_health_check_of_image_counts() -> None:
    web = made("web", "serve", config={"Healthcheck": {"Test": ["CMD-SHELL", "true"]}})
    assert web.service["healthcheck"] == ("CMD-SHELL", "true")
    with pytest.raises(RefusalError, match="Nothing says when service 'web' is ready"):
        made("web", "serve", config={"Healthcheck": {"Test": ["CMD", "true"]}}, Healthcheck={"Test": ["NONE"]})
