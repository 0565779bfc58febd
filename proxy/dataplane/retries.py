"""Requests that carry an ID (as `X-Request-ID`): a retry gets the answer of the first attempt.

A client that lost its connection sends the same request again. Without this memory the second attempt would be a
second call, one step further in the tree.
"""

import asyncio
from typing import TYPE_CHECKING

from proxy.dialects.base import Call
from proxy.http.lru_cache import LruCache
from proxy.step import Answer
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
        key, answer = self._answers.get((rollout.id, call.request_id), (None, None))
        return answer if call.request_id and key == call.key else None

    def remember(self, rollout: Rollout, call: Call, answer: "asyncio.Future[Answer]") -> None:
        """Remember the answer of a request until it fails: a failed request is run again when it is retried."""
        if not call.request_id:
            return
        name = (rollout.id, call.request_id)
        self._answers[name] = (call.key, answer)

        def forget_failure(done: "asyncio.Future[Answer]") -> None:
            if (done.cancelled() or done.exception() is not None) and name in self._answers:
                del self._answers[name]

        answer.add_done_callback(forget_failure)

    def remember_hit(self, rollout: Rollout, call: Call, record: Record) -> None:
        """Remember a request that the tree answered."""
        if call.request_id:
            answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
            answer.set_result(Answer(record, Outcome.HIT, Timing()))
            self.remember(rollout, call, answer)
