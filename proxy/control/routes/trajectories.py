"""Routes of trajectories: rollouts as training data, one JSON object a line."""

from typing import Annotated, Any

from fastapi import Query
from fastapi.responses import StreamingResponse

from proxy.address import TOTAL
from proxy.control.parts import ControlPlane
from proxy.control.routes.params import WHOLE, ControlDep, LabelQuery, TaskDep, api_router, wanted_labels
from proxy.names import NAME_PATTERN
from proxy.transfer.trajectories import ANSWER_BYTES, TrajectoryRequest, count_rollouts, trajectories

MEDIA_TYPE = "application/jsonl"
RolloutQuery = Annotated[str | None, Query(pattern=NAME_PATTERN, description="Only rollouts of this name.")]
AnswerBytes = Annotated[
    int, Query(ge=0, le=1 << 30, description="Longest answer in bytes; longer ones are cut and marked.")
]
TurnsQuery = Annotated[
    bool, Query(description="One line for each turn of agents inside their sandbox, as a tree for training.")
]

router = api_router("data")
_RESPONSES: dict[int | str, dict[str, Any]] = {200: {"content": {MEDIA_TYPE: {}}}}


@router.get("/trajectories", response_class=StreamingResponse, responses=_RESPONSES, dependencies=[WHOLE])
async def read_trajectories(
    control: ControlDep, label: LabelQuery = None, answer_bytes: AnswerBytes = ANSWER_BYTES
) -> StreamingResponse:
    """Stream the rollouts of all tasks, with their calls, answers, timings and labels."""
    # In a cluster, the other members have the other tasks.
    return _stream(control, TrajectoryRequest(control.own_tasks(), None, wanted_labels(label), answer_bytes))


@router.get("/tasks/{task}/trajectories", response_class=StreamingResponse, responses=_RESPONSES)
async def read_task_trajectories(
    control: ControlDep,
    task: TaskDep,
    label: LabelQuery = None,
    rollout: RolloutQuery = None,
    answer_bytes: AnswerBytes = ANSWER_BYTES,
    *,
    turns: TurnsQuery = False,
) -> StreamingResponse:
    """Stream the rollouts of one task, with their calls, answers, timings and labels."""
    return _stream(control, TrajectoryRequest((task.name,), rollout, wanted_labels(label), answer_bytes, turns))


def _stream(control: ControlPlane, request: TrajectoryRequest) -> StreamingResponse:
    control.journal.fold()
    database = control.store.database
    headers = {"x-accel-buffering": "no"}
    if not request.turns:
        headers[TOTAL] = str(count_rollouts(database, request))
    return StreamingResponse(trajectories(database, request), media_type=MEDIA_TYPE, headers=headers)
