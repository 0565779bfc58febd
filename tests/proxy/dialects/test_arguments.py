"""What a built-in tool takes is declared once."""

from collections.abc import Iterator
from typing import Any

import orjson
import pytest
from pydantic.fields import FieldInfo

from proxy.control.dataplane_openapi import data_plane_paths
from proxy.dialects import builtin_tools, sql
from proxy.dialects.arguments import can_run, schema_of
from proxy.dialects.builtin_tools import ARGUMENTS, TOOLS
from proxy.refusals import RefusalError
from sandboxes.spec import EnvironmentSpec

SPEC = EnvironmentSpec.model_validate({
    "driver": "sqlite", "databases": {"shop": {"source": "/shop.db"}},
})  # fmt: skip
VIDEO = EnvironmentSpec.model_validate({"driver": "video", "video": {"source": "/v"}})
BY_NAME = {tool.name: tool for tool in TOOLS}
NAMES = [(endpoint, name) for endpoint, tools in ARGUMENTS.items() for name in tools if name in BY_NAME]
NEEDED: dict[str, dict[str, Any]] = {
    "exec": {"command": "ls"}, "load_video": {"name": "v"}, "get_frame": {"t": 1.0},
    "caption_retrieval": {"start": 0, "end": 1}, "segment_localization": {"description": "d"},
    "visual_question_answering": {"question": "q", "segment": 1}, "object_memory_querying": {"question": "q"},
    "query": {"sql": "SELECT 1"}, "script": {"sql": "SELECT 1"}, "explain": {"sql": "SELECT 1"},
    "compare": {"sql": "SELECT 1", "gold": "SELECT 1"},
}  # fmt: skip


@pytest.fixture(params=NAMES, ids="-".join)
def extended(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    """A tool whose arguments have one more option, added where they are declared."""
    kind = ARGUMENTS[request.param[0]][request.param[1]]
    kind.__pydantic_fields__["shade"] = FieldInfo.from_annotated_attribute(str, "dark")
    kind.model_rebuild(force=True)
    schema_of.cache_clear()
    yield request.param
    del kind.__pydantic_fields__["shade"]
    kind.model_rebuild(force=True)
    schema_of.cache_clear()


def call(endpoint: str, name: str, **more: Any) -> Any:
    spec = {"sql": SPEC, "video": VIDEO}.get(endpoint, EnvironmentSpec())
    return BY_NAME[name].call({**NEEDED.get(name, {}), **more}, spec)


def test_an_option_is_declared_once(extended: tuple[str, str]) -> None:
    """It is known to requests, to bundles, to OpenAPI's text and to the MCP schema."""
    endpoint, name = extended
    made = call(endpoint, name, shade="blue")
    assert made.arguments["shade"] == "blue"
    with pytest.raises(RefusalError, match="shade"):
        call(endpoint, name, shade=5)
    kind = ARGUMENTS[endpoint][name]
    assert can_run(kind, made.arguments)
    assert not can_run(kind, {**made.arguments, "shade": 5})
    body = data_plane_paths()[f"/e/{endpoint}/{name}"]["post"]["requestBody"]["content"]["application/json"]
    for schema in (body["schema"], BY_NAME[name].listed()["inputSchema"]):
        assert schema["properties"]["shade"]["default"] == "dark"


@pytest.mark.parametrize(("endpoint", "name"), NAMES)
def test_another_option_is_refused(endpoint: str, name: str) -> None:
    call(endpoint, name)
    with pytest.raises(RefusalError, match="shade"):
        call(endpoint, name, shade="blue")


def test_defaults_are_what_a_call_without_them_has() -> None:
    assert builtin_tools.defaults_of("shell", "exec", EnvironmentSpec()) == {"session": "main", "timeout_s": 120.0}
    assert builtin_tools.defaults_of("sql", "tables", SPEC) == {"database": "shop", "timeout_s": 5.0}
    assert builtin_tools.defaults_of("shell", "put", EnvironmentSpec()) == {}


@pytest.mark.parametrize(
    "body", [b'{"timeout_s": true}', b'{"timeout_s": 0}', b'{"session": "a\\n"}', b'{"user": "u"}']
)
def test_values_are_checked(body: bytes) -> None:
    with pytest.raises(RefusalError):
        BY_NAME["exec"].call({"command": "ls", **orjson.loads(body)}, EnvironmentSpec())


def test_a_statement_is_as_the_endpoint_takes_it() -> None:
    assert sql.parse("POST", "tables", "", b"{}", SPEC) == call("sql", "tables")
