"""Compose files of tasks as specs: what is taken over, and what is refused because it would be another task."""

from typing import Any

import pytest
import yaml

from forkpoint.compose_errors import ComposeFileError
from forkpoint.compose_file import default_of, spec_of
from sandboxes.spec import EnvironmentSpec

FILE = """
services:
  main:
    build: .
    command: ["sh", "-c", "sleep infinity"]
    environment: [WHO=me]
    working_dir: /app
    volumes: [pages:/app/pages]
    depends_on: [web]
  web:
    image: nginx:1.27
    ports: ["8080:80"]
    restart: always
    environment: {MODE: "a$$b", SIZE: 3}
    volumes: ["pages:/html", "own:/var/cache"]
    depends_on: {db: {condition: service_healthy}, main: {condition: service_started}}
  db:
    image: postgres:16
    command: postgres -c unix_socket_directories=
    user: postgres
    healthcheck: {test: ["CMD-SHELL", "pg_isready -h $$HOST"], interval: 1s}
volumes: {pages: {}, own: {}}
"""


def test_compose_file_becomes_a_spec() -> None:
    spec = EnvironmentSpec.model_validate(spec_of(yaml.safe_load(FILE), "task:1"))
    assert (spec.driver, spec.image, spec.env, spec.workdir) == ("local", "task:1", {"WHO": "me"}, "/app")
    assert spec.volumes == {"pages": {"web": "/html", "main": "/app/pages"}}
    web, db = spec.services["web"], spec.services["db"]
    assert (web.port, web.depends_on, web.environment) == (80, ("db",), {"MODE": "a$b", "SIZE": "3"})
    assert (db.user, db.healthcheck, db.port) == ("postgres", ("CMD-SHELL", "pg_isready -h $HOST"), None)


def test_agents_service_has_any_name() -> None:
    """Other services may wait for it and share its volumes, as with `main`."""
    agent = {"image": "a", "x-default": True, "x-local": True, "volumes": ["v:/a"], "cpus": 1.0, "mem_limit": "1g"}
    file = {"services": {"side": {"image": "b", "depends_on": ["agent"], "volumes": ["v:/b"]}, "agent": agent}}
    spec = EnvironmentSpec.model_validate(spec_of(file, None, default_of(file)))
    assert (spec.image, list(spec.services), spec.services["side"].depends_on) == ("a", ["side"], ())
    assert spec.volumes == {"v": {"side": "/b", "main": "/a"}}


@pytest.mark.parametrize(
    ("services", "name"),
    [
        ({"a": {}, "default": {}, "b": {"x-default": True}}, "b"),
        ({"a": {}, "default": None}, "default"),
        ({"a": {}, "b": {"x-default": False}}, "a"),
    ],
)
def test_agents_service_is_the_one_of_inspect(services: dict[str, Any], name: str) -> None:
    assert default_of({"services": services}) == name


PUBLISHED = """
services:
  client:
    build: {dockerfile: Dockerfile}
    image: ${TASK_IMAGE}
    container_name: ${TASK_NAME}
    command: ["sh", "-c", "sleep infinity"]
    environment: ["TEST_DIR=${TESTS}", "MODE=${MODE:-fast}", "PRICE=$$5"]
    volumes: ["${LOGS_HERE}:${LOGS_THERE}", "./agent-logs:/agent-logs/"]
    ports: ["8080:80"]
    deploy: {resources: {limits: {cpus: "${CPUS:-1}", memory: 2G}}}
  db:
    image: postgres:${TAG-16}
    volumes: ["./db-logs:/logs"]
"""


def test_a_published_file_runs_as_it_is() -> None:
    """Directories for logs, published ports, variables of the harness, and limits, as in public sets of tasks."""
    spec = EnvironmentSpec.model_validate(
        spec_of(yaml.safe_load(PUBLISHED), "task:1", "client", variables={"TESTS": "/te$ts", "LOGS_THERE": "/logs"})
    )
    assert (spec.image, spec.env) == ("task:1", {"TEST_DIR": "/te$ts", "MODE": "fast", "PRICE": "$5"})
    assert spec.setup == ("mkdir -p -- /.services/db/logs /agent-logs /logs",)
    assert (spec.limits.cpus, spec.limits.memory_mb) == (1.0, 2048)
    assert spec.services["db"].image == "postgres:16"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a$A", "a1"), ("${A}b", "1b"), ("${NO-x}", "x"), ("${EMPTY-x}", ""), ("${EMPTY:-x}", "x"), ("${A:+y}", "y"),
        ("${NO+y}", ""), ("$$A", "$A"), ("${A:?must}", "1"),
    ],
)  # fmt: skip
def test_variables_have_the_values_of_compose(text: str, value: str) -> None:
    file = {"services": {"main": {"image": "i", "environment": {"X": text}}}}
    assert spec_of(file, None, variables={"A": "1", "EMPTY": ""})["env"] == {"X": value}


@pytest.mark.parametrize(
    "command",
    [
        "tail -f /dev/null",
        ["sh", "-c", "sleep infinity"],
        "/bin/bash",
        "sh",
        ["cat"],
        "sh -c 'trap : TERM; sleep infinity & wait'",
    ],
)
def test_command_that_keeps_running_is_left_out(command: Any) -> None:
    assert "command" not in spec_of({"services": {"main": {"image": "i", "command": command}}}, None)


def test_network_mode_none_of_one_service() -> None:
    """A sandbox has no network. A second service could not be reached by one without a network."""
    main = {"image": "i", "network_mode": "none"}
    assert spec_of({"services": {"main": main}}, None)["image"] == "i"
    with pytest.raises(ComposeFileError, match="network_mode"):
        spec_of({"services": {"main": main, "db": {"image": "i"}}}, None)


@pytest.mark.parametrize(
    ("main", "others", "why"),
    [
        ({"image": "i", "command": "python server.py"}, {}, "would not run"),
        ({"build": "."}, {}, "Build it"),
        ({"image": "i"}, {"main": {"image": "i"}}, "Rename it"),
    ],
)
def test_what_the_agents_service_cannot_be_is_refused(main: dict[str, Any], others: dict[str, Any], why: str) -> None:
    with pytest.raises(ComposeFileError, match=why):
        spec_of({"services": {"agent": main, **others}}, None, "agent")


@pytest.mark.parametrize(
    ("service", "why"),
    [
        ({"build": "."}, "names the image"),
        ({}, "names the image"),
        ({"image": "i", "privileged": True}, "has 'privileged'"),
        ({"image": "i", "network_mode": "none"}, "has 'network_mode'"),
        ({"image": "i", "volumes": ["./conf:/data:ro"]}, "no paths of the client's machine"),
        ({"image": "i", "volumes": ["/var/run/docker.sock:/x"]}, "of the system"),
        ({"image": "i", "volumes": ["/lib64:/x"]}, "of the system"),
        ({"image": "i", "volumes": ["/srv/../etc:/x"]}, "of the system"),
        ({"image": "i", "volumes": ["./l:${WHERE}"]}, r"variable \$\{WHERE\}"),
        ({"image": "i", "volumes": [{"type": "bind", "source": "/etc", "target": "/x"}]}, "of the system"),
        ({"image": "${IMAGE}"}, "uses the variable"),
        ({"image": "i", "environment": ["TOKEN=${TOKEN:?must be set}"]}, "requires the variable"),
        ({"image": "i", "env_file": "../secrets"}, "env_file"),
        ({"image": "i", "depends_on": {"m": {"condition": "service_completed_successfully"}}}, "keep running"),
    ],
)
def test_what_a_sandbox_cannot_be_is_refused(service: dict[str, Any], why: str) -> None:
    with pytest.raises(ComposeFileError, match=why):
        spec_of({"services": {"main": {"image": "task:1"}, "db": service}}, None)


@pytest.mark.parametrize(
    "file", [None, [], {}, {"services": []}, {"services": {"main": "x"}}, {"services": {"db": {"image": "i"}}}]
)
def test_malformed_file_is_refused(file: Any) -> None:
    """Also a file without an image of the main container, if the task names none."""
    with pytest.raises(ComposeFileError):
        spec_of(file, None)


@pytest.mark.parametrize("file", [None, [], {}, {"services": []}])
def test_file_without_services_has_no_service_for_the_agent(file: Any) -> None:
    with pytest.raises(ComposeFileError, match="no services"):
        default_of(file)
