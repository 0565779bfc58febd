"""Commands that look at a running proxy and steer it: each also as JSON."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer
from rich.console import Console, RenderableType
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from proxy.cli.client import LONG_S, ControlClient, fail, given

DEFAULT_URL = "http://127.0.0.1:8700"
_LOOK_S = 0.5
_CHUNK = 1 << 20

UrlOption = Annotated[str, typer.Option(envvar="FORKPOINT_URL", help="Base URL of a running proxy.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the proxy's own JSON.")]
TaskArgument = Annotated[str, typer.Argument(help="The task's name.")]
RootOption = Annotated[
    str | None,
    typer.Option("--root", help="Which tree of the task: its root, or any node of it.", show_default="current"),
]
NodeArgument = Annotated[str, typer.Argument(help="A node, as n12.")]


def add_commands(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (rollout, node, diff, verify, top, gc):
        app.command()(command)
    app.command("export")(export_tree)
    app.command("import")(import_tree)


def show(view: Any, render: Callable[[Any], RenderableType], *, json: bool) -> None:
    """Print an answer of the proxy, for a person or as it is."""
    if json:
        typer.echo(orjson.dumps(view, option=orjson.OPT_INDENT_2))
    else:
        Console().print(render(view))


def rollout(
    task: TaskArgument,
    name: Annotated[str, typer.Argument(help="The rollout's name.", metavar="ROLLOUT")],
    url: UrlOption = DEFAULT_URL,
    json: JsonOption = False,
) -> None:
    """Show a rollout: its calls in order, how each was answered, and what it took or spared."""
    from proxy.cli.render import render_rollout

    wire = ControlClient(url)
    view = wire.ask("GET", "tasks", task, "rollouts", name, params={"limit": 10_000})
    show(view, render_rollout, json=json)


def node(task: TaskArgument, name: NodeArgument, url: UrlOption = DEFAULT_URL, json: JsonOption = False) -> None:
    """Show a node: its call and answer, what it changed, who passed, and why its state is kept or not."""
    from proxy.cli.render import render_node

    show(ControlClient(url).ask("GET", "tasks", task, "nodes", name), render_node, json=json)


def diff(
    task: TaskArgument, a: NodeArgument, b: NodeArgument, url: UrlOption = DEFAULT_URL, json: JsonOption = False
) -> None:
    """Show what changed from one node to another: files, shell sessions, databases."""
    from proxy.cli.render import render_diff

    view = ControlClient(url).ask("GET", "tasks", task, "nodes", a, "diff", b, within_s=LONG_S)
    show(view, render_diff, json=json)


def verify(
    task: TaskArgument,
    url: UrlOption = DEFAULT_URL,
    sample: Annotated[int, typer.Option(help="So many recorded calls, drawn evenly.", min=1, max=1_000_000)] = 100,
    everything: Annotated[bool, typer.Option("--all", help="All recorded calls.")] = False,
    node: Annotated[str | None, typer.Option(help="Only what is recorded at this node and below.")] = None,
    root: RootOption = None,
    seed: Annotated[int | None, typer.Option(help="Draw the same sample again.", min=0)] = None,
    json: JsonOption = False,
) -> None:
    """Run recorded calls again in fresh sandboxes, and compare. Ends with 1 if any of them differs."""
    from proxy.cli.render import render_audit

    wire = ControlClient(url)
    which = given(root=node or root)
    # A tree is named by any of its nodes, but all of it lies below its root.
    below = node or (root and wire.ask("GET", "tasks", task, "audit", params=which)["root"])
    asked = {"sample": None if everything else sample, "node": below, "seed": seed}
    begun = wire.ask("POST", "tasks", task, "verify", json=asked)
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
        TextColumn("{task.fields[differing]} differ"), TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("verify", total=begun["of"], differing=0)
        last = begun
        while (view := wire.ask("GET", "tasks", task, "audit", params=which))["running"] is not None:
            last = view["running"]
            progress.update(bar, completed=last["checked"] + last["unreachable"], differing=last["differing"])
            time.sleep(_LOOK_S)
        progress.update(bar, completed=begun["of"])
    show(view, render_audit, json=json)
    if view["findings"]:
        raise typer.Exit(1)


def export_tree(
    task: TaskArgument,
    file: Annotated[Path, typer.Argument(help="Where to write it; - is stdout.", metavar="FILE")],
    *,
    root: RootOption = None,
    snapshots: Annotated[
        bool, typer.Option("--snapshots", help="With its kept states, but for live processes.")
    ] = False,
    url: UrlOption = DEFAULT_URL,
    json: JsonOption = False,
) -> None:
    """Write a task's tree with its answers to one file, for another machine or run."""
    wire, size = ControlClient(url), 0
    draft = file.with_name(f"{file.name}.part")
    try:
        answering = wire.stream("GET", "tasks", task, "export", params=given(snapshots=snapshots, root=root))
        with answering as answer, _writing(file, draft) as write, _bytes_bar("export", None) as advance:
            for chunk in answer.iter_bytes(_CHUNK):
                write(chunk)
                size += len(chunk)
                advance(len(chunk))
        if str(file) != "-":
            draft.rename(file)
    except OSError as error:
        fail(f"{file} cannot be written: {error}")
    finally:
        if str(file) != "-":
            draft.unlink(missing_ok=True)
    if json:
        typer.echo(orjson.dumps({"task": task, "file": str(file), "bytes": size}), err=str(file) == "-")


def import_tree(
    file: Annotated[Path, typer.Argument(help="A file that `export` wrote.", metavar="FILE", dir_okay=False)],
    task: TaskArgument,
    url: UrlOption = DEFAULT_URL,
    json: JsonOption = False,
) -> None:
    """Read a tree from a file as that of a task which has none yet. A file that is damaged changes nothing."""
    wire = ControlClient(url)
    try:
        total = file.stat().st_size
        with file.open("rb") as reading, _bytes_bar("import", total) as advance:

            def chunks() -> Iterator[bytes]:
                while chunk := reading.read(_CHUNK):
                    yield chunk
                    advance(len(chunk))

            headers = {"content-type": "application/x-tar", "content-length": str(total)}
            view = wire.ask("POST", "tasks", task, "import", content=chunks(), headers=headers, within_s=LONG_S)
    except OSError as error:
        fail(f"{file} cannot be read: {error}")
    show(view, _imported, json=json)


def _imported(told: dict[str, Any]) -> str:
    states, left_out = told["snapshots"], told["snapshots_left_out"]
    kept = f", {states:,} kept states ({left_out:,} more were left out)" if states or left_out else ""
    where = "" if told["current"] else f", as {told['root']}: the tree of rollouts that ask for its environment"
    return f"{told['nodes']:,} nodes and {told['records']:,} calls{kept}{where}"


def gc(url: UrlOption = DEFAULT_URL, json: JsonOption = False) -> None:
    """Free what nothing needs: states over their budgets, forgotten ones, answers that no call has."""
    view = ControlClient(url).ask("POST", "gc", within_s=LONG_S)
    show(
        view,
        lambda told: (
            f"{told['evicted']} snapshots evicted, {told['forgotten_nodes']} forgotten nodes swept, "
            f"{told['freed_bytes'] / 1e6:,.1f} MB freed; {told['snapshot_bytes'] / 1e6:,.1f} MB are kept"
        ),
        json=json,
    )


def top(
    url: UrlOption = DEFAULT_URL,
    every_s: Annotated[float, typer.Option("--every", help="Seconds between two looks.", min=0.2)] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once.")] = False,
    json: JsonOption = False,
) -> None:
    """Show what the proxy is doing: live, until Ctrl-C. With --json, one look a line."""
    from rich.live import Live

    from proxy.cli.render import render_top

    wire = ControlClient(url)

    def look() -> dict[str, Any]:
        line = wire.ask("GET", "timeline", params=given(span_s=60, step_s=1))
        return {"stats": wire.ask("GET", "stats"), "tasks": wire.ask("GET", "tasks"), "seconds": line["seconds"]}

    def rendered(told: dict[str, Any]) -> RenderableType:
        return render_top(told["stats"], told["tasks"], told["seconds"])

    try:
        if json:
            while True:
                typer.echo(orjson.dumps(look()))
                if once:
                    return
                time.sleep(every_s)
        console = Console()
        if once or not console.is_terminal:
            console.print(rendered(look()))
            return
        with Live(rendered(look()), console=console, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(every_s)
                live.update(rendered(look()), refresh=True)
    except KeyboardInterrupt:
        return


@contextmanager
def _writing(file: Path, draft: Path) -> Iterator[Callable[[bytes], object]]:
    """Give what takes bytes for a file, or for stdout."""
    if str(file) == "-":
        yield typer.get_binary_stream("stdout").write
        return
    with draft.open("wb") as writing:
        yield writing.write


@contextmanager
def _bytes_bar(title: str, total: int | None) -> Iterator[Callable[[int], None]]:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task(title, total=total)

        def advance(count: int) -> None:
            progress.update(bar, advance=count)

        yield advance
