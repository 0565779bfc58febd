"""Routes of egress: what programs in sandboxes requested from hosts outside."""

from dataclasses import asdict
from typing import Annotated

from fastapi import Request
from pydantic import BaseModel

from proxy.control.paging import ListQuery, Page, list_query
from proxy.control.routes.params import ControlDep, TaskQuery, api_router, granted
from proxy.control.views.resources import NodeName
from proxy.telemetry.egress_log import EgressEvent
from proxy.times import UtcTime
from sandboxes.calls import EgressOutcome

router = api_router("resources")


class EgressRequestView(BaseModel):
    """A request of a program in a sandbox to a host outside.

    Attributes:
        at: When its call had ended.
        rollout: Name of the rollout that made the call; null for a replay.
        method: Method of the request; `CONNECT` for a tunnel.
        url: Its URL, or host and port of a tunnel. Programs choose it: show it as text.
        outcome: `recorded`: the response was received and recorded. `repeated`: it came from the recording. `live`:
            bytes passed that are not recorded. `refused`: by the rules. `failed`: there was no response.
        size_bytes: Bytes of the response's body, or what had come through a tunnel so far.
        detail: Why it was refused or failed; empty otherwise.
    """

    at: UtcTime
    task: str
    rollout: str | None
    node: NodeName
    method: str
    url: str
    outcome: EgressOutcome
    status: int
    size_bytes: int
    detail: str


@router.get("/egress", name="list_egress")
async def list_egress(
    control: ControlDep,
    request: Request,
    wanted: Annotated[ListQuery, list_query("at", default="-at")],
    task: TaskQuery = None,
) -> Page[EgressRequestView]:
    """List the latest requests of sandboxes to hosts outside, up to 1,000 since this proxy started."""
    grant = granted(request)

    def visible(event: EgressEvent) -> bool:
        name = control.store.trees.task_of(event.tree)
        return task in (None, name) and grant.sees(name)

    part = wanted.sorted_part(filter(visible, control.counts.egress.events), lambda event: (event.number,))
    return part.page(lambda event: _view(event, control.store.trees.task_of(event.tree)))


def _view(event: EgressEvent, task: str) -> EgressRequestView:
    return EgressRequestView(
        at=event.at, task=task, rollout=event.rollout, node=f"n{event.node}", **asdict(event.exchange)
    )
