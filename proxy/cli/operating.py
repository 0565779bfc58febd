"""Commands that operate a running proxy: audits, trees as files, garbage collection."""

import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

from forkpoint.exchange import given
from proxy.cli import options
from proxy.cli.client import LONG_S, ControlClient, fail
from proxy.cli.output import print_json, show
from proxy.cli.progress import CHUNK, bytes_bar, download, progress_bar

_TIMES = ["%Y-%m-%d", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%d %H:%M:%S"]
_POLL_S = 0.5
"""Interval at which the progress of an audit is polled."""


def verify(
    proxy: ControlClient,
    task: options.OnlyTask = None,
    sample: Annotated[
        int, typer.Option(help="Number of recorded calls to check, drawn evenly.", min=1, max=1_000_000)
    ] = 100,
    everything: Annotated[bool, typer.Option("--all", help="Check all recorded calls.")] = False,
    node: Annotated[str | None, typer.Option(help="Check only the calls at this node and below.")] = None,
    root: options.RootOption = None,
    seed: Annotated[int | None, typer.Option(help="The same seed draws the same sample.", min=0)] = None,
    before: Annotated[
        datetime | None,
        typer.Option(formats=_TIMES, help="Check only calls that were recorded before this time, in UTC."),
    ] = None,
    json: options.JsonOption = False,
) -> None:
    """Run recorded calls again in fresh sandboxes and compare the results. Exits with 1 if a call differs."""
    tasks = [item["task"] for item in proxy.items("tasks")] if task is None else [task]
    if task is None and (node or root):
        fail("Name the task of this node.")
    until = None if before is None else before.replace(tzinfo=timezone.utc).isoformat()
    body = {"sample": None if everything else sample, "seed": seed, "before": until}
    if any([_differs(proxy, name, node, root, body, json=json) for name in tasks]):  # noqa: C419 - each is verified
        raise typer.Exit(1)


def _differs(
    proxy: ControlClient, task: str, node: str | None, root: str | None, body: dict[str, Any], *, json: bool
) -> bool:
    """Verify one task, show what came of it, and return whether a call differs."""
    from proxy.cli.rendering.views import render_audit

    which = given(root=node or root)
    # --root may be any node of the tree, but the audit is to cover the whole tree: ask for its root.
    top = node or (root and proxy.request("GET", "tasks", task, "audit", params=which)["root"])
    begun = proxy.request("POST", "tasks", task, "verify", json={**body, "node": top})
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
        TextColumn("{task.fields[differing]} differ"), TimeElapsedColumn(),
    )  # fmt: skip
    with progress_bar(*columns) as progress:
        bar = progress.add_task("verify", total=begun["of"], differing=0)
        last = begun
        while (view := proxy.request("GET", "tasks", task, "audit", params=which))["running"] is not None:
            last = view["running"]
            progress.update(bar, completed=last["checked"] + last["unreachable"], differing=last["differing"])
            time.sleep(_POLL_S)
        progress.update(bar, completed=begun["of"])
    show(view, render_audit, json=json)
    return bool(view["findings"])


def cluster(
    proxy: ControlClient,
    action: Annotated[
        Literal["status", "drain", "rebalance"],
        typer.Argument(help="Show the members, drain one, or move tasks from loaded members to others."),
    ] = "status",
    node: Annotated[str | None, typer.Argument(help="Name of the member to drain.", metavar="NODE")] = None,
    most: Annotated[int, typer.Option("--max", help="Most tasks that move at once.", min=1, max=100)] = 4,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show which tasks would move, and move none.")] = False,
    json: options.JsonOption = False,
) -> None:
    """Show the members of a cluster, let one hand over its tasks, or spread the tasks over all of them."""
    from proxy.cli.rendering.lists import render_members, render_moves

    if action == "status":
        show(proxy.request("GET", "cluster"), render_members, json=json)
        return
    if action == "rebalance":
        which = {"max": most, "dry_run": str(dry_run).lower()}
        answer = proxy.request("POST", "cluster", "rebalance", params=which, within_s=LONG_S)
        show(answer, render_moves, json=json)
        if not dry_run and not all(move["moved"] for move in answer["moves"]):
            raise typer.Exit(1)
        return
    if node is None:
        fail("Name the member to drain, as `forkpoint cluster` lists it.")
    answer = proxy.request("POST", "cluster", node, "drain", within_s=LONG_S)
    if json:
        print_json(answer)
    else:
        typer.echo(
            f"Tasks handed over: {answer['handed']}. Tasks kept: {answer['kept']}. {node} accepts no more tasks."
        )
    if answer["kept"]:
        raise typer.Exit(1)


def export_tree(
    proxy: ControlClient,
    task: options.TaskArgument,
    file: options.FileToWrite,
    *,
    root: options.RootOption = None,
    snapshots: options.SnapshotsOption = False,
    json: options.JsonOption = False,
) -> None:
    """Export a task's tree with its answers to a file, for another machine or run."""
    with proxy.stream("GET", "tasks", task, "export", params=given(snapshots=snapshots, root=root)) as response:
        size = download(response, file, "export")
    if json:
        print_json({"task": task, "file": str(file), "bytes": size}, beside=file)


def import_tree(
    proxy: ControlClient,
    file: Annotated[Path, typer.Argument(help="File that `export` wrote.", metavar="FILE", dir_okay=False)],
    task: options.TaskArgument,
    json: options.JsonOption = False,
) -> None:
    """Import a tree from a file into a task that has no tree yet. A damaged file changes nothing."""
    try:
        total = file.stat().st_size
        with file.open("rb") as source, bytes_bar("import", total) as advance:

            def chunks() -> Iterator[bytes]:
                while chunk := source.read(CHUNK):
                    yield chunk
                    advance(len(chunk))

            headers = {"content-type": "application/x-tar", "content-length": str(total)}
            view = proxy.request("POST", "tasks", task, "import", content=chunks(), headers=headers, within_s=LONG_S)
    except OSError as error:
        fail(f"{file} cannot be read: {error.strerror}. Choose another file.")
    show(view, _imported, json=json)


def _imported(view: dict[str, Any]) -> str:
    count, left_out = view["snapshots"], view["snapshots_left_out"]
    snapshots = f", {count:,} snapshots ({left_out:,} more were left out)" if count or left_out else ""
    tree = "" if view["current"] else f", as tree {view['root']} for rollouts that request its environment"
    return f"{view['nodes']:,} nodes and {view['records']:,} calls{snapshots}{tree}"


def image(
    proxy: ControlClient,
    task: options.TaskArgument,
    node: options.NodeArgument,
    name: Annotated[
        str | None, typer.Argument(help="Name of the image, such as repository:tag.", metavar="[NAME]")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write an archive; - is stdout.", show_default="the proxy's Docker daemon"),
    ] = None,
    json: options.JsonOption = False,
) -> None:
    """Make a container image of the files at a node, in the Docker daemon or in a file, as `docker commit` does."""
    path = ("tasks", task, "nodes", node, "image")
    if output is not None:
        with proxy.stream("GET", *path, params=given(name=name)) as response:
            size = download(response, output, "image")
        view = {"id": response.headers["x-forkpoint-image"], "name": name, "file": str(output), "bytes": size}
        if json:
            print_json(view, beside=output)
        return
    if name is None:
        raise typer.BadParameter("is needed without --output.", param_hint="NAME")
    view = proxy.request("POST", *path, json={"name": name}, within_s=LONG_S)
    show({**view, "file": None, "bytes": None}, lambda made: f"{made['name']} is {made['id']}", json=json)


def gc(proxy: ControlClient, json: options.JsonOption = False) -> None:
    """Collect garbage: snapshots over budget, forgotten nodes, unused sandboxes and answers."""
    view = proxy.request("POST", "gc", within_s=LONG_S)
    show(
        view,
        lambda freed: (
            f"{freed['evicted']} snapshots evicted, {freed['forgotten_nodes']} forgotten nodes deleted, "
            f"{freed['freed_bytes'] / 1e6:,.1f} MB freed; {freed['snapshot_bytes'] / 1e6:,.1f} MB of snapshots remain"
        ),
        json=json,
    )
