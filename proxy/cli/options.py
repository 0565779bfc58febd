"""Options and arguments that several commands share, and how a command finds its proxy."""

import inspect
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from proxy.cli.client import ControlClient, fail, proxy_url
from proxy.cli.completion import complete_node, complete_rollout, complete_task

UrlOption = Annotated[
    str | None,
    typer.Option(
        "--url", envvar="FORKPOINT_URL", help="Base URL of a running proxy.",
        show_default="the proxy of --data, else port 8700",
    ),
]  # fmt: skip
DataOption = Annotated[
    Path | None,
    typer.Option("--data", envvar="FORKPOINT_DATA", help="Data directory of a running proxy.", show_default=False),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
TaskArgument = Annotated[str, typer.Argument(help="Name of the task.", metavar="TASK", autocompletion=complete_task)]
RolloutArgument = Annotated[
    str, typer.Argument(help="Name of the rollout.", metavar="ROLLOUT", autocompletion=complete_rollout)
]
NodeArgument = Annotated[
    str, typer.Argument(help="Name of a node, such as n12.", metavar="NODE", autocompletion=complete_node)
]
RootOption = Annotated[
    str | None,
    typer.Option("--root", help="Select a tree of the task by its root or any of its nodes.", show_default="current"),
]

LabelOption = Annotated[
    list[str] | None, typer.Option("--label", help="Only rollouts with this label, such as run=r7. Repeatable.")
]
FileToWrite = Annotated[Path, typer.Argument(help="File to write; - is stdout.", metavar="FILE")]
SnapshotsOption = Annotated[
    bool, typer.Option("--snapshots", help="Include snapshots, except those of live processes.")
]


def with_proxy(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options `--url` and `--data`, and a `ControlClient` as its parameter `proxy`."""

    @wraps(command)
    def run(*, url: str | None, data: Path | None, **arguments: Any) -> None:
        address = proxy_url(url, data)
        if address is None:
            fail(f"No proxy serves {data}. Start one with `forkpoint serve --data {data}`, or name one with --url.")
        command(proxy=ControlClient(address), **arguments)

    hints = get_type_hints(command, include_extras=True)
    signature = inspect.signature(command)
    kept = [
        parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in signature.parameters.items()
        if name != "proxy"
    ]
    options = {"url": UrlOption, "data": DataOption}
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in options.items()
    ]
    # Typer reads the options of a command from its signature.
    run.__signature__ = signature.replace(parameters=[*kept, *added])  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in (*kept, *added)}
    return run
