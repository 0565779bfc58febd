"""Who may ask: tokens, and the tasks that each of them sees.

Without tokens the proxy listens on loopback only, and whoever reaches it may do everything, but for pages of other
sites (`origin`).
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
"""Under this name a request's scope holds what it may see."""
_TOKEN = re.compile(r"[A-Za-z0-9._~+-]{16,200}")
_PARTED = ("/api/v1/tasks", "/api/v1/snapshots", "/api/v1/sandboxes", "/api/v1/events", "/e/", "/docs", "/openapi.json")
"""What names no task and shows each token its own; anything else that names none is for tokens that see all."""
_SUBPROTOCOL = "token."
"""Before a token that a page opens a websocket with: it has no other place to put one."""
_FREE = frozenset({"/", "/healthz", "/readyz", "/ui"})
"""Asked for without a token; and the files of the page, which tell nothing."""

RolloutOfToken = Callable[[str], tuple[str, str] | None]
"""Returns the task and name of the running rollout that a token stands for."""


class AccessError(ValueError):
    """The tokens cannot be used as they are given."""


@dataclass(frozen=True, slots=True)
class Grant:
    """What a request may see. patterns: of tasks' names; empty where it is all of them."""

    patterns: tuple[str, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether nothing is hidden."""
        return not self.patterns

    def sees(self, task: str) -> bool:
        return not self.patterns or any(fnmatchcase(task, pattern) for pattern in self.patterns)

    def require(self, task: str) -> None:
        """Refuse where task is hidden.

        Raises:
            Refused: 403.
        """
        if not self.sees(task):
            raise RefusalError(403, "hidden", f"this token sees tasks named {', '.join(self.patterns)}.")

    def require_whole(self) -> None:
        """Refuse what shows of all tasks together to who sees only some.

        Raises:
            Refused: 403.
        """
        if self.patterns:
            raise RefusalError(403, "hidden", "this shows all tasks together; this token sees only some of them.")


ALL = Grant()


@dataclass(frozen=True, slots=True)
class Token:
    """A token, by its digest, and what it sees."""

    digest: bytes
    grant: Grant


def read_tokens(token: str | None, file: Path | None) -> tuple[Token, ...]:
    """Return the tokens: one that sees everything, and those of a file: `TOKEN [PATTERN…]` a line, # for comments.

    Raises:
        AccessError: one cannot be a token, is there twice, or the file cannot be read or has none.
    """
    lines: list[tuple[str, tuple[str, ...]]] = [] if token is None else [(token, ())]
    if file is not None:
        try:
            text = file.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise AccessError(f"token_file {file} cannot be read: {error}") from error
        words = [line.split() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
        if not words:
            raise AccessError(f"token_file {file} holds no token: write one a line, of 16 characters or more")
        lines += [(word[0], tuple(word[1:])) for word in words]
    for number, (text, _) in enumerate(lines, 1):
        if _TOKEN.fullmatch(text) is None:
            raise AccessError(
                f"token {number} is none: 16 to 200 of A-Z a-z 0-9 . _ ~ + -. `openssl rand -hex 24` makes one"
            )
    if len({text for text, _ in lines}) < len(lines):
        raise AccessError("a token is there twice")
    return tuple(Token(sha256(text.encode()).digest(), Grant(patterns)) for text, patterns in lines)


class Access:
    """Looks at each request before anything else does."""

    def __init__(self, tokens: Sequence[Token]) -> None:
        self._tokens = tuple(tokens)
        self.needs_token = bool(tokens)

    def namespace(self, task: str) -> str:
        """Return what separates a task's shared trees from those that other tokens see; empty for none."""
        for token in self._tokens:
            if token.grant.patterns and token.grant.sees(task):
                return " ".join(token.grant.patterns)
        return ""

    def grant_of(self, token: str) -> Grant | None:
        """Return what a token sees; None for one that is none. It takes as long for any."""
        digest, found = sha256(token.encode()).digest(), None
        for known in self._tokens:
            if hmac.compare_digest(known.digest, digest):
                found = known.grant
        return found

    def admit(self, scope: Scope, rollout_of: RolloutOfToken) -> Grant:
        """Return what a request may see, and take the token out of its headers: nobody behind this sees it.

        Raises:
            Refused: 401, no token or a wrong one; 403, its task is hidden.
        """
        path: str = scope["path"]
        if not self._tokens or path in _FREE or path.startswith("/ui/"):
            return ALL
        task, rollout = _named(scope)
        presented = list(_presented(scope["headers"]))
        for text in presented:
            grant = self.grant_of(text)
            if grant is not None:
                if task:
                    grant.require(task)
                elif not path.startswith(_PARTED):
                    grant.require_whole()
                scope["headers"] = _without(scope["headers"], text)
                if "subprotocols" in scope:
                    scope["subprotocols"] = [word for word in scope["subprotocols"] if text not in word]
                return grant
        for text in presented:
            # What was begun with a token may be gone on with by its own.
            named = rollout_of(text) if path.startswith(("/t/", "/e/", "/ng-rollout/")) else None
            if named is not None and (not task or task == named[0]) and (not rollout or rollout == named[1]):
                return Grant((named[0],))
        raise RefusalError(
            401, "token", "a token is needed: send it as bearer token, as X-API-Key, or as X-Forkpoint-Token."
        )


def _named(scope: Scope) -> tuple[str, str]:
    """Return the task and the rollout that a request's path or headers name; empty where they name none."""
    words = scope["path"].split("/")
    if words[1:4] == ["api", "v1", "tasks"] and len(words) > 4:
        return words[4], ""
    if words[1] == "t" and len(words) > 2:
        return words[2], words[4] if len(words) > 4 and words[3] == "r" else ""
    if words[1] == "ng-rollout" and len(words) > 2:
        task, _, rollout_name = words[2].rpartition("-")
        return task, rollout_name
    if words[1] == "e":
        found = dict(scope["headers"])
        task, rollout = found.get(b"x-forkpoint-task", b""), found.get(b"x-forkpoint-rollout", b"")
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
            offered = (word.strip() for word in text.split(","))
            yield from (word.removeprefix(_SUBPROTOCOL) for word in offered if word.startswith(_SUBPROTOCOL))


def _without(headers: ReceivedHeaders, token: str) -> list[tuple[bytes, bytes]]:
    """Return headers without those that hold a token of ours."""
    secret = token.encode("latin-1")
    return [(name, value) for name, value in headers if name != HEADER and secret not in value]
