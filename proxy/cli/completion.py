"""Shell completion of the names of tasks, rollouts and nodes: the running proxy returns them."""

import os
import re
from pathlib import Path
from typing import Any

import httpx
import typer

from proxy.cli.client import PAGE, ControlClient, proxy_url
from proxy.cli.text import shortened

_WITHIN_S = 1.0
"""Timeout of a completion, in seconds: a shell waits for it at each Tab."""
_NAMES = 200
"""Most names that are offered."""
_TITLE = 60
"""Longest title of a call beside a node, in characters."""


_NOT_PLAIN = re.compile(r"[^\w ./,+@%-]+")
"""What a description leaves out."""


def complete_task(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the names of tasks that begin with a text."""
    return [row["task"] for row in _rows(ctx, "tasks", q=incomplete) if row["task"].startswith(incomplete)][:_NAMES]


def complete_rollout(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the names of the rollouts of the task in the command line, newest first."""
    rows = _rows(ctx, "tasks", _task(ctx), "rollouts", sort="-created_at")
    names = dict.fromkeys(row["rollout"] for row in rows)
    return [name for name in names if name.startswith(incomplete)][:_NAMES]


def complete_node(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Return the nodes of the task in the command line, each with its call."""
    view = _get(ctx, "tasks", _task(ctx), "tree")
    nodes = view["nodes"] if isinstance(view, dict) else []
    matching = [node for node in nodes if node["id"].startswith(incomplete)][:_NAMES]
    return [(node["id"], description((node["call"] or {"title": "start"})["title"])) for node in matching]


def description(title: str) -> str:
    """Return a call's title for a shell, with only characters that no shell interprets: an agent wrote it.

    zsh evaluates descriptions of completions, and Typer escapes no backslashes: one before a command substitution would
    run it in the user's shell.
    """
    return shortened(" ".join(_NOT_PLAIN.sub(" ", title).split()), _TITLE)


def _task(ctx: typer.Context) -> str:
    return str(ctx.params.get("task") or "")


def _rows(ctx: typer.Context, *path: str, **query: str) -> list[dict[str, Any]]:
    page = _get(ctx, *path, **query, limit=str(PAGE))
    return page["items"] if isinstance(page, dict) else []


def _get(ctx: typer.Context, *path: str, **query: str) -> Any:
    """Return a response of the proxy; None without one. A completion prints no error."""
    data = ctx.params.get("data") or os.environ.get("FORKPOINT_DATA")
    url = proxy_url(ctx.params.get("url") or os.environ.get("FORKPOINT_URL"), Path(data) if data else None)
    try:
        return None if url is None else ControlClient(url).read(*path, within_s=_WITHIN_S, **query)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError):
        return None
