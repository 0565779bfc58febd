"""The differential run finds false answers, and finds none in short runs. `bench.differential` runs long ones.

So does the run of directed sequences, `bench.directed`.
"""

import random
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from bench import directed
from bench.comparison import Answer, Comparison, Run, Tally
from bench.differential import Plan, run
from bench.programs import Program, ProgramCall, shell_group, shell_spec
from tests.machine import Proxy, require_sandboxes
from tests.sandboxes.postgres_cluster import require_postgres

TRUE: Answer = ("true", [], 0, False)
FALSE: Answer = ("false", [], 0, False)
OTHER: Answer = ("other", [], 0, False)

PLAN = Plan(programs=12, length=8)
DIRECTED = (
    "links: one file with two names", "renames: a directory with the session inside", "pids: kept in a variable",
    "daemons: the time limit of a call ends what it started", "shell: arrays and maps",
)  # fmt: skip


class Scripted(Comparison):
    """Compares without proxies; later private runs give the answer `later`."""

    def __init__(self, tally: Tally, later: tuple[object, ...], client: httpx.Client) -> None:
        nothing = Proxy(Path("/nonexistent"))
        super().__init__([nothing], nothing, tally, [client], 0)
        self.later = later

    def _alone(self, _task: str, program: Program) -> Run:
        return Run(tuple(self.later for _ in program))


def compared(answers: list[Answer], *private: list[Answer], later: Answer, recalls: int | None = None) -> Tally:
    """Compare the answers of one rollout with private ones; the last call may repeat the value of an earlier one."""
    tally = Tally()
    calls = [ProgramCall("shell/exec", {"command": "true"}) for _ in answers]
    calls[-1] = replace(calls[-1], recalls=recalls)
    with httpx.Client() as client:
        run = Run(tuple(answers), tuple("hit" for _ in answers))
        Scripted(tally, later, client)._compare(0, 0, tuple(calls), run, [Run(tuple(one)) for one in private], "p0")
    return tally


def test_answer_that_no_private_run_gives_is_wrong() -> None:
    tally = compared([FALSE], [TRUE], later=TRUE)
    assert [(wrong.expected, wrong.actual) for wrong in tally.wrong] == [(TRUE, FALSE)]


def test_answer_of_later_private_run_is_timing() -> None:
    tally = compared([FALSE], [TRUE], later=FALSE)
    assert (tally.wrong, tally.timing) == ([], 1)


def test_answer_unlike_differing_private_runs_is_unclear() -> None:
    tally = compared([FALSE], [TRUE], later=OTHER)
    assert (tally.wrong, [difference.actual for difference in tally.unclear]) == ([], [FALSE])


def test_noise_floor_counts_differing_private_runs() -> None:
    tally, program = Tally(), (ProgramCall("shell/exec", {"command": "true"}),) * 2
    with httpx.Client() as client:
        Scripted(tally, TRUE, client)._count_noise(program, [Run((TRUE, TRUE)), Run((TRUE, FALSE))])
    assert (tally.twice, tally.noise) == (2, 1)


def test_random_value_read_differently_is_wrong() -> None:
    tally = compared([TRUE, FALSE], [TRUE, TRUE], later=TRUE, recalls=0)
    assert [(wrong.position, wrong.expected) for wrong in tally.wrong] == [(1, TRUE)]


def test_programs_follow_from_the_seed() -> None:
    groups = [shell_group(random.Random(5), shell_spec("local"), 6, 10) for _ in range(2)]  # noqa: S311
    assert groups[0] == groups[1]
    assert len(groups[0].programs) == 6


@pytest.mark.parametrize("mode", ["calm", "kills"])
def test_programs_have_the_answers_of_private_shells(mode: str) -> None:
    require_sandboxes()
    tally = run("local", mode, 3, PLAN)
    assert (tally.wrong, tally.programs) == ([], 12)
    assert tally.compared > 50


@pytest.mark.parametrize("members", [1, 2])
def test_programs_have_the_answers_of_private_databases(members: int) -> None:
    if members > 1:
        require_postgres()
    tally = run("sqlite", "kills", 3, replace(PLAN, members=members))
    assert (tally.wrong, tally.programs) == ([], 12)
    assert tally.compared > 50


def test_directed_sequences_have_the_answers_of_private_shells() -> None:
    require_sandboxes()
    chosen = [one for one in directed.sequences("local") if one.name in DIRECTED]
    tallies = directed.run("local", chosen)
    assert sorted(tallies) == sorted(DIRECTED)
    assert [(name, tally.wrong, tally.endings) for name, tally in tallies.items() if tally.wrong or tally.lost] == []
    assert all(tally.compared > 5 and tally.sources.total() > 5 for tally in tallies.values())


def test_rollouts_of_directed_sequence_share_its_beginning() -> None:
    [sequence] = directed.sequences("local", DIRECTED[0])
    *built, observing = sequence.calls
    first, second, third, *left = sequence.rollouts(everywhere=True)
    assert (first, second, third) == (tuple(built), tuple(built), sequence.calls)
    assert left == [(*built[:cut], observing) for cut in range(len(built))]


def test_directed_sequences_have_names_of_their_own() -> None:
    headings = [line for line in directed.SEQUENCES.read_text().splitlines() if line.startswith("== ")]
    known = [one for driver in directed.DRIVERS for one in directed.sequences(driver)]
    assert len(known) == len(headings) >= 150
    assert all(len(one.calls) > 2 for one in known)
