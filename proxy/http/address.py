"""Addresses: the task, the rollout and the endpoint that a request's path and headers name (pure)."""

from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

from proxy.http.asgi import ReceivedHeaders
from proxy.names import ONLY, named
from proxy.refusals import RefusalError


@dataclass(frozen=True, slots=True)
class Address:
    """The parts of an agent's URL."""

    task: str  # Empty if a token stands for it.
    rollout: str  # Empty if a token stands for it or the endpoint's own protocol names it.
    endpoint: str  # `ONLY` for the only server of a task.
    path: str  # Decoded, below the endpoint, without its first slash.
    token: str = ""  # The bearer token that stands for task and rollout; empty if the URL or headers name them.
    raw: bytes = b"/"  # The path below the endpoint as it was sent, with its first slash.
    prefix: bytes = b""  # The path above `raw` as it was sent.


def address_of(raw_path: bytes, headers: ReceivedHeaders) -> Address:
    """Return the address of a request.

    The forms are `/t/{task}/r/{rollout}/{endpoint}/{path…}`, `/t/{task}/{endpoint}/{path…}`, `/e/{endpoint}/{path…}`
    with headers or a token, and NeMo-Gym's `/ng-rollout/{task}-{rollout}/{path…}` for the task's only server. Segments
    are split before they are decoded, so an escaped slash stays part of its name. Raises RefusalError: 400 for a
    malformed name or encoding, 401 without an identity, 404 for a path of another form.
    """
    raw = segments = raw_path.split(b"/")[1:]
    if b"%" in raw_path:
        segments = [unquote_to_bytes(segment) for segment in segments]
    try:
        names = [segment.decode() for segment in segments]
    except UnicodeDecodeError:
        raise RefusalError(400, "path-encoding", "the path is not UTF-8. Percent-encode it as UTF-8.") from None
    if names[0] == "t" and len(names) >= 5 and names[2] == "r":
        task, rollout = named("task", names[1]), named("rollout", names[3])
        return Address(task, rollout, names[4], "/".join(names[5:]), "", *_split(raw, 5))
    if names[0] == "t" and len(names) >= 3 and names[2] != "r":
        return Address(named("task", names[1]), "", names[2], "/".join(names[3:]), "", *_split(raw, 3))
    if names[0] == "ng-rollout" and len(names) >= 2:
        task, _, rollout = names[1].rpartition("-")
        task, rollout = named("task", task), named("rollout", rollout)
        return Address(task, rollout, ONLY, "/".join(names[2:]), "", *_split(raw, 2))
    if names[0] == "e" and len(names) >= 2:
        task, rollout, token = _identity(headers)
        return Address(task, rollout, names[1], "/".join(names[2:]), token, *_split(raw, 2))
    raise RefusalError(
        404,
        "no-such-path",
        "agents' paths are /t/{task}/r/{rollout}/{endpoint}/…, /t/{task}/{endpoint}/… if the endpoint's protocol names "
        "the rollout, or /e/{endpoint}/… with headers.",
    )


def _split(segments: list[bytes], at: int) -> tuple[bytes, bytes]:
    """Return the path that follows the first `at` segments, and the path of these segments."""
    return b"/" + b"/".join(segments[at:]), b"/" + b"/".join(segments[:at])


def _identity(headers: ReceivedHeaders) -> tuple[str, str, str]:
    """Return the task, the rollout and the token that headers name; either the names or the token are empty."""
    values = {name: value.decode("latin-1") for name, value in headers if name in _IDENTITY}
    if b"x-forkpoint-task" in values and b"x-forkpoint-rollout" in values:
        return named("task", values[b"x-forkpoint-task"]), named("rollout", values[b"x-forkpoint-rollout"]), ""
    token = values.get(b"x-api-key", "") or values.get(b"authorization", "").removeprefix("Bearer ").strip()
    if token:
        return "", "", token
    raise RefusalError(
        401,
        "no-identity",
        "the request names no rollout. Send X-Forkpoint-Task and X-Forkpoint-Rollout, or the token of "
        "POST /api/v1/tasks/{task}/rollouts as X-API-Key or bearer token.",
    )


_IDENTITY = {b"x-forkpoint-task", b"x-forkpoint-rollout", b"authorization", b"x-api-key"}
