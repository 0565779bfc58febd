"""Which rollout sends a request, and which endpoint it is for: addresses and dialects, remembered between requests.

Parsing and checking happen once per URL, per host name and per endpoint; a hit reads only these memories.
"""

import secrets
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from proxy.dialects import dialect_of, mcp
from proxy.dialects.base import Call, Dialect, Meaning, Request
from proxy.http.address import Address, address_of
from proxy.http.browser_guard import BROWSERS, refuse_foreign
from proxy.http.lru_cache import LruCache
from proxy.refusals import RefusalError
from proxy.storage.rollouts import RolloutStore
from proxy.tree.rollout import Rollout

MAX_REMEMBERED = 8192
"""Limits each memory of the data plane: URLs, host names, dialects, calls. 8,192 URLs are as many rollouts."""

MAX_REMEMBERED_BODY_BYTES = 2048
"""Limits the body of a remembered request, so that the memory of calls stays below 16 MiB of bodies."""


_SESSIONS = {"mcp": mcp.SESSION.encode(), "e2b": b"e2b-sandbox-id"}
"""The headers in which endpoints get their sessions, by the endpoints' names."""


class Asked(NamedTuple):
    """What a request asks for, possibly of another rollout; requests with the same `same` get the same answer."""

    meaning: Meaning
    same: Hashable
    request: Request | None


class Addressing:
    """Reads the addresses of requests to agents' endpoints and refuses requests of other sites' pages.

    `names` returns the host names that requests may be sent to; see `Engine.names`.
    """

    def __init__(self, names: Callable[[], tuple[str, ...] | None], rollouts: RolloutStore) -> None:
        self._names, self._rollouts = names, rollouts
        self._addresses: LruCache[bytes, Address] = LruCache(MAX_REMEMBERED)
        self._hosts: LruCache[bytes, bool] = LruCache(MAX_REMEMBERED)
        self._dialects: LruCache[tuple[int, str], Dialect] = LruCache(MAX_REMEMBERED)
        self._calls: LruCache[Hashable, Call] = LruCache(MAX_REMEMBERED)

    def remembered(self, scope: Mapping[str, Any]) -> Address | None:
        """Return the address of a request whose URL and host name were accepted before; None for any other."""
        address = self._addresses.get(scope["raw_path"])
        return address if address is not None and self._is_familiar(scope["headers"]) else None

    def address(self, scope: Mapping[str, Any]) -> Address:
        """Return a request's address, with what its token stands for. Raises RefusalError: 400 to 404, 401, 403."""
        headers, raw_path = scope["headers"], scope["raw_path"]
        # The Host header is checked once for each name: a page whose own name was rebound to this address sends
        # that name (DNS rebinding).
        if not self._is_familiar(headers):
            refuse_foreign(scope["method"], headers, tool=True, names=self._names())
            # Only after the check passed: a refused name is checked again each time and cannot push accepted names
            # out.
            self._hosts.update((value, True) for name, value in headers if name == b"host")
        address = self._addresses.get(raw_path)
        if address is None:
            # A malformed path raises here, so only well-formed addresses are remembered.
            address = address_of(raw_path, headers)
            # `/e/` names its rollout in headers. Docker's paths name one exec instance each, so they do not come again.
            if raw_path.startswith((b"/t/", b"/ng-rollout/")) and address.endpoint != "docker":
                self._addresses[raw_path] = address
        # A token is resolved on each request, because the rollout that it stands for may have ended.
        return self._with_rollout_of_token(address) if address.token else address

    def dialect(self, rollout: Rollout, endpoint: str) -> Dialect:
        """Return an endpoint's dialect in the rollout's environment. Raises RefusalError (404) if there is none."""
        # By tree and not by task: a PUT may give the task another environment while this rollout stays in its old
        # tree.
        key = (rollout.tree.id, endpoint)
        dialect = self._dialects.get(key)
        if dialect is None:
            dialect = self._dialects[key] = dialect_of(rollout.tree.spec, endpoint)
        return dialect

    def meaning(self, scope: Mapping[str, Any], address: Address, body: bytes, rollout: Rollout) -> Meaning:
        """Return what a request of a running rollout means to the dialect of its endpoint; see `Dialect.read`."""
        dialect = self.dialect(rollout, address.endpoint)
        # Where headers matter, a remembered call may be another rollout's.
        if dialect.headers_matter:
            return dialect.read(request_of(scope, address, body))
        return self.asked(scope, address, body, rollout).meaning

    def asked(self, scope: Mapping[str, Any], address: Address, body: bytes, rollout: Rollout) -> Asked:
        """Return what a request of a running rollout asks for, whichever rollout of its tree sends it."""
        dialect = self.dialect(rollout, address.endpoint)
        # Dialects of other packages may have no such attribute.
        deciding = getattr(dialect, "deciding", None) if dialect.headers_matter else ()
        if deciding is None:
            # Any header may decide, and they differ from client to client: remembering calls would hit too rarely.
            return Asked(dialect.read(request := request_of(scope, address, body)), None, request)
        # Rollouts of a group send the same bytes, and a miss is read by the hit path and by the regular path. The key
        # holds all that decides the meaning, so equal keys mean equal calls.
        key: Hashable = (address.endpoint, address.path, scope["method"], scope["query_string"], body, rollout.tree.id)
        if deciding:
            key = (key, tuple([header for header in scope["headers"] if header[0] in deciding]))
        call = self._calls.get(key)
        if call is not None:
            return Asked(call, key, None)
        meaning = dialect.read(request := request_of(scope, address, body))
        # Only calls: other meanings (begin, end, cancel) change something and are not hits.
        if not isinstance(meaning, Call) or len(body) > MAX_REMEMBERED_BODY_BYTES:
            return Asked(meaning, None, request)
        self._calls[key] = meaning
        return Asked(meaning, key, request)

    def _is_familiar(self, headers: list[tuple[bytes, bytes]]) -> bool:
        """Return whether no browser sent these headers and their host name was accepted before. Part of a hit."""
        # A browser's request never counts as familiar, so each one goes through `refuse_foreign`, whatever its host
        # name.
        for name, value in headers:  # noqa: SIM110 - a generator takes a call for each header
            if name in BROWSERS or (name == b"host" and value not in self._hosts):
                return False
        return True

    def _with_rollout_of_token(self, address: Address) -> Address:
        named = self._rollouts.by_token(address.token)
        if named is None:
            raise RefusalError(
                401, "token", "no running rollout has this token. POST /api/v1/tasks/{task}/rollouts gives one."
            )
        return replace(address, task=named[0], rollout=named[1])


def session_of(address: Address, headers: list[tuple[bytes, bytes]]) -> str:
    """Return the session that a request to an endpoint with sessions names, which is its rollout; empty for none."""
    named = _SESSIONS.get(address.endpoint)
    return next((value.decode("latin-1") for name, value in headers if name == named), "")


def request_of(scope: Mapping[str, Any], address: Address, body: bytes) -> Request:
    """Return a request as its dialect reads it."""
    query = scope["query_string"].decode("latin-1")
    headers = tuple((name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"])
    host = next((value for name, value in headers if name == "host"), "")
    target = address.raw.decode("latin-1") + (f"?{query}" if query else "")
    base = f"{scope.get('scheme', 'http')}://{host}{address.prefix.decode('latin-1')}"
    # Requests without a rollout in their address may begin one, which then gets this random name.
    fresh = "" if address.rollout and address.endpoint != "e2b" else secrets.token_hex(12)
    return Request(scope["method"], target, headers, body, address.rollout, base, fresh)
