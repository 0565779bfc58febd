"""Authorisation: tokens, and the tasks that each of them may see.

Without tokens the proxy listens on loopback only. Every client that reaches it may then do everything, except pages of
other sites (`browser_guard`).
"""

import hmac
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from hashlib import sha256
from pathlib import Path

from proxy.http.asgi import ReceivedHeaders, Scope
from proxy.refusals import RefusalError

HEADER = b"x-forkpoint-token"
GRANT = "forkpoint.grant"
"""The key in a request's ASGI scope of its `Grant`: what it may see."""
_TOKEN = re.compile(r"[A-Za-z0-9._~+-]{16,200}")
_FILTERED_PATHS = (
    "/api/v1/tasks",
    "/api/v1/snapshots",
    "/api/v1/sandboxes",
    "/api/v1/events",
    "/e/",
    "/docs",
    "/openapi.json",
)
"""Paths that name no task and show each token its own tasks. Other paths without a task need a token for all tasks."""
_SUBPROTOCOL = "token."
"""Precedes a token among the subprotocols of a WebSocket: a page cannot set other headers there."""
_PUBLIC_PATHS = frozenset({"/", "/healthz", "/readyz", "/ui"})
"""Paths that need no token. The page's own files below `/ui/` hold no data and need none either."""

RolloutOfToken = Callable[[str], tuple[str, str] | None]
"""Returns the task and the name of the running rollout that a token was made for; None for an unknown token."""


class AccessError(ValueError):
    """The configured tokens are malformed, doubled or cannot be read."""


@dataclass(frozen=True, slots=True)
class Grant:
    """What a request may see.

    Attributes:
        patterns: Shell patterns of the names of visible tasks; empty means all tasks.
    """

    patterns: tuple[str, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether all tasks are visible."""
        return not self.patterns

    def sees(self, task: str) -> bool:
        """Return whether a task is visible."""
        return not self.patterns or any(fnmatchcase(task, pattern) for pattern in self.patterns)

    def require(self, task: str) -> None:
        """Check that a task is visible.

        Raises:
            RefusalError: 403, the task is hidden.
        """
        if not self.sees(task):
            raise RefusalError(403, "hidden", f"this token sees tasks named {', '.join(self.patterns)}.")

    def require_whole(self) -> None:
        """Check that all tasks are visible, before a view of all tasks together is shown.

        Raises:
            RefusalError: 403, some tasks are hidden.
        """
        if self.patterns:
            raise RefusalError(403, "hidden", "this shows all tasks together; this token sees only some of them.")


ALL = Grant()


@dataclass(frozen=True, slots=True)
class Token:
    """A token's SHA-256 digest and what the token may see."""

    digest: bytes
    grant: Grant


def read_tokens(token: str | None, file: Path | None) -> tuple[Token, ...]:
    """Return the configured tokens.

    Args:
        token: A token that may see everything; None for no such token.
        file: A file with a line `TOKEN [PATTERN…]` for each token and comments after #; None for no file.

    Raises:
        AccessError: A token is malformed or doubled, or the file cannot be read or is empty.
    """
    lines: list[tuple[str, tuple[str, ...]]] = [] if token is None else [(token, ())]
    if file is not None:
        try:
            text = file.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise AccessError(f"token_file {file} cannot be read: {error}") from error
        fields = [line.split() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
        if not fields:
            raise AccessError(f"token_file {file} holds no token: write one token a line, of 16 characters or more")
        lines += [(field[0], tuple(field[1:])) for field in fields]
    for number, (text, _) in enumerate(lines, 1):
        if _TOKEN.fullmatch(text) is None:
            raise AccessError(
                f"token {number} is malformed: use 16 to 200 of A-Z a-z 0-9 . _ ~ + -, as from `openssl rand -hex 24`"
            )
    if len({text for text, _ in lines}) < len(lines):
        raise AccessError("a token is configured twice")
    return tuple(Token(sha256(text.encode()).digest(), Grant(patterns)) for text, patterns in lines)


class Access:
    """Authorises requests, before anything else looks at them."""

    def __init__(self, tokens: Sequence[Token]) -> None:
        self._tokens = tuple(tokens)
        self.needs_token = bool(tokens)

    def namespace(self, task: str) -> str:
        """Return the namespace of a task's shared trees; empty for none. Other tokens' tasks do not share it."""
        for token in self._tokens:
            if token.grant.patterns and token.grant.sees(task):
                return " ".join(token.grant.patterns)
        return ""

    def grant_of(self, token: str) -> Grant | None:
        """Return what a token may see; None for an unknown token. The time does not depend on the token."""
        digest, grant = sha256(token.encode()).digest(), None
        for known in self._tokens:
            if hmac.compare_digest(known.digest, digest):
                grant = known.grant
        return grant

    def admit(self, scope: Scope, rollout_of: RolloutOfToken) -> Grant:
        """Return what a request may see, and remove the token from its headers, so that no tool sees it.

        Args:
            scope: The ASGI scope; its headers and subprotocols are replaced.
            rollout_of: Looks up the tokens of rollouts.

        Raises:
            RefusalError: 401 for a missing or unknown token, 403 for a hidden task.
        """
        path: str = scope["path"]
        if not self._tokens or path in _PUBLIC_PATHS or path.startswith("/ui/"):
            return ALL
        task, rollout = _named(scope)
        presented = list(_presented(scope["headers"]))
        for text in presented:
            grant = self.grant_of(text)
            if grant is not None:
                if task:
                    grant.require(task)
                elif not path.startswith(_FILTERED_PATHS):
                    grant.require_whole()
                scope["headers"] = _without(scope["headers"], text)
                if "subprotocols" in scope:
                    scope["subprotocols"] = [name for name in scope["subprotocols"] if text not in name]
                return grant
        for text in presented:
            # The token of a rollout opens the agents' endpoints of that rollout, and nothing else.
            named = rollout_of(text) if path.startswith(("/t/", "/e/", "/ng-rollout/")) else None
            if named is not None and (not task or task == named[0]) and (not rollout or rollout == named[1]):
                return Grant((named[0],))
        raise RefusalError(
            401, "token", "a token is needed: send it as bearer token, as X-API-Key, or as X-Forkpoint-Token."
        )


def _named(scope: Scope) -> tuple[str, str]:
    """Return the task and the rollout that a request's path or headers name; empty strings for none."""
    segments = scope["path"].split("/")
    if segments[1:4] == ["api", "v1", "tasks"] and len(segments) > 4:
        return segments[4], ""
    if segments[1] == "t" and len(segments) > 2:
        return segments[2], segments[4] if len(segments) > 4 and segments[3] == "r" else ""
    if segments[1] == "ng-rollout" and len(segments) > 2:
        task, _, rollout_name = segments[2].rpartition("-")
        return task, rollout_name
    if segments[1] == "e":
        headers = dict(scope["headers"])
        task, rollout = headers.get(b"x-forkpoint-task", b""), headers.get(b"x-forkpoint-rollout", b"")
        return task.decode("latin-1"), rollout.decode("latin-1")
    return "", ""


def _presented(headers: ReceivedHeaders) -> Iterable[str]:
    for name, value in headers:
        text = value.decode("latin-1")
        if name in (HEADER, b"x-api-key"):
            yield text.strip()
        elif name == b"authorization":
            yield text.removeprefix("Bearer ").strip()
        elif name == b"sec-websocket-protocol":
            offered = (name.strip() for name in text.split(","))
            yield from (name.removeprefix(_SUBPROTOCOL) for name in offered if name.startswith(_SUBPROTOCOL))


def _without(headers: ReceivedHeaders, token: str) -> list[tuple[bytes, bytes]]:
    """Return headers without the ones that hold a token of the proxy."""
    secret = token.encode("latin-1")
    return [(name, value) for name, value in headers if name != HEADER and secret not in value]
