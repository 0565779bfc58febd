"""Networks and volumes are names: they are created, listed by label, and removed unless they are in use."""

from collections.abc import Sequence
from typing import Any

import orjson
import pytest

from proxy.compat.docker.containers import Container
from proxy.compat.docker.networks import Names
from proxy.compat.docker.requests import container_spec, read
from proxy.refusals import RefusalError


def ask(
    names: Names, method: str, path: str, body: Any = None, filters: Any = None, containers: Sequence[Container] = ()
) -> Any:
    query = f"filters={orjson.dumps(filters).decode()}" if filters else ""
    answer = names.answer(read(method, path, query, orjson.dumps(body) if body else b""), containers)
    assert answer is not None
    return orjson.loads(answer.body) if answer.body else answer.status


def test_lists_are_filtered_by_label() -> None:
    names = Names()
    for kind in ("networks", "volumes"):
        for name in ("a", "b"):
            ask(names, "POST", f"/{kind}/create", {"Name": name, "Labels": {"p": name}})
    assert [network["Name"] for network in ask(names, "GET", "/networks", filters={"label": ["p=b"]})] == ["b"]
    assert [
        volume["Name"] for volume in ask(names, "GET", "/volumes", filters={"label": {"p=a": True}})["Volumes"]
    ] == ["a"]
    by_id = ask(names, "GET", f"/networks/{names.networks['a'].id[:12]}")
    assert by_id["Name"] == "a"


def test_network_in_use_stays() -> None:
    names = Names()
    ask(names, "POST", "/networks/create", {"Name": "net"})
    endpoints: dict[str, Any] = {"NetworkingConfig": {"EndpointsConfig": {"net": {}}}}
    container = Container("1" * 64, "box", "task", "", "", container_spec({"Image": "any", **endpoints}, {}), 0.0)
    with pytest.raises(RefusalError, match="active endpoints"):
        ask(names, "DELETE", "/networks/net", containers=[container])
    assert ask(names, "POST", "/networks/prune", containers=[container]) == {"NetworksDeleted": []}
    assert ask(names, "DELETE", "/networks/net") == 204


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/networks/create", {"Name": "n", "Driver": "host"}),
        ("/networks/create", {"Name": "n", "Driver": "overlay"}),
        ("/networks/create", {}),
        ("/volumes/create", {"Name": "v", "DriverOpts": {"type": "none", "o": "bind", "device": "/etc"}}),
        ("/volumes/create", {"Name": "v", "Driver": "nfs"}),
    ],
)
def test_drivers_are_refused(path: str, body: dict[str, Any]) -> None:
    with pytest.raises(RefusalError) as refused:
        ask(Names(), "POST", path, body)
    assert refused.value.status == 400


def test_names_are_unique_and_known() -> None:
    names = Names()
    ask(names, "POST", "/networks/create", {"Name": "n"})
    with pytest.raises(RefusalError, match="already exists"):
        ask(names, "POST", "/networks/create", {"Name": "n"})
    for path in ("/networks/other", "/volumes/other"):
        with pytest.raises(RefusalError) as missing:
            ask(names, "GET", path)
        assert missing.value.status == 404
