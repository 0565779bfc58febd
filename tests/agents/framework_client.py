"""Rollouts of an agent of a framework over MCP, with a scripted model in the framework's own form of a fake model.

argv: the framework, and for each rollout the URL of its tools with the model's commands, as a JSON list. Prints for
each rollout the texts of the results that its model is shown.
"""

# mypy: disable-error-code="import-not-found, unused-ignore, misc, no-any-return"
# ruff: noqa: PLC0415 - each function needs its own framework, and only that

import asyncio
import json
import sys
from typing import Any


def smolagents(url: str, commands: list[str]) -> list[str]:
    from smolagents import ActionStep, ToolCallingAgent, ToolCollection
    from smolagents.models import ChatMessage, ChatMessageToolCall, ChatMessageToolCallFunction, MessageRole, Model

    class Scripted(Model):
        def generate(self, *_: Any, **__: Any) -> Any:
            name, arguments = ("exec", {"command": commands[self.turn]}) if self.turn < len(commands) else _FINAL
            self.turn += 1
            call = ChatMessageToolCallFunction(name=name, arguments=arguments)
            return ChatMessage(
                role=MessageRole.ASSISTANT,
                tool_calls=[ChatMessageToolCall(function=call, id=f"call-{self.turn}", type="function")],
            )

        turn = 0

    parameters = {"url": url, "transport": "streamable-http"}
    with ToolCollection.from_mcp(parameters, trust_remote_code=True) as tools:
        agent = ToolCallingAgent(tools=[*tools.tools], model=Scripted(), max_steps=len(commands) + 2, verbosity_level=0)
        agent.run("do it")
        return [step.observations for step in agent.memory.steps if isinstance(step, ActionStep)][:-1]


async def langgraph(url: str, commands: list[str]) -> list[str]:
    from langchain.agents import create_agent
    from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
    from langchain_core.messages import AIMessage, ToolMessage
    from langchain_mcp_adapters.client import MultiServerMCPClient
    from langchain_mcp_adapters.tools import load_mcp_tools

    class Scripted(GenericFakeChatModel):
        def bind_tools(self, *_: Any, **__: Any) -> Any:
            return self

    calls = [
        AIMessage("", tool_calls=[{"name": "exec", "args": {"command": command}, "id": f"call-{turn}"}])
        for turn, command in enumerate(commands)
    ]
    client = MultiServerMCPClient({"tools": {"transport": "streamable_http", "url": url}})
    async with client.session("tools") as session:
        agent = create_agent(Scripted(messages=iter([*calls, AIMessage("done")])), await load_mcp_tools(session))
        state = await agent.ainvoke({"messages": ["do it"]}, {"recursion_limit": 100})
    return [message.text for message in state["messages"] if isinstance(message, ToolMessage)]


async def openai_agents(url: str, commands: list[str]) -> list[str]:
    from agents import Agent, Model, ModelResponse, Runner, Usage, set_tracing_disabled
    from agents.mcp import MCPServerStreamableHttp
    from openai.types.responses import ResponseFunctionToolCall, ResponseOutputMessage, ResponseOutputText

    class Scripted(Model):
        turn = 0

        async def get_response(self, *_: Any, **__: Any) -> Any:
            turn, self.turn = self.turn, self.turn + 1
            output: Any
            if turn < len(commands):
                arguments = json.dumps({"command": commands[turn]})
                output = ResponseFunctionToolCall(
                    arguments=arguments, call_id=f"call-{turn}", name="exec", type="function_call"
                )
            else:
                text = ResponseOutputText(text="done", type="output_text", annotations=[])
                output = ResponseOutputMessage(
                    id="m", content=[text], role="assistant", status="completed", type="message"
                )
            return ModelResponse(output=[output], usage=Usage(), response_id=None)

        def stream_response(self, *_: Any, **__: Any) -> Any:
            raise NotImplementedError

    set_tracing_disabled(True)
    async with MCPServerStreamableHttp({"url": url}) as server:
        agent = Agent(name="a", model=Scripted(), mcp_servers=[server])
        result = await Runner.run(agent, "do it", max_turns=len(commands) + 2)
    items = [item for item in result.to_input_list() if item.get("type") == "function_call_output"]
    return [_text(item["output"]) for item in items]


async def pydantic_ai(url: str, commands: list[str]) -> list[str]:
    from pydantic_ai import Agent
    from pydantic_ai.mcp import MCPToolset
    from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ToolCallPart, ToolReturnPart
    from pydantic_ai.models.function import FunctionModel

    def scripted(messages: list[ModelMessage], _: Any) -> Any:
        turn = sum(isinstance(message, ModelResponse) for message in messages)
        if turn == len(commands):
            return ModelResponse(parts=[TextPart("done")])
        return ModelResponse(parts=[ToolCallPart("exec", {"command": commands[turn]})])

    async with Agent(FunctionModel(scripted), toolsets=[MCPToolset(url)]) as agent:
        result = await agent.run("do it")
    parts = [part for message in result.all_messages() for part in message.parts]
    return [_text(part.content) for part in parts if isinstance(part, ToolReturnPart)]


async def verifiers(url: str, commands: list[str]) -> list[str]:
    import threading
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    import verifiers.v1 as vf
    from verifiers.v1.harnesses.null.harness import NullHarnessConfig

    class Scripted(BaseHTTPRequestHandler):
        """A model's endpoint: its programs know models by URL alone, and ask for streams."""

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            turn = sum(message["role"] == "assistant" for message in asked["messages"])
            delta: dict[str, Any] = {"role": "assistant", "content": "done"}
            if turn < len(commands):
                function = {"name": "tools_exec", "arguments": json.dumps({"command": commands[turn]})}
                delta["tool_calls"] = [{"index": 0, "id": f"call-{turn}", "type": "function", "function": function}]
            choice = {"index": 0, "delta": delta, "finish_reason": "tool_calls" if turn < len(commands) else "stop"}
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            head = {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": "m", "usage": usage}
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            self.wfile.write(f"data: {json.dumps({**head, 'choices': [choice]})}\n\ndata: [DONE]\n\n".encode())

        def log_message(self, *_: Any) -> None: ...

    class Tools(vf.Toolset[vf.ToolsetConfig, vf.State]): ...

    class Config(vf.TaskConfig):
        tools: vf.ToolsetConfig

    class Task(vf.Task[vf.TaskData, vf.State, Config]):
        @classmethod
        def toolsets(cls, config: Config) -> list[Any]:
            return [Tools(config.tools)]

    model = ThreadingHTTPServer(("127.0.0.1", 0), Scripted)
    threading.Thread(target=model.serve_forever, daemon=True).start()
    config = vf.AgentConfig(
        harness=NullHarnessConfig(id="null"), runtime=vf.SubprocessConfig(), model="m",
        client=vf.EvalClientConfig(base_url=f"http://127.0.0.1:{model.server_port}/v1"),
    )  # fmt: skip
    task = Task(vf.TaskData(idx=0, prompt="do it"), Config(tools=vf.ToolsetConfig(url=url)))
    async with vf.make_agent(config) as agent:
        trace = await agent.run(task)
    assert not trace.errors, trace.errors
    return [_text(node.message.content) for node in trace.nodes if node.message.role == "tool"]


_FINAL = ("final_answer", {"answer": "done"})


def _text(content: Any) -> str:
    """Return a result's text in whatever form the framework keeps it."""
    return content if isinstance(content, str) else json.dumps(content, default=str)


def rollout(framework: str, url: str, commands: list[str]) -> list[str]:
    shown = globals()[framework](url, commands)
    return shown if isinstance(shown, list) else asyncio.run(shown)


if __name__ == "__main__":
    print(json.dumps([rollout(sys.argv[1], *each) for each in json.loads(sys.argv[2])]))
