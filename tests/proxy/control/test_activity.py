"""The timeline of the last hour and the event streams; slow clients do not slow the others."""

import asyncio
import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
from hypothesis import given
from hypothesis import strategies as st

from proxy.control.activity import Activity, Second, timeline
from proxy.telemetry.counters import Counters
from proxy.tree.rollout import Outcome
from tests.proxy.serving import Running, serving


def activity_of(counts: Counters) -> Activity:
    return Activity(counts, lambda: 3, lambda _task: [])


def events(proxy: Running, query: str) -> list[dict[str, Any]]:
    with proxy.client.stream("GET", f"/api/v1/events?{query}") as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        return [json.loads(line.removeprefix("data: ")) for line in stream.iter_lines() if line.startswith("data: ")]


def test_second_counts_what_happened_in_it() -> None:
    async def go() -> list[Second]:
        counts = Counters()
        activity = activity_of(counts)
        for outcome in (Outcome.MISS, Outcome.HIT, Outcome.HIT):
            counts.answered(outcome, 0.5)
        await activity.tick()
        counts.answered(Outcome.WAIT, 2.0)
        counts.failure("restore")
        await activity.tick()
        return list(activity.seconds)

    first, second = asyncio.run(go())
    assert (first.hits, first.misses, first.executed_s, first.saved_s, first.sandboxes) == (2, 1, 0.5, 1.0, 3)
    assert (second.hits, second.waits, second.saved_s, second.errors) == (0, 1, 2.0, 1)


def test_slow_listener_receives_number_of_lost_events() -> None:
    async def go() -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        counts = Counters()
        activity = activity_of(counts)
        with activity.listening(None) as listener:
            for _ in range(100):
                counts.answered(Outcome.HIT, 0.0)
                await activity.tick()
            return await listener.next(1), await listener.next(1)

    lost, following = asyncio.run(go())
    assert lost == {"event": "lost", "count": 36}
    assert following is not None
    assert following["event"] == "second"


@given(st.lists(st.integers(0, 9), max_size=50), st.integers(1, 60), st.integers(1, 20))
def test_timeline_steps_add_up_to_their_span(hits: list[int], span: int, step: int) -> None:
    seconds = [Second(float(at), hits=count) for at, count in enumerate(hits)]
    steps = timeline(seconds, span_s=span, step_s=step)
    assert sum(second.hits for second in steps) == sum(hits[-span:])
    assert [second.at for second in steps] == sorted(second.at for second in steps)
    assert len(steps) <= -(-span // step)


def test_event_stream_reports_movements_of_rollouts(tmp_path: Path) -> None:
    with serving(tmp_path) as proxy:
        for rollout in "ab":
            node = proxy.exec(rollout, "echo 1 > f").headers["x-forkpoint-node"]
        received = events(proxy, "task=task&limit=3")
        (moves,) = [event["moves"] for event in received if event["event"] == "rollouts"]
        assert moves == [{"rollout": name, "node": node, "calls": 1, "finished": False} for name in "ab"]
        assert sum(event["event"] == "second" for event in received) == 2
        line = proxy.client.get("/api/v1/timeline?step_s=3600").json()["seconds"]
        assert (line[0]["hits"], line[0]["misses"]) == (1, 1)
        assert proxy.client.get("/api/v1/events?task=nothing").status_code == 404


def test_event_stream_ends_when_proxy_stops(tmp_path: Path) -> None:
    with ExitStack() as after:
        with serving(tmp_path) as proxy:
            listener = after.enter_context(httpx.Client(base_url=proxy.client.base_url, timeout=20))
            lines = after.enter_context(listener.stream("GET", "/api/v1/events")).iter_lines()
            assert next(lines) == "retry: 2000"
            proxy.control.activity.max_listeners = 1
            assert proxy.client.get("/api/v1/events").status_code == 429
        # The server has ended, so the stream ends too.
        assert 'data: {"event":"end"}' in list(lines)
