"""Commands that change something in a running proxy, or work in a fork of one of its nodes."""

import sys
import time
import webbrowser
from collections.abc import Mapping
from json import JSONDecodeError, loads
from typing import Annotated, Any
from urllib.parse import quote

import httpx
import typer

from proxy.cli.client import LONG_S, ControlClient, fail
from proxy.cli.options import JsonOption, NodeArgument, RolloutArgument, TaskArgument, complete_node, complete_rollout
from proxy.cli.output import print_json, show, write_text

NodeOption = Annotated[str | None, typer.Option("--node", help="Name of a node.", autocompletion=complete_node)]
RolloutOption = Annotated[
    str | None, typer.Option("--rollout", help="Name of a rollout.", autocompletion=complete_rollout)
]


_RUNS = 5
"""How often `branch` sends its request if responses are cut off."""


def fork(
    proxy: ControlClient,
    task: TaskArgument,
    rollout: RolloutArgument,
    name: Annotated[str, typer.Argument(help="Name of the new rollout.", metavar="NAME")],
    node: NodeOption = None,
    json: JsonOption = False,
) -> None:
    """Begin a rollout at the node of another rollout, or at --node. Prints its base URL."""
    body = {"name": name} if node is None else {"name": name, "node": node}
    view = proxy.request("POST", "tasks", task, "rollouts", rollout, "fork", json=body)
    show(view, lambda begun: f"{begun['rollout']} begins at {begun['node']}: {begun['base_url']}", json=json)


def branch(
    proxy: ControlClient,
    task: TaskArgument,
    rollout: RolloutArgument,
    turn: Annotated[int, typer.Argument(help="How many responses of its model are shared.", metavar="TURN", min=0)],
    name: Annotated[str, typer.Argument(help="Name of the new rollout.", metavar="NAME")],
    *,
    upstream: Annotated[str, typer.Option(help="URL of the new rollout's model.")],
    header: Annotated[
        list[str] | None, typer.Option(help="Header for the model, such as 'x-api-key: KEY'. Repeatable.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Run an agent inside its sandbox from a turn of another rollout. Exits with the agent's exit code.

    A run that was cut off goes on: send the same command again.
    """
    body = {"upstream": upstream, "headers": _headers(header), "parent": rollout, "turn": turn}
    end = dict[str, Any]()
    for attempt in range(_RUNS):
        # The proxy needs a moment to notice that the response was cut off.
        time.sleep(min(attempt, 1))
        end = _run(proxy, task, name, body)
        if "exit" in end or "error" in end:
            break
    if "exit" not in end:
        fail(end["error"]["detail"] if "error" in end else "The proxy has ended the response early.")
    if json:
        print_json({"rollout": name, **end})
        return
    write_text(end["log"], sys.stdout)
    raise typer.Exit(end["exit"])


def _run(proxy: ControlClient, task: str, name: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Print the turns of a run, and return its last line; it is a turn if the response was cut off."""
    end = dict[str, Any]()
    with proxy.stream("POST", task, "r", name, "harness", within="t", json=body, timeout=None) as response:
        try:
            for line in response.iter_lines():
                end = loads(line)
                if "turn" in end:
                    text = f"turn {end['turn']}: {end['outcome']} in {end['seconds']:.3g} s, {end['node']}"
                    typer.echo(text, err=True)
        except (httpx.TransportError, JSONDecodeError):
            typer.echo("The response was cut off.", err=True)
            return {}
    return end


def _headers(given: list[str] | None) -> dict[str, str]:
    pairs = [text.partition(":") for text in given or []]
    if not all(name and sign for name, sign, _ in pairs):
        raise typer.BadParameter("write NAME:VALUE.", param_hint="--header")
    return {name.strip(): value.strip() for name, _, value in pairs}


def execute(
    proxy: ControlClient,
    task: TaskArgument,
    node: NodeArgument,
    command: Annotated[str, typer.Argument(help="Shell command; quote it.", metavar="COMMAND")],
    session: Annotated[str, typer.Option(help="Shell session that runs the command.")] = "main",
    timeout_s: Annotated[
        float | None, typer.Option("--timeout", help="Timeout of the command, in seconds.", min=0.001)
    ] = None,
    json: JsonOption = False,
) -> None:
    """Run a shell command in a fork of a node; the tree stays as it is. Exits with the command's exit code."""
    body = {"command": command, "session": session, "timeout_s": timeout_s}
    view = proxy.request("POST", "tasks", task, "nodes", node, "exec", json=body, within_s=LONG_S)
    answer = view["answer"].get("json")
    if json or not isinstance(answer, dict) or "stdout" not in answer:
        print_json(view)
        return
    write_text(answer["stdout"], sys.stdout)
    write_text(answer["stderr"], sys.stderr)
    raise typer.Exit(answer.get("exit_code") or 0)


def shell(proxy: ControlClient, task: TaskArgument, node: NodeArgument) -> None:
    """Open a terminal in a fork of a node; the tree stays as it is. End it with `exit`."""
    from proxy.cli.terminal import TerminalError, attach

    try:
        code = attach(proxy, task, node)
    except TerminalError as error:
        fail(str(error))
    raise typer.Exit(code)


def pin(
    proxy: ControlClient,
    task: TaskArgument,
    node: NodeArgument,
    off: Annotated[bool, typer.Option("--off", help="Unpin it.")] = False,
    json: JsonOption = False,
) -> None:
    """Pin a node's snapshot, so that it is never evicted."""
    view = proxy.request("POST", "tasks", task, "nodes", node, "pin", json={"pinned": not off})
    show(view, lambda detail: f"{detail['id']} is {'not pinned' if off else 'pinned'}", json=json)


def remove(
    proxy: ControlClient,
    task: TaskArgument,
    rollout: RolloutOption = None,
    node: NodeOption = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json: JsonOption = False,
) -> None:
    """Delete a task with its trees; with --rollout finish one rollout; with --node forget one subtree."""
    if rollout is not None and node is not None:
        raise typer.BadParameter("cannot be combined with --node.", param_hint="--rollout")
    what = f"rollout {rollout}" if rollout else f"node {node} and all below" if node else f"task {task} with its trees"
    if not yes:
        if not sys.stdin.isatty():
            fail(f"Not deleted: {what}. Repeat the command with --yes.")
        typer.confirm(f"Delete {what}?", abort=True)
    path = ("rollouts", rollout) if rollout else ("nodes", node) if node else ()
    counts = proxy.request("DELETE", "tasks", task, *path, within_s=LONG_S) or {}
    show({"deleted": what, **counts}, lambda view: f"deleted: {view['deleted']}", json=json)


def open_page(
    proxy: ControlClient,
    task: Annotated[str | None, typer.Argument(help="Name of the task.", metavar="[TASK]")] = None,
    node: NodeOption = None,
    rollout: RolloutOption = None,
    print_only: Annotated[bool, typer.Option("--print", help="Print the address only.")] = False,
    json: JsonOption = False,
) -> None:
    """Open the web page in a browser: the overview, or a task, a node or a rollout."""
    if task is None and (node or rollout):
        raise typer.BadParameter("is needed with --node or --rollout.", param_hint="TASK")
    names = [("t", task), ("n", node), ("r", rollout)]
    place = "/".join(f"{letter}/{quote(name, safe='')}" for letter, name in names if name)
    address = f"{proxy.url}/ui/" + (f"#/{place}" if place else "")
    if json:
        print_json({"url": address})
    else:
        typer.echo(address)
    if not print_only and not webbrowser.open(address):
        typer.echo("No browser could be started here. Open the address yourself.", err=True)
