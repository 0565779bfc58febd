"""Labels that a request brings for the rollout that it begins: in a header, or in the query of an agent's base URL."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote_to_bytes

from proxy.http.access import ALL, GRANT, Grant
from proxy.http.asgi import ReceivedHeaders, Scope
from proxy.tree.labels import parsed

HEADER = b"x-forkpoint-labels"
"""The header with labels. It goes to no tool server."""
OWNER = "owner"
"""The label with the name of the token that began a rollout."""
_PARAMETER = b"forkpoint-labels="
"""The query parameter with labels. It is removed from the query, so that no key and no tool server has it."""
_SENT = "forkpoint.labels"
"""The key in a request's ASGI scope of the labels in its query."""


def take_from_query(scope: Scope) -> None:
    """Move labels out of a request's query. Idempotent."""
    query: bytes = scope.get("query_string", b"")
    if not query or _PARAMETER not in query:
        return
    parts = query.split(b"&")
    sent = [part for part in parts if part.startswith(_PARAMETER)]
    if sent:
        scope["query_string"] = b"&".join(part for part in parts if not part.startswith(_PARAMETER))
        scope[_SENT] = sent[-1].removeprefix(_PARAMETER)


def labels_of(scope: Mapping[str, Any], headers: ReceivedHeaders) -> dict[str, str]:
    """Return the labels of a request that begins a rollout, the header's first. Raises RefusalError (422)."""
    # Decoded twice, here as the value of a query, and then as the value of a label.
    in_query = parsed(unquote_to_bytes(scope.get(_SENT, b"")))
    in_header = parsed(b",".join(value for name, value in headers if name == HEADER))
    return owned({**in_query, **in_header}, scope.get(GRANT, ALL))


def owned(labels: Mapping[str, str], grant: Grant) -> dict[str, str]:
    """Return a new rollout's labels with the name of the request's token as their owner, if the token has a name."""
    return {**labels, OWNER: grant.name} if grant.name else dict(labels)
