"""Commands that write recorded rollouts for other programs and for people: training data."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from proxy.cli.client import ControlClient, fail, given
from proxy.cli.completion import complete_task
from proxy.transfer.trajectory_files import Format, TrajectoryFileError, write

_CHUNK = 1 << 20
"""Bytes that are moved at a time."""


def trajectories(
    proxy: ControlClient,
    file: Annotated[Path, typer.Argument(help="File to write, or directory for 'hf'; - is stdout.", metavar="FILE")],
    task: Annotated[
        str | None,
        typer.Argument(help="Only this task.", metavar="TASK", show_default="all tasks", autocompletion=complete_task),
    ] = None,
    *,
    format: Annotated[  # noqa: A002 - the option's name
        Format | None, typer.Option(help="Format of the file.", show_default="by the name of the file")
    ] = None,
    label: Annotated[
        list[str] | None, typer.Option(help="Only rollouts with this label, such as run=r7. Repeatable.")
    ] = None,
    rollout: Annotated[str | None, typer.Option(help="Only rollouts of this name; needs TASK.")] = None,
    answer_bytes: Annotated[
        int | None, typer.Option(help="Longest answer in bytes; longer ones are cut.", min=0, show_default="1048576")
    ] = None,
) -> None:
    """Write rollouts as training data: messages with tool calls, answers, timings, labels and rewards."""
    if rollout is not None and task is None:
        raise typer.BadParameter("needs TASK.", param_hint="--rollout")
    path = ["trajectories"] if task is None else ["tasks", task, "trajectories"]
    query = {**given(rollout=rollout, answer_bytes=answer_bytes), "label": label or []}
    try:
        with proxy.stream("GET", *path, params=query) as response:
            chunks = _shown(response.iter_bytes(_CHUNK))
            if str(file) != "-":
                write(chunks, file, format)
                return
            if format not in (None, "jsonl"):
                raise typer.BadParameter("stdout takes jsonl only.", param_hint="--format")
            for chunk in chunks:
                typer.get_binary_stream("stdout").write(chunk)
    except BrokenPipeError:
        # The reader of stdout has ended, as `head` does. Typer then ends the command without a word.
        raise
    except TrajectoryFileError as error:
        fail(str(error))
    except OSError as error:
        fail(f"{file} cannot be written: {error}. Choose another file.")


def _shown(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield chunks, and show on stderr how many bytes have arrived."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("trajectories", total=None)
        for chunk in chunks:
            yield chunk
            progress.update(bar, advance=len(chunk))
