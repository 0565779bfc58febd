"""Commands that start what a proxy needs beside it, or the proxies of several machines."""

import os
import sys
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from proxy.cli.client import fail
from proxy.cli.options import JsonOption
from proxy.cli.output import show

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

SOCKET = Path("/run/forkpoint/launcher")
"""Where a unit's `RuntimeDirectory=forkpoint` is. Root alone may write there."""
RayOption = Annotated[
    bool,
    typer.Option("--ray", help="On all nodes of a Ray cluster, which starts and watches the proxies (docs/ray.md)."),
]
AddressOption = Annotated[
    str, typer.Option(help="Address of the Ray cluster.", show_default="RAY_ADDRESS, else the cluster of this machine")
]


def launcher(
    user: Annotated[str, typer.Option(help="User of the proxy, who alone may ask for sandboxes.")],
    data: Annotated[Path, typer.Option(help="Data directory of the proxy. It is made for the user.")],
    socket: Annotated[Path, typer.Option(help="Socket that the proxy finds as FORKPOINT_LAUNCHER.")] = SOCKET,
    command: Annotated[
        list[str] | None, typer.Argument(help="Forkpoint's command to run beside it as the user, such as serve.")
    ] = None,
) -> None:
    """Make sandboxes as root for a proxy that is not root (docs/deploying.md)."""
    import pwd

    from sandboxes.rights import launcher_service as service

    try:
        service.require_root()
        entry = pwd.getpwnam(user)
        service.make_directory(data, entry.pw_uid, entry.pw_gid)
        folder, listening = os.path.realpath(data), service.listen(socket, entry.pw_uid)
    except (KeyError, OSError) as error:
        fail(f"The launcher cannot start: {error}")
    service.tell_ready()
    if command is None:
        service.serve(listening, entry.pw_uid, folder)
    program = [sys.executable, "-m", "forkpoint", *command]
    service.run_beside(program, entry.pw_uid, entry.pw_gid, listening, folder)


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
