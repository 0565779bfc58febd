"""Commands that start and end the proxies of several machines: `forkpoint up` and `forkpoint down`."""

from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from proxy.cli.client import fail
from proxy.cli.options import JsonOption
from proxy.cli.output import show

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

RayOption = Annotated[
    bool,
    typer.Option("--ray", help="On all nodes of a Ray cluster, which starts and watches the proxies (docs/ray.md)."),
]
AddressOption = Annotated[
    str, typer.Option(help="Address of the Ray cluster.", show_default="RAY_ADDRESS, else the cluster of this machine")
]


def up(*, ray: RayOption = False, address: AddressOption = "auto", json: JsonOption = False) -> None:
    """Run a proxy on each node of a Ray cluster. Settings come from FORKPOINT_… variables, as those of `serve`."""
    from proxy.cli.rendering.lists import render_nodes

    with _ray_cluster(address, chosen=ray) as cluster:
        proxies = cluster.up()
    show([asdict(proxy) for proxy in proxies], render_nodes, json=json)


def down(*, ray: RayOption = False, address: AddressOption = "auto") -> None:
    """End the proxies that `forkpoint up` started. Calls in flight are answered first."""
    with _ray_cluster(address, chosen=ray) as cluster:
        cluster.down()


@contextmanager
def _ray_cluster(address: str, *, chosen: bool) -> "Iterator[ModuleType]":
    """Yield `forkpoint.ray`, connected to a Ray cluster. Its errors end the command."""
    if not chosen:
        fail("Name what runs the proxies: --ray. Elsewhere start each with `forkpoint serve` (docs/cluster.md).")
    try:
        from forkpoint import ray
    except ImportError as error:
        fail(str(error))
    try:
        with ray.connected(address):
            yield ray
    except ray.RayError as error:
        fail(str(error))
