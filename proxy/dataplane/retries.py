"""Requests that carry an ID (as `X-Request-ID`): a retry gets the answer of the first attempt.

Otherwise the retry of a client that lost its connection would be a second call, one step further in the tree.
"""

import asyncio
from typing import TYPE_CHECKING

from proxy.dialects.base import Call
from proxy.execution.step_notes import Answer
from proxy.http.lru_cache import LruCache
from proxy.telemetry.timing import Timing
from proxy.tree.rollout import Outcome, Rollout
from proxy.tree.tree import Record

if TYPE_CHECKING:
    from proxy.tree.keys import CallKey

MAX_REMEMBERED = 4096
"""Limits the requests that are remembered. A retry comes within seconds, when few other requests came between."""


class Retries:
    """The answers of requests that may be sent again, present or still to come."""

    def __init__(self) -> None:
        self._answers: LruCache[tuple[int, str], tuple[CallKey, asyncio.Future[Answer]]] = LruCache(MAX_REMEMBERED)

    def answer(self, rollout: Rollout, call: Call) -> "asyncio.Future[Answer] | None":
        """Return the answer of the first attempt; None if this is the first, or the ID was used for another call."""
        # The key is compared too: a client that reuses an ID for another call gets its own answer, not a wrong one.
        key, answer = self._answers.get((rollout.id, call.request_id), (None, None))
        return answer if call.request_id and key == call.key else None

    def remember(self, rollout: Rollout, call: Call, answer: "asyncio.Future[Answer]") -> None:
        """Remember the answer of a request until it fails: a failed request is run again when it is retried."""
        if not call.request_id:
            return
        name = (rollout.id, call.request_id)
        # The future itself is kept, so a retry that comes while the first attempt runs waits for the same result.
        self._answers[name] = (call.key, answer)

        def forget_failure(done: "asyncio.Future[Answer]") -> None:
            # The entry may have been evicted meanwhile.
            if (done.cancelled() or done.exception() is not None) and name in self._answers:
                del self._answers[name]

        answer.add_done_callback(forget_failure)

    def remember_hit(self, rollout: Rollout, call: Call, record: Record) -> None:
        """Remember a request that the tree answered."""
        if call.request_id:
            # A hit has no task to remember; a future that is done already looks the same to the retry.
            answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
            answer.set_result(Answer(record, Outcome.HIT, Timing()))
            self.remember(rollout, call, answer)
