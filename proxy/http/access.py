"""Authorisation: tokens, and the tasks that each of them may see.

Without tokens the proxy listens on loopback only, and refuses only pages of other sites (`browser_guard`).
"""

import hmac
import itertools
import re
from base64 import b64decode
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from urllib.parse import unquote

import structlog
from pydantic import ByteSize, TypeAdapter, ValidationError

from proxy.http.asgi import ReceivedHeaders, Scope
from proxy.names import ROLLOUT_TOKEN
from proxy.refusals import RefusalError

log = structlog.get_logger()

HEADER = b"x-forkpoint-token"
IDENTITY = (b"x-forkpoint-task", b"x-forkpoint-rollout")
"""Headers that name a task and a rollout."""
GRANT = "forkpoint.grant"
"""The key in a request's ASGI scope of its `Grant`: what it may see."""
_TOKEN = re.compile(r"[A-Za-z0-9._~+-]{16,200}")
_PIECE = re.compile(r"[A-Za-z0-9._~+-]{16,}")
"""A text of a token's characters that is long enough to hold one."""
_MAY_HOLD = re.compile(rb"fp_|%|basic |" + HEADER, re.IGNORECASE)
"""What a header with a rollout's token, or with an encoding of one, contains."""
_MAX_OFFSET = 64
"""How many characters of a piece may precede a token that is searched for: `token.`, `Bearer-`, a cookie's prefix."""
_HEX_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
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
_DISK = "disk="
"""Precedes the most bytes of kept states, such as `disk=10G`, behind a token's name."""
_DIGEST = "sha256:"
"""Precedes a token's SHA-256 in hexadecimal digits, which a token file may have in place of the token."""
_SUBPROTOCOL = "token."
"""Precedes a token among the subprotocols of a WebSocket: a page cannot set other headers there."""
_PUBLIC_PATHS = frozenset({"/", "/healthz", "/readyz", "/ui", "/manual"})
"""Paths that need no token."""
_PUBLIC_FOLDERS = ("/ui/", "/manual/")
"""The files of the page and of the manual hold no data and need no token either."""

_SIZE = TypeAdapter(ByteSize)
_TENANTS = 10_000
"""Tasks whose tenants are remembered."""

RolloutOfToken = Callable[[str], tuple[str, str] | None]
"""Returns the task and the name of the running rollout that a token was made for; None for an unknown token."""


class AccessError(ValueError):
    """The configured tokens are malformed, doubled or cannot be read."""


@dataclass(frozen=True, slots=True)
class Grant:
    """What a request may see."""

    patterns: tuple[str, ...] = ()  # Shell patterns of the names of visible tasks; empty means all tasks.
    rollout: str = ""  # The only rollout that the request may read, change or fork; empty for no such limit.
    name: str = ""  # Of the token, which rollouts have as their label `owner`; empty for a token without a name.
    disk_bytes: int | None = None  # Most bytes of kept states of the tasks that it sees; None for no limit of its own.

    @property
    def whole(self) -> bool:
        """Whether all tasks are visible."""
        return not self.patterns

    def sees(self, task: str) -> bool:
        """Return whether a task is visible."""
        return not self.patterns or any(fnmatchcase(task, pattern) for pattern in self.patterns)

    def require(self, task: str) -> None:
        """Raise RefusalError (403) if a task is hidden."""
        if not self.sees(task):
            raise RefusalError(403, "hidden", f"this token sees tasks named {', '.join(self.patterns)}.")

    def require_rollout(self, *names: str) -> None:
        """Raise RefusalError (403) if one of these names, unless empty, is another rollout than the token's."""
        if self.rollout and any(name and name != self.rollout for name in names):
            raise RefusalError(403, "hidden", f"this token stands for rollout {self.rollout!r} alone.")

    def require_no_rollout(self) -> None:
        """Raise RefusalError (403) if the request's token stands for one rollout, and so may not begin others."""
        if self.rollout:
            raise RefusalError(
                403, "hidden", f"this token stands for rollout {self.rollout!r} alone. Begin others with another token."
            )

    def require_whole(self) -> None:
        """Raise RefusalError (403) if some tasks are hidden, before a view of all tasks together is shown."""
        if self.patterns:
            raise RefusalError(403, "hidden", "this shows all tasks together; this token sees only some of them.")


ALL = Grant()


@dataclass(frozen=True, slots=True)
class Token:
    """A configured token, as its SHA-256."""

    digest: bytes
    grant: Grant
    length: int = 0  # In characters; 0 if only its digest was configured.


def read_tokens(token: str | None, file: Path | None, *, may_be_empty: bool = False) -> tuple[Token, ...]:
    """Return the configured tokens: one that may see everything, and those of a file.

    The file has a line `TOKEN [@NAME] [disk=SIZE] [PATTERN…]` for each token, or `sha256:DIGEST` in place of the token,
    and comments after #. Raises AccessError if a line is malformed or doubled, or the file cannot be read or is empty.
    """
    lines: list[tuple[str, tuple[str, ...]]] = [] if token is None else [(token, ())]
    if file is not None:
        try:
            text = file.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise AccessError(f"token_file {file} cannot be read: {error}") from error
        fields = [line.split() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
        if not fields and not may_be_empty:
            raise AccessError(f"token_file {file} holds no token: write one token a line, of 16 characters or more")
        lines += [(field[0], tuple(field[1:])) for field in fields]
    tokens = tuple(
        Token(_digest(number, text), _grant(number, fields), 0 if text.startswith(_DIGEST) else len(text))
        for number, (text, fields) in enumerate(lines, 1)
    )
    if len({known.digest for known in tokens}) < len(tokens):
        raise AccessError("a token is configured twice")
    return tokens


def _grant(number: int, fields: tuple[str, ...]) -> Grant:
    """Return what a line of the file grants, from what follows the token. No task is named @… or disk=…."""
    name = fields[0][1:] if fields and fields[0].startswith("@") else ""
    fields = fields[1:] if name else fields
    if not (fields and fields[0].startswith(_DISK)):
        return Grant(fields, name=name)
    if not (name and fields[1:]):
        raise AccessError(f"token {number} has a limit of its disk: write @NAME before it, and its tasks behind it")
    try:
        return Grant(fields[1:], name=name, disk_bytes=_SIZE.validate_python(fields[0].removeprefix(_DISK)))
    except ValidationError as error:
        raise AccessError(f"token {number} has no size behind {_DISK}: write a number and its unit, as 10G") from error


class TokenFile:
    """Reads the configured tokens again whenever the file has changed, in each process by itself."""

    def __init__(self, token: str | None, file: Path) -> None:
        self._token = token
        self._file = file
        self._seen = self._stamp()

    def changed(self) -> tuple[Token, ...] | None:
        """Return the tokens if the file has changed; None if it has not, or cannot be used, which is logged."""
        stamp = self._stamp()
        if stamp == self._seen:
            return None
        # Taken before the file is read: a change in between is noticed the next time.
        self._seen = stamp
        try:
            tokens = read_tokens(self._token, self._file, may_be_empty=True)
        except AccessError as error:
            log.warning("access.tokens_kept", error=str(error))
            return None
        log.info("access.tokens_read", tokens=len(tokens))
        return tokens

    def _stamp(self) -> tuple[int, int, int]:
        try:
            state = self._file.stat()
        except OSError:
            return (0, 0, 0)
        return state.st_mtime_ns, state.st_size, state.st_ino


def configured_access(token: str | None, file: Path | None) -> "Access":
    """Return the access of a proxy's settings. Raises AccessError."""
    watched = None if file is None else TokenFile(token, file)
    return Access(read_tokens(token, file), watched)


def _digest(number: int, text: str) -> bytes:
    """Return a configured token's SHA-256. Raises AccessError, which shows its `number` instead of the token."""
    if text.startswith(_DIGEST):
        digest = text.removeprefix(_DIGEST)
        if _HEX_DIGEST.fullmatch(digest) is None:
            raise AccessError(f"token {number} is not a digest: write sha256: and 64 hexadecimal digits")
        return bytes.fromhex(digest)
    if _TOKEN.fullmatch(text) is None:
        raise AccessError(
            f"token {number} is malformed: use 16 to 200 of A-Z a-z 0-9 . _ ~ + -, as from `openssl rand -hex 24`"
        )
    return sha256(text.encode()).digest()


class Access:
    """Authorises requests, before anything else looks at them."""

    def __init__(self, tokens: Sequence[Token], file: TokenFile | None = None) -> None:
        self._file = file
        # For as long as the proxy runs: where the last token of the file is revoked, all requests are refused.
        self.needs_token = bool(tokens)
        self._use(tokens)

    def _use(self, tokens: Sequence[Token]) -> None:
        self._tokens = tuple(tokens)
        self.tenant = lru_cache(maxsize=_TENANTS)(self._tenant)
        self._lengths = {token.length for token in tokens if token.length}

    def namespace(self, task: str) -> str:
        """Return the namespace of a task's shared trees; empty for none. Other tokens' tasks do not share it."""
        tenant = self.tenant(task)
        return "" if tenant is None else " ".join(tenant.patterns)

    def _tenant(self, task: str) -> Grant | None:
        """Return the grant of the first token for some tasks that sees a task; None if none of them does."""
        grants = (token.grant for token in self._tokens)
        return next((grant for grant in grants if grant.patterns and grant.sees(task)), None)

    def grant_of(self, token: str) -> Grant | None:
        """Return what a token may see; None for an unknown token. The time does not depend on the token."""
        digest, grant = sha256(token.encode()).digest(), None
        for known in self._tokens:
            if hmac.compare_digest(known.digest, digest):
                grant = known.grant
        return grant

    def admit(self, scope: Scope, rollout_of: RolloutOfToken) -> Grant:
        """Return what a request may see, and remove its token from the scope. Raises RefusalError (401, 403)."""
        path: str = scope["path"]
        if self._file is not None and (tokens := self._file.changed()) is not None:
            self._use(tokens)
        if not self.needs_token or path in _PUBLIC_PATHS or path.startswith(_PUBLIC_FOLDERS):
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
                _remove(scope, text)
                return grant
        for text in presented:
            # The token of a rollout opens the agents' endpoints of that rollout, and nothing else. So the path or the
            # headers name both, or an address without names is made of the token.
            named = rollout_of(text) if path.startswith(("/t/", "/e/", "/ng-rollout/")) else None
            unnamed = path.startswith("/e/") and not task and not rollout
            if named is not None and (unnamed or (task, rollout) == named):
                _remove(scope, text)
                if unnamed:
                    # The names stand for the token from here on, so that the token is in no header any more.
                    scope["headers"] += zip(IDENTITY, (name.encode("latin-1") for name in named), strict=True)
                return Grant((named[0],), named[1])
        raise RefusalError(
            401, "token", "a token is needed: send it as bearer token, as X-API-Key, or as X-Forkpoint-Token."
        )

    def without_tokens(self, headers: ReceivedHeaders) -> list[tuple[bytes, bytes]]:
        """Return the headers without tokens of the proxy in any form, also those that `admit` was not shown."""
        # One look at all of them: only a rollout's token can be there if no others exist, and it shows how it begins.
        if not self._tokens and _MAY_HOLD.search(b"\n".join(itertools.chain.from_iterable(headers))) is None:
            return list(headers)
        return [
            (name, value) for name, value in headers
            if name != HEADER and not self.holds_token(value.decode("latin-1"))
        ]  # fmt: skip

    def holds_token(self, text: str) -> bool:
        """Return whether a text contains a token of the proxy, also in encodings of URLs and Basic credentials."""
        texts = [text]
        if "%" in text:
            texts.append(unquote(text))
        if text[:6].lower() == "basic ":
            texts.append(_decoded(text[6:].strip()))
        return any(self._holds_token(each) for each in texts)

    def refuse_token(self, target: str) -> None:
        """Raise RefusalError (400) if a target holds a token, because the target is recorded and sent on."""
        if self.holds_token(target):
            raise RefusalError(
                400, "token", "the target holds a token of this proxy. Send it in a header, and make a new token."
            )

    def _holds_token(self, text: str) -> bool:
        if "fp_" in text and ROLLOUT_TOKEN.search(text) is not None:
            return True
        # Only digests are known, so each part of the text that may be a token is looked up.
        return bool(self._tokens) and any(
            self.grant_of(part) is not None for piece in _PIECE.findall(text) for part in self._parts(piece)
        )

    def _parts(self, piece: str) -> Iterator[str]:
        """Yield what may be a token in a piece of a token's characters: all of it, or TOKEN in `token.TOKEN`."""
        yield piece
        for length in self._lengths:
            # Not in every long text: a megabyte of base64 would have a million parts.
            last = min(len(piece) - length, _MAX_OFFSET)
            yield from (piece[at : at + length] for at in range(last + 1))


def _decoded(credentials: str) -> str:
    try:
        return b64decode(credentials + "==").decode("latin-1")
    except ValueError:
        return ""


def _remove(scope: Scope, token: str) -> None:
    """Remove the headers and the subprotocols that hold a token from a request."""
    secret = token.encode("latin-1")
    scope["headers"] = [(name, value) for name, value in scope["headers"] if name != HEADER and secret not in value]
    if "subprotocols" in scope:
        scope["subprotocols"] = [name for name in scope["subprotocols"] if token not in name]


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
        task, rollout = (headers.get(name, b"") for name in IDENTITY)
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
