"""Recorded traces as transitions between states, and groups of rollouts that are resampled from them."""

import hashlib
import json
import math
import random
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WORKLOADS = Path(__file__).resolve().parents[2] / "shared" / "workloads"
"""Where recorded traces are unless a command names another directory: a folder beside the repository."""
SHORTEST_S, LONGEST_S = 0.5, 5.0
NOVELTY = 0.5
"""Share of Good and Turing's estimate (calls seen once / calls seen) with which a resampled rollout makes a call that
no recorded one made. At 0.5, groups as large as the recorded ones share about as many calls as the recorded ones do;
`bench.terminal_workload` prints both shares."""
_LONGEST = 40


@dataclass(frozen=True, slots=True)
class Move:
    """A call: its state before, the call, its state after, and the seconds of the tool."""

    before: str
    call: str
    after: str
    seconds: float

    @property
    def reads(self) -> bool:
        return self.before == self.after


Traces = Mapping[str, Sequence[Sequence[Move]]]
"""The rollouts of each task."""


def share(*parts: str) -> float:
    """Return a number in [0, 1) that depends only on the parts."""
    digest = hashlib.blake2b("\0".join(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def read_traces(file: Path) -> Traces:
    """Read recorded rollouts. Without recorded states, each call that is not marked read-only makes a new state."""
    traces: dict[str, list[list[Move]]] = defaultdict(list)
    for line in file.read_text().splitlines():
        rollout = json.loads(line)
        moves: list[Move] = []
        for call in rollout["calls"]:
            moves.append(_move(call, moves[-1].after if moves else "start"))
        traces[rollout["task"]].append(moves)
    return traces


def resampled(traces: Traces, *, size: int, seed: int) -> Traces:
    """Return groups of rollouts for each task, in the shape of the recording.

    Each rollout walks: at a state, after a given call, it makes one of the calls that recorded rollouts made there, as
    often as they did; or, with the chance that Good and Turing give for what was not seen yet (times `NOVELTY`), a
    call of its own, after which it goes on alone.
    """
    dice = random.Random(seed)  # noqa: S311 - dice of a benchmark
    groups = {}
    for task, rollouts in traces.items():
        recorded = [rollout for rollout in rollouts if rollout]
        if recorded:
            groups[task] = [_walk(_next_moves(recorded), recorded[0][0].before, f"{n}", dice) for n in range(size)]
    return groups


def hit_share(traces: Traces) -> float:
    """Return the share of calls that a cache by true state answers if rollouts run one after another."""
    hits = calls = 0
    for rollouts in traces.values():
        seen: set[tuple[str, str]] = set()
        for move in (move for rollout in rollouts for move in rollout):
            calls += 1
            hits += (move.before, move.call) in seen
            seen.add((move.before, move.call))
    return hits / calls if calls else 0.0


_After = Mapping[tuple[str, str], Sequence[Move | None]]


def _next_moves(rollouts: Sequence[Sequence[Move]]) -> _After:
    """Return the calls that followed each (state, last call); None for the end of a rollout."""
    following: dict[tuple[str, str], list[Move | None]] = defaultdict(list)
    for rollout in rollouts:
        last = ""
        for move in rollout:
            following[move.before, last].append(move)
            last = move.call
        following[rollout[-1].after, last].append(None)
    return following


def _walk(following: _After, start: str, name: str, dice: random.Random) -> list[Move]:
    moves: list[Move] = []
    # The state of the recording and of this rollout differ once the rollout made a change of its own.
    recorded, here, last = start, start, ""
    while len(moves) < _LONGEST:
        options = following.get((recorded, last))
        picked = dice.choice(options) if options else None
        if picked is None:
            break
        once = Counter(option and option.call for option in options or ())[picked.call] == 1
        novel = once and dice.random() < NOVELTY
        call = f"{picked.call} #{name}.{len(moves)}" if novel else picked.call
        if picked.reads:
            after = here
        else:
            after = f"{picked.after} #{name}.{len(moves)}" if novel or here != recorded else picked.after
        moves.append(Move(here, call, after, picked.seconds))
        recorded, here, last = picked.after, after, picked.call
    return moves


def _move(call: Mapping[str, Any], before: str) -> Move:
    name = json.dumps([call["tool"], call["args"]], sort_keys=True)
    if "state_before" in call:
        before, after = call["state_before"], call["state_after"]
    else:
        after = before if call["annot_read_only"] else hashlib.blake2b(f"{before} {name}".encode()).hexdigest()
    seconds = call.get("executed_seconds")
    if seconds is None:
        span = math.log(LONGEST_S / SHORTEST_S)
        seconds = SHORTEST_S * math.exp(span * share(before, name))
    return Move(before, name, after, seconds)
