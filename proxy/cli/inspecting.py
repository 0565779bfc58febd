"""Commands that show one thing of a running proxy: a tree, a rollout, a node, a difference, its activity."""

import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType

from forkpoint.exchange import PAGE, given
from proxy.cli.client import LONG_S, ControlClient
from proxy.cli.options import JsonOption, LabelOption, NodeArgument, RolloutArgument, RootOption, TaskArgument
from proxy.cli.output import output_console, print_json, show
from proxy.cli.progress import download


def tree(
    proxy: ControlClient,
    task: TaskArgument,
    node: Annotated[str | None, typer.Option(help="Show only the subtree of this node.")] = None,
    root: RootOption = None,
    depth: Annotated[int | None, typer.Option(help="Number of levels to show.", min=1)] = None,
    own: Annotated[bool, typer.Option("--own", help="Only what this task did, in a tree that tasks share.")] = False,
    json: JsonOption = False,
) -> None:
    """Show a task's tree: its calls with their effects, seconds and hits, and the positions of rollouts."""
    from proxy.cli.rendering.tree import TREES_SHOWN, render_tree

    view = proxy.request("GET", "tasks", task, "tree", params=given(node=node, root=root, depth=depth, own=own or None))
    # Two more than are listed: the tree that is shown, and one that tells whether there are more.
    trees = [] if json else proxy.items("tasks", task, "trees", most=TREES_SHOWN + 2)
    show(view, partial(render_tree, trees=trees), json=json)


def rollout(proxy: ControlClient, task: TaskArgument, name: RolloutArgument, json: JsonOption = False) -> None:
    """Show a rollout: its calls in order, how each was answered, and the time that it took or saved."""
    from proxy.cli.rendering.views import render_rollout

    path, view = ("tasks", task, "rollouts", name), dict[str, Any]()
    steps: list[Any] = []
    cursor: str | None = None
    while not view or cursor is not None:
        view = proxy.request("GET", *path, params=given(limit=PAGE, cursor=cursor))
        steps += view["steps"]["items"]
        cursor = view["steps"]["next"]
    view["steps"] |= {"items": steps}
    show(view, render_rollout, json=json)


def why(
    proxy: ControlClient,
    task: TaskArgument,
    name: RolloutArgument,
    call: Annotated[
        str | None, typer.Argument(help="The call's number, from 1, or a part of its text.", show_default="all misses")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Show why calls of a rollout were no hits, and what helps."""
    from proxy.cli.rendering.reasons import render_reasons

    path = ("tasks", task, "rollouts", name, "why")
    if call is not None and call.isdecimal():
        items = proxy.request("GET", *path, params={"turn": int(call) - 1})["items"] if int(call) else []
    else:
        items = [item for item in proxy.items(*path) if call is None or call in (item["title"] or "")]
    if call is not None and not items:
        raise typer.BadParameter(f"rollout {name} has no call {call}. `forkpoint rollout {task} {name}` lists them.")
    show(items, partial(render_reasons, task=task, every=call is not None), json=json)


def compare(
    proxy: ControlClient,
    task: TaskArgument,
    label: LabelOption = None,
    above: Annotated[
        float | None, typer.Option(help="Rewards above this are high.", show_default="the middle of all rewards")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Compare rollouts by state: where they part and end alike, and what only those with a high reward did."""
    from proxy.cli.rendering.views import render_comparison

    query = {**given(above=above), "label": label or []}
    show(proxy.request("GET", "tasks", task, "compare", params=query, within_s=LONG_S), render_comparison, json=json)


def node(proxy: ControlClient, task: TaskArgument, name: NodeArgument, json: JsonOption = False) -> None:
    """Show a node: its call and answer, what changed, past rollouts, and why it has a snapshot or not."""
    from proxy.cli.rendering.views import render_node

    show(proxy.request("GET", "tasks", task, "nodes", name), render_node, json=json)


def files(
    proxy: ControlClient,
    task: TaskArgument,
    node: NodeArgument,
    path: Annotated[str, typer.Argument(help="Path from the root.", metavar="[PATH]")] = "",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the file's bytes here.", show_default="stdout")
    ] = None,
    json: JsonOption = False,
) -> None:
    """List a directory of a node, or print a file of it. Both are read from its snapshot, without a sandbox."""
    from proxy.cli.rendering.lists import render_folder

    parts = [part for part in path.split("/") if part]
    with proxy.stream("GET", "tasks", task, "nodes", node, "files", *(parts or [""])) as response:
        if response.headers["content-type"] == "application/json":
            response.read()
            view = response.json()
        else:
            to = output or Path("-")
            size = download(response, to, "file")
            if json and output is not None:
                print_json({"node": node, "path": "/" + "/".join(parts), "bytes": size}, beside=output)
            return
    show(view, render_folder, json=json)


def diff(proxy: ControlClient, task: TaskArgument, a: NodeArgument, b: NodeArgument, json: JsonOption = False) -> None:
    """Show what changed between two nodes: files, shell sessions and databases."""
    from proxy.cli.rendering.views import render_diff

    view = proxy.request("GET", "tasks", task, "nodes", a, "diff", b, within_s=LONG_S)
    show(view, render_diff, json=json)


def top(
    proxy: ControlClient,
    every_s: Annotated[float, typer.Option("--every", help="Seconds between two updates.", min=0.2)] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one update and exit.")] = False,
    json: JsonOption = False,
) -> None:
    """Show the proxy's activity live, until Ctrl-C. With --json, each line is one update."""
    from rich.live import Live

    from proxy.cli.rendering.views import render_top

    def read() -> dict[str, Any]:
        line = proxy.request("GET", "timeline", params=given(span_s=60, step_s=1))
        return {
            "stats": proxy.request("GET", "stats"),
            "tasks": proxy.items("tasks", sort="-used_at", most=PAGE),
            "seconds": line["seconds"],
        }

    def rendered(view: dict[str, Any]) -> RenderableType:
        return render_top(view["stats"], view["tasks"], view["seconds"])

    try:
        if json:
            while True:
                print_json(read(), one_line=True)
                if once:
                    return
                time.sleep(every_s)
        console = output_console()
        if once or not console.is_terminal:
            console.print(rendered(read()))
            return
        with Live(rendered(read()), console=console, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(every_s)
                live.update(rendered(read()), refresh=True)
    except KeyboardInterrupt:
        return
