"""Events reach the clients of a container's URL, as far as their filters let them through."""

import asyncio

import orjson

from proxy.compat.docker.containers import Container, ShownContainers
from proxy.compat.docker.events import ContainerEvents
from proxy.compat.docker.requests import container_spec


def test_events_reach_their_url_and_pass_filters() -> None:
    async def listen() -> list[str]:
        events, received, listening = ContainerEvents(), asyncio.Queue[bytes](), asyncio.Event()

        async def send(data: bytes) -> None:
            listening.set()
            if data:
                received.put_nowait(data)

        filters = {"event": ["start", "die"], "label": ["p=x"]}
        client = asyncio.create_task(events.send(ShownContainers("task", "r"), filters, send))
        await listening.wait()
        spec = container_spec({"Image": "any", "Labels": {"p": "x"}}, {})
        for owner in ("other", "r"):
            container = Container("1" * 64, "box", "task", owner, "r", spec, 0.0)
            for action in ("create", "start", "die"):
                events.publish(action, container)
        lines = [orjson.loads(await received.get()) for _ in range(2)]
        client.cancel()
        await asyncio.gather(client, return_exceptions=True)
        assert not received.qsize()
        return [f"{line['Action']} {line['Actor']['Attributes']['name']}" for line in lines]

    assert asyncio.run(listen()) == ["start box", "die box"]
