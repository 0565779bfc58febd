"""Routes of the activity: the timeline of the last hour, and the stream of events."""

from collections.abc import AsyncIterator
from typing import Annotated

import orjson
from fastapi import Query, Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from proxy.control.activity import HOUR, Activity, Second, timeline
from proxy.control.routes.params import WHOLE, ControlDep, api_router, granted
from proxy.names import NAME_PATTERN
from proxy.refusals import RefusalError

_QUIET_S = 15.0
"""A stream without events sends a comment after this long, because proxies close idle connections."""

router = api_router("activity")


class TimelineView(BaseModel):
    """The timeline of the last hour, or since the start if that is less, in steps of `step_s`."""

    step_s: int
    seconds: list[Second]


@router.get("/timeline", dependencies=[WHOLE])
async def get_timeline(
    control: ControlDep,
    span_s: Annotated[int, Query(ge=1, le=HOUR)] = HOUR,
    step_s: Annotated[int, Query(ge=1, le=HOUR)] = 10,
) -> TimelineView:
    """Show hits, misses, waits and replays of the last hour, in steps."""
    return TimelineView(step_s=step_s, seconds=timeline(list(control.activity.seconds), span_s=span_s, step_s=step_s))


@router.get("/events", response_class=StreamingResponse, responses={200: {"content": {"text/event-stream": {}}}})
async def stream_events(
    control: ControlDep,
    request: Request,
    task: Annotated[
        str | None, Query(pattern=NAME_PATTERN, description="Also send the movements of this task's rollouts.")
    ] = None,
    limit: Annotated[int | None, Query(ge=1, le=1 << 31, description="End the stream after this many events.")] = None,
) -> StreamingResponse:
    """Stream events (SSE): `second` each second, `rollouts` of a task, `lost` if the client was too slow."""
    grant = granted(request)
    if task is None:
        grant.require_whole()
    else:
        grant.require(task)
        await control.tasks.find(task)
    if control.activity.full:
        detail = f"the limit of {control.activity.max_listeners} event streams is reached. Close one and retry."
        raise RefusalError(429, "listeners", detail)
    events = _events(control.activity, task, limit, whole=grant.whole)
    return StreamingResponse(events, media_type="text/event-stream", headers={"cache-control": "no-store"})


async def _events(activity: Activity, task: str | None, limit: int | None, *, whole: bool) -> AsyncIterator[bytes]:
    sent = 0
    with activity.listening(task, whole=whole) as listener:
        yield b"retry: 2000\n\n"
        while not activity.closed and (limit is None or sent < limit):
            event = await listener.next(_QUIET_S)
            if event is None:
                yield b": still here\n\n"
                continue
            name = event["event"]
            yield b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps(event))
            sent += 1
