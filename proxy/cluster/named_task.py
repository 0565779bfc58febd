"""The task that a request names: its owner answers the request."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import parse_qs

from proxy.dataplane.addressing import Addressing
from proxy.http.access import Access
from proxy.http.asgi import Scope
from proxy.refusals import RefusalError

_WAY = re.compile(r"/api/v1/tasks/([^/]+)(?:/.*)?")


@dataclass(frozen=True, slots=True)
class NamedTask:
    """What a request says about the task that it is for."""

    name: str
    rollout: str  # Name of the rollout; empty if the address does not say.
    creates: bool  # Whether the request may create the task.
    endpoint: str = ""  # Of an agent's request.


def named_task(scope: Scope, access: Access, addressing: Addressing) -> NamedTask | None:
    """Return the task that a request names; None for a request without one. Raises RefusalError."""
    path: str = scope["path"]
    agents = path.startswith(("/t/", "/e/", "/ng-rollout/"))
    below = None if agents else _WAY.fullmatch(path)
    query = parse_qs(scope["query_string"].decode("latin-1")) if path == "/api/v1/events" else {}
    shown = next(iter(query.get("task", ())), "") if below is None else below[1]
    if not agents and not shown:
        return None
    # A copy: the owner authorises the request too, and must see the token.
    seen: Scope = {"method": "GET", **scope, "headers": list(scope["headers"])}
    try:
        grant = access.admit(seen, rollout_named_by(seen))
        if shown:
            return NamedTask(shown, "", scope.get("method", "GET") in ("PUT", "POST"))
        address = addressing.address(seen)
    except RefusalError as refusal:
        if refusal.slug == "token" and path.startswith("/e/"):
            raise RefusalError(
                401,
                "token",
                "in a cluster a token alone does not say which member has its rollout. Name the rollout too, with "
                "the headers X-Forkpoint-Task and X-Forkpoint-Rollout.",
            ) from None
        raise
    return NamedTask(address.task, address.rollout, not grant.rollout, address.endpoint)


def rollout_named_by(scope: Scope) -> Callable[[str], tuple[str, str] | None]:
    """Return the look-up of rollouts' tokens at an ingress: the names in the path, because only the owner knows."""

    def named(text: str) -> tuple[str, str] | None:
        parts = scope["path"].split("/")
        if text.startswith("fp_") and len(parts) > 4 and parts[1] == "t" and parts[3] == "r":
            return parts[2], parts[4]
        return None

    return named
