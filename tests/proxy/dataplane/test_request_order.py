"""Requests of one rollout on several connections are handled in the order in which they were read."""

import asyncio
import json
from pathlib import Path

import uvicorn
from uvicorn.server import ServerState

from proxy.app import assemble
from proxy.control.parts import ControlPlane
from proxy.dataplane.hit_protocol import protocol_for
from proxy.dataplane.response_reports import report_responses
from tests.proxy import rig
from tests.proxy.dataplane.test_hit_protocol import Client


def request(command: str, rollout: str) -> bytes:
    body = json.dumps({"command": command}).encode()
    head = f"POST /t/task/r/{rollout}/shell/exec HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def test_a_hit_overtakes_no_request_that_was_read_before(tmp_path: Path) -> None:
    """A client hangs up and asks on another connection: both requests may be read before any task has run."""

    async def go() -> None:
        async with rig.engine(tmp_path) as engine:
            application = assemble(engine, ControlPlane.over(engine))
            config = uvicorn.Config(report_responses(application), lifespan="off", log_config=None)
            state = ServerState()
            made = protocol_for(application)

            async def send(*requests: bytes) -> list[Client]:
                clients = []
                for sent in requests:
                    client, connection = Client(), made(config, state, {})
                    connection.connection_made(client)
                    # No await: the requests lie in the sockets when the event loop looks.
                    connection.data_received(sent)
                    clients.append(client)
                while state.tasks:
                    await asyncio.wait(state.tasks)
                return clients

            for command in ("echo one > f", "cat f"):
                await send(request(command, "first"))
            await send(request("echo one > f", "second"))
            # The tree does not know the first of these calls, and knows the second one where the rollout is now.
            miss, known = await send(request("echo two > f", "second"), request("cat f", "second"))
            assert b"200 OK" in miss.received
            assert json.loads(known.received.partition(b"\r\n\r\n")[2])["stdout"] == "two\n"
            rollout = await engine.tasks.rollout("task", "second")
            assert not engine.step.order.busy(rollout)

    asyncio.run(go())
