"""Known calls of this member's agents whose tasks it owns: answered where their bytes arrive, behind their steps.

A call is looked up as at a proxy of its own, and its step is one line of the log. While that is on its way, the call
has the turn of its rollout, and its number is the oldest that this ingress may make again (rules 3 and 4 of
`protocol`). Everything else takes the regular way: a call that an agent repeats after a 503, one whose rollout was at
another ingress last (rule 5), and one that comes while another call of the rollout waits or runs.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import structlog

from proxy.cluster.gate import step_of
from proxy.cluster.ingress import TaskIngress, WaitingCall
from proxy.cluster.member import Member
from proxy.cluster.protocol import StepId
from proxy.dataplane.hit_path import HitPath, HitSteps
from proxy.http.asgi import Scope
from proxy.refusals import RefusalError
from proxy.step import Stepper
from proxy.tree.keys import CallKey
from proxy.tree.rollout import Outcome, Rollout
from proxy.tree.tree import Record

if TYPE_CHECKING:
    import asyncio

    from proxy.cluster.owned import Owned

log = structlog.get_logger()


class BegunCall(NamedTuple):
    """A call that has its number."""

    task: TaskIngress
    call: WaitingCall


class OwnHits:
    """Implements `proxy.dataplane.app.LoggedAnswers`, and `HitSteps` for its hit path."""

    def __init__(
        self,
        member: Member,
        step: Stepper,
        authorise: Callable[[Scope], RefusalError | None],
        path: Callable[[HitSteps], HitPath],
    ) -> None:
        """Answer calls that the hit path `path(self)` finds."""
        self._member, self._step, self._authorise, self._path = member, step, authorise, path(self)
        self._found: tuple[Owned, Rollout, Record] | None = None

    def known(self, scope: Scope, body: bytes) -> bytes | None:
        """See `LoggedAnswers`."""
        return self._path.known(scope, body) if self._authorise(scope) is None else None

    def find(self, rollout: Rollout, key: CallKey) -> Record | None:
        """See `HitSteps`."""
        member = self._member
        owned = member.gate.owned.get(rollout.task)
        if owned is None or not owned.is_open or rollout.name in member.ingress.task(rollout.task).unanswered:
            return None
        if owned.steps.must_confirm(rollout.id, member.number, rollout.calls, None):
            return None
        return self._step.find(rollout, key)

    def take(self, rollout: Rollout, record: Record) -> None:
        """Note the step that `log` writes."""
        self._found = self._member.gate.owned[rollout.task], rollout, record

    def log(self, logged: Callable[[bool], None]) -> BegunCall:
        """See `LoggedAnswers`."""
        assert self._found is not None
        owned, rollout, record = self._found
        ingress, hello = self._member.ingress, self._member.hello
        task = ingress.task(rollout.task)
        call = ingress.begin(task)
        call_id = StepId(hello.member, hello.boot, call.number, 0)
        step = step_of(rollout, record, call_id, task.oldest, Outcome.HIT)
        self._step.order.begin_turn(rollout)

        def written(row: "asyncio.Future[None]") -> None:
            is_in_log = row.exception() is None and not owned.is_dropped
            try:
                if is_in_log:
                    # Not noted before it is taken, or the same call would find its answer and take no step.
                    self._step.take(rollout, record)
                    self._member.gate.took(owned, rollout, record, step)
                    ingress.end(task, call)
            except Exception as error:  # noqa: BLE001 - the regular way meets the same error and reports it
                log.debug("hit path failed", error=repr(error))
                is_in_log = False
            finally:
                self._step.order.end_turn(rollout)
            logged(is_in_log)

        owned.write([step]).add_done_callback(written)
        return BegunCall(task, call)
