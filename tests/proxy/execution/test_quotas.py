"""Quotas: calls beyond one wait and are refused, those of other tenants are not, and members divide it."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.execution.quotas import Quota, Quotas, Usage, share_of
from proxy.refusals import RefusalError
from tests.proxy.rig import ask, engine

USAGES = st.lists(st.builds(Usage, st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=6)


@given(st.integers(1, 60), USAGES)
def test_shares_do_not_exceed_the_quota(bound: int, usages: list[Usage]) -> None:
    """Members that know the same exceed it by less than one call each. What fits is granted; none is left without."""
    shares = [share_of(bound, own, usages[:at] + usages[at + 1 :]) for at, own in enumerate(usages)]
    active = [(own, share) for own, share in zip(usages, shares, strict=True) if any(own)]
    assert min(shares) >= 1
    assert sum(share for _, share in active) <= bound + len(active) - 1 or len(active) <= 1
    if sum(map(sum, usages)) <= bound:
        assert all(share >= sum(own) for own, share in active)
    if len(active) == 1:
        assert active[0][1] == bound


def quotas(*, patience_s: float = 30.0, max_waiting: int = 100) -> Quotas:
    return Quotas({"a-*": 2, "b-*": 1}, patience_s=patience_s, max_waiting=max_waiting)


class Calls:
    """Calls that run until they are released."""

    def __init__(self, own: Quotas) -> None:
        self.own, self.running = own, list[str]()
        self._over: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    def begin(self, *names: str) -> None:
        for name in names:
            self._over[name] = asyncio.Event()
            self.tasks[name] = asyncio.create_task(self._run(name))

    async def _run(self, name: str) -> None:
        async with self.own.running(name):
            self.running.append(name)
            await self._over[name].wait()
            self.running.remove(name)

    async def settle(self, *over: str) -> list[str]:
        """End calls, and return those that run then. Nothing here waits for time, so some turns suffice."""
        for name in over:
            self._over[name].set()
        for _ in range(20):
            await asyncio.sleep(0)
        return sorted(self.running)


def test_a_tenant_at_its_quota_delays_no_other() -> None:
    """Its calls wait in their order. Another tenant's calls, and those of tasks without a quota, run at once."""

    async def go() -> None:
        calls = Calls(quotas())
        calls.begin("a-1", "a-2", "a-3", "a-4", "b-1", "other")
        assert await calls.settle() == ["a-1", "a-2", "b-1", "other"]
        assert calls.own.each["a-*"].usage == Usage(2, 2)
        assert await calls.settle("a-2") == ["a-1", "a-3", "b-1", "other"]
        # A client that hangs up while its call waits leaves the line.
        calls.tasks["a-4"].cancel()
        assert await calls.settle("a-1", "a-3") == ["b-1", "other"]
        assert calls.own.each["a-*"].usage == Usage(0, 0)
        await calls.settle("b-1", "other")

    asyncio.run(go())


@pytest.mark.parametrize(("patience_s", "max_waiting"), [(0.01, 100), (30.0, 2)])
def test_a_call_is_refused_that_waited_long_or_behind_many(patience_s: float, max_waiting: int) -> None:
    """With 429, which says what the quota is. Calls that wait or run are not affected."""

    async def go() -> None:
        calls = Calls(quotas(patience_s=patience_s, max_waiting=max_waiting))
        calls.begin("b-1")
        if max_waiting == 2:
            calls.begin("b-2")
        await calls.settle()
        with pytest.raises(RefusalError, match=r"b-\* have a quota of 1") as refused:
            async with calls.own.running("b-3"):
                pytest.fail("the call runs")
        assert refused.value.status == 429
        assert await calls.settle() == ["b-1"]
        assert (await calls.settle("b-1"))[:1] == (["b-2"] if max_waiting == 2 else [])
        await calls.settle(*(["b-2"] if max_waiting == 2 else []))
        assert calls.own.each["b-*"].usage == Usage(0, 0)

    asyncio.run(go())


def test_members_divide_a_quota_by_what_they_use() -> None:
    """A member begins with one call, hears what others use, and gives its share back when it has no calls."""

    async def go() -> None:
        published: list[Mapping[str, Usage]] = []
        others: list[tuple[int, int]] = []
        own = quotas()

        async def exchange(used: Mapping[str, Usage]) -> Mapping[str, Sequence[tuple[int, int]]]:
            published.append(dict(used))
            return {"a-*": others}

        work, calls = own.divide(exchange).work, Calls(own)
        calls.begin("a-1", "a-2", "a-3")
        assert await calls.settle() == ["a-1"]
        # The call that waits does not wait for the interval.
        await work()
        assert await calls.settle() == ["a-1", "a-2"]
        others.append((1, 9))
        calls.begin("a-4")
        await calls.settle()
        await work()
        # What runs ends by itself; no further call begins before the share has room for it.
        assert (await calls.settle(), own.each["a-*"].share) == (["a-1", "a-2"], 1)
        assert await calls.settle("a-1") == ["a-2"]
        assert await calls.settle("a-2") == ["a-3"]
        await calls.settle("a-3", "a-4")
        await work()
        assert (published[-1]["a-*"], own.each["a-*"].share) == (Usage(0, 0), 1)
        # Without calls, nothing more is published.
        count = len(published)
        await work()
        assert len(published) == count

    asyncio.run(go())


def test_what_a_failed_exchange_has_told_is_told_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exchange whose answer was lost may have been written, and other members count it until the next one."""
    monkeypatch.setattr("proxy.execution.quotas.EXCHANGE_S", 0.0)

    async def go() -> None:
        published: list[Usage] = []
        answers: list[Mapping[str, Sequence[tuple[int, int]]] | None] = [None, None, {}]
        own = quotas()

        async def exchange(used: Mapping[str, Usage]) -> Mapping[str, Sequence[tuple[int, int]]] | None:
            published.append(used["a-*"])
            return answers.pop(0)

        work = own.divide(exchange).work
        async with own.running("a-1"):
            await work()
        # The first of these fails too.
        for _ in range(3):
            await work()
        assert published == [Usage(1, 0), Usage(0, 0), Usage(0, 0)]

    asyncio.run(go())


def test_equal_calls_are_not_refused_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first of them waits in the line: what the others have waited for it counts as their own wait."""
    patience = list[float]()
    begin = Quota.begin

    async def noted(quota: Quota, patience_s: float) -> bool:
        patience.append(patience_s)
        return await begin(quota, patience_s)

    async def go() -> None:
        async with engine(tmp_path, quotas={"task": 1}, sandbox_patience_s=1.0) as running:
            task, quotas = await running.tasks.open("task"), running.executor.quotas
            assert quotas is not None
            rollouts = [running.tasks.rollouts.begin(task, name, task.tree, task.tree.root) for name in "abc"]
            async with quotas.running("task"):
                monkeypatch.setattr(Quota, "begin", noted)
                calls = [asyncio.create_task(ask(running, rollout, "echo x > y")) for rollout in rollouts]
                refused = await asyncio.gather(*calls, return_exceptions=True)
            assert [getattr(error, "status", error) for error in refused] == [429] * 3
            assert patience[0] > 0.5
            assert max(patience[1:]) < 0.5
            assert (await ask(running, rollouts[0], "echo x > y"))[1].name == "MISS"

    asyncio.run(go())
