"""Commands that write recorded rollouts for other programs and for people: training data and pages."""

from collections import deque
from collections.abc import Iterator
from json import loads
from pathlib import Path
from typing import Annotated

import httpx
import typer

from forkpoint.exchange import given
from forkpoint.trajectory_files import Format, TrajectoryFileError, lines, write
from proxy.cli.client import ControlClient, fail
from proxy.cli.options import JsonOption, LabelOption, OnlyTask, TaskArgument, complete_rollout
from proxy.cli.output import print_json
from proxy.cli.progress import CHUNK, items_bar, total_of


def trajectories(
    proxy: ControlClient,
    file: Annotated[Path, typer.Argument(help="File to write, or directory for 'hf'; - is stdout.", metavar="FILE")],
    task: OnlyTask = None,
    *,
    format: Annotated[  # noqa: A002 - the option's name
        Format | None, typer.Option(help="Format of the file.", show_default="by the name of the file")
    ] = None,
    label: LabelOption = None,
    rollout: Annotated[str | None, typer.Option(help="Only rollouts of this name; needs TASK.")] = None,
    turns: Annotated[
        bool, typer.Option("--turns", help="A line for each turn of agents inside their sandbox; needs TASK.")
    ] = False,
    answer_bytes: Annotated[
        int | None, typer.Option(help="Longest answer in bytes; longer ones are cut.", min=0, show_default="1048576")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Write rollouts as training data: messages with tool calls, answers, timings, labels and rewards."""
    if (rollout is not None or turns) and task is None:
        raise typer.BadParameter("needs TASK.", param_hint="--turns" if turns else "--rollout")
    if str(file) == "-" and format not in (None, "jsonl"):
        raise typer.BadParameter("stdout takes jsonl only.", param_hint="--format")
    path = ["trajectories"] if task is None else ["tasks", task, "trajectories"]
    query = {**given(rollout=rollout, answer_bytes=answer_bytes, turns=turns or None), "label": label or []}
    try:
        with proxy.stream("GET", *path, params=query) as response:
            rollouts = _Rollouts(response)
            if str(file) != "-":
                write(rollouts.chunks(), file, format, turns=turns)
            else:
                for chunk in rollouts.chunks():
                    typer.get_binary_stream("stdout").write(chunk)
    except BrokenPipeError:
        # The reader of stdout has ended, as `head` does. Typer then ends the command without a word.
        raise
    except TrajectoryFileError as error:
        fail(str(error))
    except OSError as error:
        fail(f"{file} cannot be written: {error}. Choose another file.")
    if json:
        print_json({"file": str(file), "turns" if turns else "rollouts": rollouts.count}, beside=file)


def html(
    proxy: ControlClient,
    task: TaskArgument,
    file: Annotated[Path, typer.Argument(help="HTML file to write.", metavar="FILE")],
    *,
    rollout: Annotated[
        str | None,
        typer.Option(help="Show this rollout, call by call.", show_default="the tree", autocompletion=complete_rollout),
    ] = None,
    label: LabelOption = None,
    limit: Annotated[int, typer.Option(help="Most recorded calls on the page of a tree.", min=1)] = 5000,
    answer_bytes: Annotated[int, typer.Option(help="Longest answer in bytes; longer ones are cut.", min=0)] = 65536,
    json: JsonOption = False,
) -> None:
    """Write a rollout or a tree as one HTML file without scripts, to read it elsewhere or to send it to others."""
    from proxy.cli.rendering.replay_page import rollout_page, tree_page

    query = {**given(rollout=rollout, answer_bytes=answer_bytes), "label": label or []}
    draft = file.with_name(f"{file.name}.part")
    try:
        with (
            proxy.stream("GET", "tasks", task, "trajectories", params=query) as response,
            draft.open("w", encoding="utf-8") as output,
        ):
            rollouts = _Rollouts(response)
            rows = map(loads, lines(rollouts.chunks()))
            if rollout is None:
                output.writelines(tree_page(task, rows, limit=limit))
            else:
                # The newest of this name is the last one.
                newest = next(iter(deque(rows, maxlen=1)), None)
                if newest is None:
                    fail(f"No rollout {rollout!r} of task {task!r} has made a call. `forkpoint rollouts` lists them.")
                output.writelines(rollout_page(newest))
        draft.rename(file)
    except OSError as error:
        fail(f"{file} cannot be written: {error}. Choose another file.")
    finally:
        draft.unlink(missing_ok=True)
    if json:
        print_json({"file": str(file), "rollouts": rollouts.count})


class _Rollouts:
    """The rollouts of a response, shown on a terminal as they arrive. `count` are the lines so far: one for each."""

    def __init__(self, response: httpx.Response) -> None:
        self._response = response
        self.count = 0

    def chunks(self) -> Iterator[bytes]:
        with items_bar("rollouts", total_of(self._response)) as advance:
            for chunk in self._response.iter_bytes(CHUNK):
                yield chunk
                arrived = chunk.count(b"\n")
                self.count += arrived
                advance(arrived)
