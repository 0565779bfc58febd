"""A replay goes over real sockets to a stand-in for the proxy's wire."""

import asyncio
from collections.abc import Sequence

import pytest

from proxy.cli.replay.report import (
    CallId,
    ReplayedCall,
    ReplayRun,
    ToolAnswer,
    as_json,
    compare,
    errors_of,
    figures,
    percentile,
    spent,
)
from proxy.cli.replay.runner import ReplayError, ReplayNames, replay
from proxy.cli.replay.workload import RecordedRollout, RecordedTask, Workload, WorkloadRequest
from sandboxes.spec import EnvironmentSpec
from tests.proxy.stub import Stub, stub_proxy

NAMES = ReplayNames("-x", "-y")


def workload(*rollouts: Sequence[str], task: str = "t/1") -> Workload:
    made = tuple(
        RecordedRollout(
            f"r{number}",
            tuple(
                WorkloadRequest(at, "shell/exec", {"command": command}, command) for at, command in enumerate(commands)
            ),
        )
        for number, commands in enumerate(rollouts)
    )
    return Workload((RecordedTask(task, EnvironmentSpec(), made),))


def run(stub: Stub, work: Workload, *, cached: bool = True, at_once: int = 1, names: ReplayNames = NAMES) -> ReplayRun:
    return asyncio.run(
        replay(stub.url, work, cached=cached, names=names, at_once=at_once, on_call=lambda _: None, trust_env=False)
    )


def test_second_rollout_hits_records_of_first() -> None:
    with stub_proxy() as stub:
        result = figures(run(stub, workload(["ls", "pwd"], ["ls", "pwd", "id"])))
    assert (result["calls"], result["hits"], result["misses"], result["errors"]) == (5, 2, 3, 0)
    assert result["hit_rate"] == pytest.approx(0.4)
    assert (result["executed_s"], result["saved_s"], result["replays"]) == (1.5, 1.0, 0)


def test_shared_execution_counts_as_a_wait() -> None:
    with stub_proxy() as stub:
        result = figures(run(stub, workload(["shared"])))
    assert (result["hits"], result["waits"], result["misses"], result["hit_rate"]) == (0, 1, 0, 1.0)


@pytest.mark.parametrize("at_once", [1, 4, 64])
def test_calls_of_a_rollout_are_sent_in_order(at_once: int) -> None:
    rollouts = [[f"step {number}.{at}" for at in range(5)] for number in range(12)]
    with stub_proxy() as stub:
        result = run(stub, workload(*rollouts), at_once=at_once)
        assert sorted(stub.trajectories.values()) == sorted(rollouts)
    assert [(call.rollout, call.index) for call in result.outcomes] == [
        (f"r{n}", at) for n in range(12) for at in range(5)
    ]


def test_uncached_run_deletes_its_tasks() -> None:
    with stub_proxy() as stub:
        result = run(stub, workload(["ls"], ["ls"]), cached=False)
        ((task, spec),) = stub.specs.items()
        assert spec["cache"] == "never"
        assert stub.deleted[-1] == f"/api/v1/tasks/{task}"
    assert figures(result)["bypasses"] == 2


def test_cached_run_finishes_rollouts_and_keeps_tasks() -> None:
    with stub_proxy() as stub:
        run(stub, workload(["ls"], task="t"))
        assert stub.deleted == ["/api/v1/tasks/t-x/rollouts/r0-y"]


def test_kept_names_share_the_tree_between_replays() -> None:
    with stub_proxy() as stub:
        first = run(stub, workload(["ls"], task="t"), names=ReplayNames("", "-1"))
        again = run(stub, workload(["ls"], task="t"), names=ReplayNames("", "-2"))
        assert list(stub.specs) == ["t"]
    assert (figures(first)["hits"], figures(again)["hits"]) == (0, 1)


def test_rollout_continues_after_an_error() -> None:
    with stub_proxy() as stub:
        result = run(stub, workload(["ls", "fail", "garbage", "pwd"]))
    assert [outcome.answer is not None for outcome in result.outcomes.values()] == [True, False, False, True]
    assert errors_of(result) == [
        "t/1 r0 call 1 (fail): 503 The sandbox failed: It died. Send the call again.",
        "t/1 r0 call 2 (garbage): not a shell result: '[\"?\"]'",
    ]
    assert figures(result)["errors"] == 2


def test_refused_call_is_retried_and_counted() -> None:
    with stub_proxy() as stub:
        result = run(stub, workload(["busy"]))
    assert (figures(result)["errors"], figures(result)["refusals"]) == (0, 1)


def test_comparison_lists_only_different_answers() -> None:
    work = workload(["ls", "random", "pwd"], ["ls", "random"], ["fail"])
    with stub_proxy() as stub:
        result = compare(run(stub, work), run(stub, work, cached=False, names=ReplayNames("-u", "-u")))
    assert [(difference.call.rollout, difference.call.index) for difference in result.differences] == [
        ("r0", 1),
        ("r1", 1),
    ]
    assert (result.compared, result.rate) == (5, 0.4)


def test_unreachable_proxy_error_names_remedy() -> None:
    nowhere = Stub(url="http://127.0.0.1:1")
    with pytest.raises(ReplayError, match=r"no proxy answers at .* Start one with `forkpoint serve`"):
        run(nowhere, workload(["ls"]))


def test_rollout_ends_when_proxy_is_lost() -> None:
    lost = {CallId("t", "r", 0): ReplayedCall("ls", 0.0, error="no answer from the proxy")}
    found = ReplayRun(cached=True, wall_s=1.0, outcomes=lost, spent=spent({}, {}), unsent=2)
    assert errors_of(found)[-1] == "2 calls were not sent, because the proxy could not be reached any more"
    assert (figures(found)["errors"], figures(found)["calls"], figures(found)["median_ms"]) == (3, 1, 0.0)


def test_percentiles_are_measured_values() -> None:
    assert percentile([], 0.5) == 0.0
    assert [percentile([1.0, 2.0, 3.0, 4.0], share) for share in (0.0, 0.5, 0.95)] == [1.0, 2.0, 4.0]


def test_json_report_has_both_answers() -> None:
    call = CallId("t", "r", 0)
    runs = {
        name: ReplayRun(
            name == "cached",
            1.0,
            {call: ReplayedCall("ls", 0.1, ToolAnswer(name, "", 0))},
            spent({}, {"executed_s": 1.0}),
        )
        for name in ("cached", "uncached")
    }
    report = as_json(runs, {"cached / uncached": compare(*runs.values())})
    assert report["runs"]["cached"]["executed_s"] == 1.0
    (difference,) = report["comparisons"]["cached / uncached"]["differences"]
    assert (difference["command"], difference["one"]["stdout"], difference["other"]["stdout"]) == (
        "ls",
        "cached",
        "uncached",
    )
