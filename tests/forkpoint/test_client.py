"""Both clients do the same against a served proxy: each test runs with `Client` and with `AsyncClient`."""

import asyncio
import inspect
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from forkpoint import AsyncClient, Client, ForkpointError, UnreachableError
from tests.agents.serving import Proxy, real_proxy
from tests.machine import require_sandboxes

TOKEN = "0123456789abcdef"
Kind = type[Client] | type[AsyncClient]
both = pytest.mark.parametrize("kind", [Client, AsyncClient])


@pytest.fixture(scope="module")
def proxy() -> Iterator[Proxy]:
    require_sandboxes()
    with real_proxy() as running:
        yield running


async def done(value: Any) -> Any:
    """Return the result of an operation of either client."""
    return await value if inspect.isawaitable(value) else value


@asynccontextmanager
async def entered(manager: Any) -> AsyncIterator[Any]:
    """Enter a context of either client."""
    if hasattr(manager, "__aenter__"):
        async with manager as value:
            yield value
    else:
        with manager as value:
            yield value


def with_client(kind: Kind, url: str, test: Callable[[Any], Awaitable[None]], **options: Any) -> None:
    """Run a test with a client of either kind."""

    async def go() -> None:
        async with entered(kind(url, trust_env=False, **options)) as client:
            await test(client)

    asyncio.run(go())


@both
def test_group_shares_calls_and_forks(proxy: Proxy, kind: Kind) -> None:
    """A second rollout hits, a fork parts from it, and tree, diff, snapshot, steps and totals show it."""

    async def test(client: Any) -> None:
        task = client.task(f"group-{kind.__name__}")
        await done(task.put({"files": {"/root/seed": "1\n"}}))
        first = task.rollout("first")
        assert (await done(first.exec("echo one > f; cat seed"))).stdout == "1\n"
        async with entered(task.rollout("second")) as second:
            shared = await done(second.exec("echo one > f; cat seed"))
            assert (shared.stdout, shared.outcome, shared.hit, shared.tool_s) == ("1\n", "hit", True, 0.0)
            fork = await done(second.fork("fork"))
            assert (await done(fork.exec("echo two >> f; cat f"))).output == "one\ntwo\n"
            own = await done(second.exec("cat f; exit 3"))
            assert (own.stdout, own.exit_code, own.outcome) == ("one\n", 3, "miss")
            early = await done(second.fork(node=(await done(task.info())).root))
            assert (await done(early.exec("cat f"))).exit_code == 1
        names = {each.rollout: each.finished for each in await done(task.rollouts())}
        assert names == {"first": False, "second": True, "fork": False, early.name: False}
        info = await done(second.info())
        assert [step.outcome for step in info.steps] == ["hit", "miss"]
        assert info.steps[0].title == "echo one > f; cat seed"
        tree = await done(task.tree())
        node = tree[shared.node]
        assert (node.title, node.parent, node.hits, tree.truncated) == ("echo one > f; cat seed", tree.root, 1, False)
        changed = await done(task.diff(tree.root, shared.node))
        assert [file["path"] for file in changed.files] == ["/root/f"]
        assert (await done(task.snapshot(shared.node))).snapshot
        assert (await done(task.pin(shared.node))).flags == ["pinned"]
        assert (await done(task.node(shared.node))).answer["json"]["stdout"] == "1\n"
        assert await done(task.forget(shared.node, end_rollouts=True)) > 0
        assert (await done(client.stats())).hits >= 1
        assert f"group-{kind.__name__}" in {each.task for each in await done(client.tasks())}
        assert await done(client.ready())
        await done(task.delete())
        with pytest.raises(ForkpointError) as missing:
            await done(task.info())
        assert (missing.value.status, missing.value.slug) == (404, "no-such-task")

    with_client(kind, proxy.url, test)


@both
def test_labels_reach_rollouts(proxy: Proxy, kind: Kind) -> None:
    """Those of the client, of a rollout, of one that its first call begins, of a fork, and a late reward."""

    async def test(client: Any) -> None:
        task = client.task(f"labels-{kind.__name__}")
        async with entered(task.rollout("begun", labels={"step": 3, "group": "a,b=c %"})) as begun:
            fork = await done(begun.fork("fork", labels={"step": 4}))
        called = task.rollout("called", labels={"greedy": True})
        await done(called.exec("true"))
        labels = {each.rollout: dict(each.labels) for each in await done(task.rollouts())}
        assert labels == {
            "begun": {"run": "r 7", "step": 3, "group": "a,b=c %"},
            "fork": {"run": "r 7", "step": 4, "group": "a,b=c %"},
            "called": {"run": "r 7", "greedy": "true"},
        }
        assert (await done(begun.label(reward=1, group=None))).labels == {"run": "r 7", "step": 3, "reward": 1.0}
        assert (await done(begun.info())).state == "finished"
        assert [each.rollout for each in await done(task.rollouts(labels={"greedy": True}))] == ["called"]
        assert fork.labels == labels["fork"]
        report = await done(client.report("step", labels={"run": "r 7"}, task=task.name, price=3600))
        assert [(row.group, row.calls, row.misses) for row in report.rows] == [(None, 1, 1)]
        assert report.total.executed_cost == pytest.approx(report.total.executed_s)
        assert report.total.executed_s > 0
        assert [arm["executed"] for arm in report.arms] == [1, 1, 1]

    with_client(kind, proxy.url, test, labels={"run": "r 7"})


@both
def test_files_are_written_read_and_removed(proxy: Proxy, kind: Kind) -> None:
    async def test(client: Any) -> None:
        async with entered(client.task("files").rollout()) as rollout:
            await done(rollout.write("/root/a b/é?.sh", "echo ran\n", mode="755"))
            assert (await done(rollout.read("/root/a b/é?.sh"))).content == b"echo ran\n"
            assert (await done(rollout.exec("'./a b/é?.sh'"))).stdout == "ran\n"
            await done(rollout.remove("/root/a b/é?.sh"))
            with pytest.raises(ForkpointError) as missing:
                await done(rollout.read("/root/a b/é?.sh"))
            assert missing.value.status == 404

    with_client(kind, proxy.url, test)


@both
def test_sql_tools_return_rows_and_errors(proxy: Proxy, kind: Kind, tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "shop.sqlite")) as database:
        database.executescript("CREATE TABLE t (x); INSERT INTO t VALUES (1), (2);")

    async def test(client: Any) -> None:
        task = client.task(f"sql-{kind.__name__}")
        source = str(tmp_path / "shop.sqlite")
        await done(task.put({"driver": "sqlite", "databases": {"main": {"source": source}}}))
        async with entered(task.rollout()) as rollout:
            result = await done(rollout.sql("SELECT x FROM t WHERE x > ?", params=[1], timeout_s=60))
            assert (result.columns, result.rows, result.row_count, result.error) == (["x"], [[2]], 1, None)
            assert (await done(rollout.sql("SELECT y FROM t"))).error["kind"] == "sql"
            assert "x" in (await done(rollout.sql("SELECT x FROM t", format="csv"))).text
            await done(rollout.sql_script("INSERT INTO t VALUES (3); DELETE FROM t WHERE x = 1"))
            assert [row[0] for row in (await done(rollout.sql_tables())).rows] == ["t"]
            assert len((await done(rollout.sql_schema("t"))).rows) == 1
            assert (await done(rollout.sql_explain("SELECT x FROM t"))).error is None
            compared = await done(rollout.sql_compare("SELECT x FROM t", "VALUES (3), (2)"))
            assert (compared.match, compared.rows) == (True, 2)

    with_client(kind, proxy.url, test)


async def fail(rollout: Any, *, ends: bool) -> None:
    """Raise in a rollout's block, after its end or before."""
    async with entered(rollout):
        if ends:
            await done(rollout.finish())
        raise ZeroDivisionError


@both
def test_block_that_fails_finishes_its_rollout(proxy: Proxy, kind: Kind) -> None:
    """The block's own error is raised, also when the rollout has ended already."""

    async def test(client: Any) -> None:
        task = client.task("failing")
        for ends in (False, True):
            rollout = task.rollout()
            with pytest.raises(ZeroDivisionError):
                await fail(rollout, ends=ends)
            assert (await done(rollout.info())).finished

    with_client(kind, proxy.url, test)


class Busy(httpx.MockTransport):
    """Answers with 503 twice, then with a result."""

    def __init__(self) -> None:
        self.requests = 0
        super().__init__(self._answer)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        self.requests += 1
        assert request.headers["x-forkpoint-token"] == TOKEN
        if self.requests < 3:
            problem = {"type": "urn:forkpoint:overloaded", "detail": "All sandboxes are busy."}
            return httpx.Response(503, json=problem, headers={"retry-after": "0"})
        return httpx.Response(200, json={"stdout": "", "stderr": "", "exit_code": 0})


@both
def test_busy_proxy_is_asked_again(kind: Kind) -> None:
    transport = Busy()

    async def test(client: Any) -> None:
        assert (await done(client.task("t").rollout().exec("true"))).exit_code == 0

    with_client(kind, "127.0.0.1:1", test, transport=transport, token=TOKEN)
    assert transport.requests == 3


@both
def test_impatient_client_gets_the_refusal(kind: Kind) -> None:
    class Full(Busy):
        def _answer(self, request: httpx.Request) -> httpx.Response:
            answer = super()._answer(request)
            answer.headers["retry-after"] = "5"
            return answer

    transport = Full()

    async def test(client: Any) -> None:
        with pytest.raises(ForkpointError, match="overloaded"):
            await done(client.task("t").rollout().exec("true"))

    with_client(kind, "127.0.0.1:1", test, transport=transport, token=TOKEN, patience_s=1)
    assert transport.requests == 1


@both
def test_unreachable_proxy_is_named(kind: Kind) -> None:
    url = "http://127.0.0.1:1"

    async def test(client: Any) -> None:
        with pytest.raises(UnreachableError, match=url):
            await done(client.stats())

    with_client(kind, url, test)


def test_urls_of_a_rollout_name_its_endpoints() -> None:
    with Client("proxy:8700/", trust_env=False) as client:
        rollout = client.task("a~b").rollout("r 1")
        assert rollout.base_url == "http://proxy:8700/t/a~b/r/r%201"
        assert rollout.mcp_url == f"{rollout.base_url}/mcp"
        assert rollout.docker_host == "tcp://proxy:8700/t/a~b/r/r%201/docker"


def test_importing_forkpoint_loads_no_third_party_code() -> None:
    """Processes in sandboxes import it, and start in milliseconds; a client loads neither FastAPI nor a driver."""
    program = (
        "import sys; before = set(sys.modules); import forkpoint; light = set(sys.modules) - before;"
        "print([name for name in light if name.partition('.')[0] not in {*sys.stdlib_module_names, 'forkpoint'}]);"
        "from forkpoint import AsyncClient, Client;"
        "print(sorted(set(sys.modules) & {'fastapi', 'pydantic', 'docker', 'uvicorn', 'proxy', 'sandboxes'}))"
    )
    lines = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert lines.splitlines() == ["[]", "[]"]
