"""Trajectories: rollouts as training data, as the proxy streams them."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from forkpoint.exchange import given, path_of
from forkpoint.notebook import Shown
from forkpoint.operations import Labels, label_pairs
from forkpoint.results import made_of

# ruff: noqa: PLC0415 - a client that reads no trajectories loads nothing of the proxy

Format = Literal["jsonl", "parquet", "hf"]
"""The formats of files: JSON Lines, Parquet, and a directory that Hugging Face's `datasets` loads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory(Shown):
    """A rollout as training data.

    Attributes:
        task: Name of its task.
        rollout: Its name.
        id: Number of the rollout, unique in the proxy.
        labels: Its labels.
        reward: The label `reward` as a number; None without one.
        finished: Whether it has ended.
        complete: Whether `messages` has every call; false if records were forgotten or damaged since.
        created_at: When it began, in seconds since 1970.
        used_at: When it made its last call, in seconds since 1970.
        start: The node that it began at.
        node: The node that it is at.
        messages: Two chat messages for each call: an assistant's with the tool call, and a tool's with the answer.
        calls: How each call was answered, in order, as JSON objects.
        marks: How many calls have each mark, such as `timeout`, `broken` or `machine`.
        totals: Numbers of calls by outcome, and seconds executed, saved, restored, replayed and waited.
    """

    task: str
    rollout: str
    id: int
    labels: Mapping[str, str | int | float]
    reward: float | None
    finished: bool
    complete: bool
    created_at: float
    used_at: float
    start: str
    node: str
    messages: list[Mapping[str, Any]]
    calls: list[Mapping[str, Any]]
    totals: Mapping[str, float]
    marks: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTurn(Shown):
    """A response of the model of an agent inside its sandbox: a node of a tree for training.

    Attributes:
        task: Name of the task.
        rollout: Name of the rollout.
        turn: How many responses came before in the rollout.
        node: The node of the state that the response led to.
        parent: The node before.
        prompt: Body of the request that it answers; None if it is not known.
        response: What the model said.
        reward: The rollout's label `reward`; None without one.
    """

    task: str
    rollout: str
    turn: int
    node: str
    parent: str
    prompt: str | None
    response: str
    reward: float | None


def target(
    task: str | None,
    rollout: str | None,
    labels: Labels | None,
    answer_bytes: int | None = None,
    *,
    turns: bool | None = None,
) -> tuple[str, dict[str, str | list[str]]]:
    """Return path and query of a request for trajectories."""
    path = path_of("api", "v1", *(() if task is None else ("tasks", task)), "trajectories")
    return path, {**given(rollout=rollout, answer_bytes=answer_bytes, turns=turns), "label": label_pairs(labels or {})}


def trajectory(line: bytes) -> Trajectory:
    """Return the trajectory of a line."""
    return made_of(Trajectory, json.loads(line))


def model_turn(line: bytes) -> ModelTurn:
    """Return the turn of a line."""
    return made_of(ModelTurn, json.loads(line))


def split() -> Callable[[bytes], Iterator[bytes]]:
    """Return a function that takes the chunks of a response, and yields the lines that end in each."""
    from forkpoint.trajectory_files import Lines

    return Lines().of


def write(chunks: Iterable[bytes], path: Path, kind: "Format | None", *, turns: bool) -> None:
    """Write a response to a file or a directory; see `forkpoint.trajectory_files.write`."""
    from forkpoint.trajectory_files import write as write_file

    write_file(chunks, path, kind, turns=turns)
