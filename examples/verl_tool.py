"""A shell for veRL's tool agent loop whose commands run in Forkpoint. Read docs/agents/trainers.md.

veRL's tool config names it as `class_name: verl_tool.ForkpointShell`, with `config: {url: "http://127.0.0.1:8700"}`.
On a cluster it needs no URL.
"""

from typing import Any

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse

from forkpoint import AsyncClient


class ForkpointShell(BaseTool):
    """A tool that runs commands in bash. An instance lasts for one call; a trajectory is known by its request's ID."""

    def __init__(self, config: dict[str, Any], tool_schema: Any) -> None:
        super().__init__(config, tool_schema)
        # Without a URL, the proxy of the worker's own machine.
        self._client = AsyncClient(config.get("url"))
        self._tasks: dict[str, str] = {}

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Create an instance and note its task, which the dataset's `tools_kwargs` names."""
        instance_id, created = await super().create(instance_id)
        self._tasks[instance_id] = kwargs["create_kwargs"]["task"]
        return instance_id, created

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Run a command in the trajectory's rollout."""
        rollout = self._client.task(self._tasks[instance_id]).rollout(kwargs["agent_data"].request_id)
        result = await rollout.exec(parameters["command"], timeout_s=parameters.get("timeout_s"))
        return ToolResponse(text=result.output), 0.0, {"exit_code": result.exit_code}

    async def release(self, instance_id: str, **_: Any) -> None:
        """Forget the task of an instance."""
        self._tasks.pop(instance_id, None)
