"""The simulated cluster: what it answers is what one machine would answer, and a dead member stops no living agent."""

from dataclasses import replace

import pytest

from bench.cluster_model import Plan, Simulation
from bench.cluster_sim import PLACEMENTS, alone, groups_of, made_up, main

PLAN = Plan(members=8, slots=4)
GROUPS = groups_of(made_up(seed=1), count=32, size=8)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("pinned", [True, False])
def test_hits_are_those_of_one_machine(placement: str, pinned: bool) -> None:
    outcome = Simulation(replace(PLAN, placement=placement, pinned=pinned), GROUPS).run()  # type: ignore[arg-type]
    counts = outcome.counts
    assert outcome.calls == sum(len(rollout) for _, rollouts in GROUPS for rollout in rollouts)
    assert (counts["hits"] + counts["joined"]) / outcome.calls == pytest.approx(alone(GROUPS))
    assert counts["finished"] == counts["rollouts"]
    assert sum(outcome.appends.values()) == counts["misses"] + len(GROUPS)


@pytest.mark.parametrize("anywhere", [True, False])
def test_every_rollout_of_a_living_agent_ends(anywhere: bool) -> None:
    outcome = Simulation(replace(PLAN, killed=3, pinned=False, anywhere=anywhere), GROUPS).run()
    counts = outcome.counts
    assert counts["dead_agents"] > 0
    assert counts["takeovers"] > 0
    assert counts["finished"] >= counts["rollouts"] - counts["dead_agents"]
    assert 0 < max(outcome.stalls_s) <= PLAN.costs.lease_s


def test_equal_dice_give_equal_figures() -> None:
    runs = [Simulation(replace(PLAN, killed=2), GROUPS).run() for _ in range(2)]
    assert runs[0] == runs[1]


def test_tables_are_printed(capsys: pytest.CaptureFixture[str], tmp_path: object) -> None:
    main(["--workloads", str(tmp_path), "--members", "4", "--groups", "2", "--size", "4", "--hot", "40"])
    printed = capsys.readouterr().out
    for row in ("hits and joined calls", "Members of 4 that die", "anywhere"):
        assert row in printed
