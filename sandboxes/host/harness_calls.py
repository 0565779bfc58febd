"""Turns of the harness in a sandbox: a model's response goes in, and the next requests come out."""

from collections.abc import Mapping
from dataclasses import replace

import orjson

from sandboxes.calls import Execution, ToolCall, ToolResult
from sandboxes.effects import Effect
from sandboxes.host.server_calls import ServerCalls
from sandboxes.host.translate import execution
from sandboxes.server_spec import Harness
from sandboxes.spec import EnvironmentSpec
from sandboxes.tool_clients.harness import Begin, Delivery, ModelPort
from sandboxes.tool_clients.http1 import MalformedResponseError
from sandboxes.tool_clients.server_orders import harness_order

TURN_TYPE = "application/vnd.forkpoint.turn+json"
"""The media type of results: `Turn.members`."""


class HarnessCalls:
    """Runs the turns of one sandbox's harness."""

    def __init__(self, servers: ServerCalls, spec: EnvironmentSpec, environment: Mapping[str, str]) -> None:
        """Prepare for the turns of a sandbox, whose `environment` gives way to the variables of the spec."""
        self._servers, self._spec, self._environment = servers, spec, environment

    async def execute(self, call: ToolCall) -> Execution:
        """Run a turn: `start`, `deliver` with a response, or `wait`. `ServerError`: the harness or relay failed."""
        harness = self._spec.harness
        assert harness is not None, "the endpoint is there only with a harness"
        connected = await self._servers.connect(harness_order(self._spec, self._environment))
        port = ModelPort(connected.fds, harness.timeout_s)
        try:
            async with self._servers.conversation("harness"):
                if connected.message.fresh != (call.tool == "start"):
                    raise MalformedResponseError("its relay has ended")
                turn = await port.turn(_begin(call, harness), others_wait=bool(call.arguments.get("others")))
                done = await self._servers.finish(read=False)
        finally:
            port.close()
        ran = execution(done, ToolResult(200, TURN_TYPE, orjson.dumps(turn.members())))
        # A harness draws ids and reads clocks: no second run of it comes to the same state. A turn is always a step,
        # however little the processes seem to have done.
        return replace(ran, effect=ran.effect | Effect.PROCESSES, repeatable=False)


def _begin(call: ToolCall, harness: Harness) -> Begin | Delivery | None:
    arguments = call.arguments
    if call.tool == "start":
        return Begin.of(harness, arguments)
    if call.tool == "wait":
        return None
    headers = tuple((name, value) for name, value in arguments["headers"])
    return Delivery(arguments["connection"], arguments["status"], headers, call.body)
