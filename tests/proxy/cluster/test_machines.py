"""Members on machines of their own: a partition, and clocks that are minutes apart."""

import asyncio
from pathlib import Path

from tests.machine import until
from tests.network import require_network
from tests.proxy.cluster.machines import machines, require_clocks
from tests.proxy.cluster.nodes import Agent, Truth, check_log, put_task, until_answered
from tests.proxy.cluster.test_nodes import meanwhile
from tests.sandboxes.postgres_cluster import require_postgres


def test_partition_with_clocks_apart(tmp_path: Path) -> None:
    """An owner loses the database, and its clock is ten minutes off. Others go on; its own agents get 503 or an answer
    that is in the log."""
    require_postgres()
    require_network()
    require_clocks()
    truth = Truth()
    with machines(tmp_path, "ab", clocks=True) as (cluster, _):
        a, b = cluster.members.values()
        put_task(a, "t")
        agents = [Agent(f"{n}{home.name}", "t", [home], truth, seed=n) for n in range(2) for home in (a, b)]
        others = [agent for agent in agents if agent.home is b]

        async def part() -> None:
            a.set_clock(300)
            b.set_clock(-300)
            await until(lambda: all(agent.answers for agent in agents))
            cluster.network.cut([a.machine], [cluster.database])
            # The owner's agents are refused, and the others are answered by the next owner.
            await until(lambda: any(truth.refused[agent.name] for agent in agents if agent.home is a))
            await until_answered(others)
            cluster.network.heal()

        asyncio.run(meanwhile(agents, part))
        assert truth.wrong == []
        check_log(cluster.dsn, truth)
