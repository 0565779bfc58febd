"""Who asks, and for what: identity and tool from a request's path and headers (pure)."""

from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

from proxy.http.asgi import ReceivedHeaders
from proxy.names import ONLY, named
from proxy.refusals import RefusalError


@dataclass(frozen=True, slots=True)
class Address:
    """What a data-plane URL says. token: the bearer token that stands for task and rollout where the URL names none.

    rollout: empty too where the endpoint's own protocol names it. path: decoded, below the endpoint. raw: as it was
    sent, with its slash. prefix: what stands before that.
    """

    task: str
    rollout: str
    endpoint: str
    path: str
    token: str = ""
    raw: bytes = b"/"
    prefix: bytes = b""


def address_of(raw_path: bytes, headers: ReceivedHeaders) -> Address:
    """Read `/t/{task}/r/{rollout}/{endpoint}/{path…}`, `/t/{task}/{endpoint}/{path…}`, or `/e/{endpoint}/{path…}` with
    headers or a token; or NeMo-Gym's `/ng-rollout/{task}-{rollout}/{path…}`, which leads to the task's only server.

    Segments are split before they are decoded, so an escaped slash in a name is seen as what it is.

    Raises:
        Refused: 400 for a name that is not allowed or bytes that are no UTF-8, 404 for a path of another shape, 401
            where nothing says who asks.
    """
    raw = segments = raw_path.split(b"/")[1:]
    if b"%" in raw_path:
        segments = [unquote_to_bytes(segment) for segment in segments]
    try:
        words = [segment.decode() for segment in segments]
    except UnicodeDecodeError:
        raise RefusalError(400, "path-encoding", "the path is not UTF-8. Percent-encode it as UTF-8.") from None
    if words[0] == "t" and len(words) >= 5 and words[2] == "r":
        task, rollout = named("task", words[1]), named("rollout", words[3])
        return Address(task, rollout, words[4], "/".join(words[5:]), "", *_parted(raw, 5))
    if words[0] == "t" and len(words) >= 3 and words[2] != "r":
        return Address(named("task", words[1]), "", words[2], "/".join(words[3:]), "", *_parted(raw, 3))
    if words[0] == "ng-rollout" and len(words) >= 2:
        task, _, rollout = words[1].rpartition("-")
        names = named("task", task), named("rollout", rollout)
        return Address(*names, ONLY, "/".join(words[2:]), "", *_parted(raw, 2))
    if words[0] == "e" and len(words) >= 2:
        task, rollout, token = _by_headers(headers)
        return Address(task, rollout, words[1], "/".join(words[2:]), token, *_parted(raw, 2))
    raise RefusalError(
        404,
        "no-such-path",
        "the data plane is /t/{task}/r/{rollout}/{endpoint}/…, /t/{task}/{endpoint}/… where its protocol names the "
        "rollout, or /e/{endpoint}/… with headers.",
    )


def _parted(segments: list[bytes], at: int) -> tuple[bytes, bytes]:
    """Return what follows the first segments as a path, and those."""
    return b"/" + b"/".join(segments[at:]), b"/" + b"/".join(segments[:at])


def _by_headers(headers: ReceivedHeaders) -> tuple[str, str, str]:
    found = {name: value.decode("latin-1") for name, value in headers if name in _IDENTITY}
    if b"x-forkpoint-task" in found and b"x-forkpoint-rollout" in found:
        return named("task", found[b"x-forkpoint-task"]), named("rollout", found[b"x-forkpoint-rollout"]), ""
    token = found.get(b"x-api-key", "") or found.get(b"authorization", "").removeprefix("Bearer ").strip()
    if token:
        return "", "", token
    raise RefusalError(
        401,
        "no-identity",
        "nothing says which rollout asks. Send X-Forkpoint-Task and X-Forkpoint-Rollout, or the token of "
        "POST /api/v1/tasks/{task}/rollouts as X-API-Key or bearer token.",
    )


_IDENTITY = {b"x-forkpoint-task", b"x-forkpoint-rollout", b"authorization", b"x-api-key"}
