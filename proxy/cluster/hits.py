"""Known calls at the owner of their task: answered where their bytes arrive, behind their steps.

A call is looked up as at a proxy of its own, and its step is one line of the log. While that is on its way, the call
has the turn of its rollout, and an agent's call is one that this ingress may make again (rule 4 of `protocol`).
Everything else takes the regular way: a call that may have taken its step, one whose rollout was at another ingress
last (rule 5), and one that comes while another call of the rollout waits or runs.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from proxy.cluster.gate import step_of
from proxy.cluster.link.greeting import Hello
from proxy.cluster.link.passing import PEER, TUNNEL, Passed
from proxy.cluster.member import Member
from proxy.cluster.owned import Owned
from proxy.cluster.protocol import StepId
from proxy.dataplane.hit_path import HitPath, HitSteps
from proxy.engine import Engine
from proxy.http.asgi import Scope
from proxy.refusals import RefusalError
from proxy.tree.keys import CallKey
from proxy.tree.rollout import Outcome, Rollout
from proxy.tree.tree import Record

if TYPE_CHECKING:
    import asyncio

    from proxy.cluster.ingress import WaitingCall


class OwnHits:
    """Implements `proxy.dataplane.app.LoggedAnswers`, and `HitSteps` for its hit path."""

    def __init__(
        self,
        member: Member,
        engine: Engine,
        authorise: Callable[[Scope], RefusalError | None],
        path: Callable[[HitSteps], HitPath],
    ) -> None:
        """Answer calls that the hit path `path(self)` finds."""
        self._member, self._step, self._closing = member, engine.step, engine.lifecycle.closing
        self._authorise, self._path = authorise, path(self)
        # The call that is looked up: the peer that has passed it on, and what that says of it.
        self._passed: tuple[Hello, Passed] | None = None
        self._found: tuple[Owned, Rollout, Record] | None = None

    def of(self, state: Mapping[str, Any]) -> Callable[[Scope, bytes], bytes | None]:
        """See `LoggedAnswers`."""
        # What comes through a tunnel is the agent's own word.
        return (lambda *_: None) if TUNNEL in state else partial(self._known, state.get(PEER))

    def _known(self, peer: Hello | None, scope: Scope, body: bytes) -> bytes | None:
        self._passed = None
        if peer is not None:
            passed = Passed.taken_from(scope)
            if passed is None:
                return None
            self._passed = peer, passed
        if self._closing.is_set() or self._authorise(scope) is not None:
            return None
        return self._path.known(scope, body)

    def find(self, rollout: Rollout, key: CallKey) -> Record | None:
        """See `HitSteps`."""
        owned = self._member.gate.owned.get(rollout.task)
        may_answer = owned is not None and owned.is_open and self._is_new(owned, rollout)
        return self._step.find(rollout, key) if may_answer else None

    def _is_new(self, owned: Owned, rollout: Rollout) -> bool:
        """Return whether a call is plainly none that was made before, and its ingress was the rollout's last one."""
        if self._passed is None:
            ingress, is_again = self._member.number, rollout.name in self._member.ingress.task(owned.task).unanswered
        else:
            peer, passed = self._passed
            if (passed.task, passed.view) != (owned.task, owned.view):
                return False
            owned.floors.note(peer.member, peer.boot, passed.oldest)
            call = StepId(peer.member, peer.boot, passed.number, 0)
            is_late = owned.floors.is_late(*call[:3])
            ingress = peer.member
            is_again = passed.is_again or is_late or owned.steps.answered(rollout.id, call) is not None
        return not is_again and not owned.steps.must_confirm(rollout.id, ingress, rollout.calls, None)

    def take(self, rollout: Rollout, record: Record) -> None:
        """Note the step that `log` writes."""
        self._found = self._member.gate.owned[rollout.task], rollout, record

    def log(self, logged: Callable[[bool], None]) -> "WaitingCall | None":
        """See `LoggedAnswers`."""
        assert self._found is not None
        owned, rollout, record = self._found
        ingress, call = self._member.ingress, None
        if self._passed is None:
            hello, task = self._member.hello, ingress.task(owned.task)
            call = ingress.begin(task)
            call.is_asked = True
            number, oldest = call.number, task.oldest
        else:
            hello, (_, number, oldest, *_) = self._passed
        step = step_of(rollout, record, StepId(hello.member, hello.boot, number, 0), oldest, Outcome.HIT)
        self._step.order.begin_turn(rollout)

        def written(row: "asyncio.Future[None]") -> None:
            is_in_log = row.exception() is None and not owned.is_dropped
            try:
                if is_in_log:
                    # Not noted before it is taken, or the same call would find its answer and take no step.
                    self._step.take(rollout, record)
                    self._member.gate.took(owned, rollout, record, step)
                    if call is not None:
                        ingress.end(call)
            except Exception:  # noqa: BLE001 - the regular way meets the same error and reports it
                is_in_log = False
            finally:
                self._step.order.end_turn(rollout)
            logged(is_in_log)

        owned.write([step]).add_done_callback(written)
        return call
