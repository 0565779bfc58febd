"""Requests to a rollout's model: with its own URL and its own key, and again where the engine failed."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from proxy.compat.harness.turns import ModelResponse
from proxy.refusals import RefusalError
from sandboxes.calls import content_type
from sandboxes.http_message import InvalidRequestError
from sandboxes.sources import has_dot_segments
from sandboxes.tool_clients.elsewhere import send
from sandboxes.tool_clients.harness import body_of
from sandboxes.tool_clients.http1 import MalformedResponseError, WholeResponse

SILENCE_S = 1800.0
"""Longest wait for a model to begin a response. Engines that are busy with a batch take minutes."""
_RESPONSE_BYTES = 64 << 20
"""The largest response. A hundred thousand tokens take some 20 MB as events."""
PAUSES_S = (0.5, 2.0, 8.0)
"""The pauses before a request is made again. After the last one, the run ends and may be gone on with."""
_FAILURES = frozenset({401, 403, 404, 408, 409, 425, 429})
"""Statuses that say something of the engine or of the key, beside those of 500 and above. Any other is an answer."""
_NOT_PASSED = frozenset({
    "host", "content-length", "expect", "accept-encoding", "authorization", "x-api-key", "x-goog-api-key", "cookie",
})  # fmt: skip
"""Headers of the harness that its model does not get: the sandbox's secrets, and what other code reads."""


@dataclass(frozen=True, slots=True)
class Model:
    """Where a rollout's requests go: a URL before their targets, and headers, such as the key, that replace theirs."""

    url: str
    headers: Mapping[str, str]

    async def respond(self, request: Mapping[str, Any]) -> ModelResponse:
        """Return the response to a request of `Path.waiting`. Raises RefusalError (502) once all retries failed.

        What no server can be sent is answered with 400, as a server answers it.
        """
        for pause_s in (*PAUSES_S, None):
            try:
                response = await self._respond(request)
                if response.status < 500 and response.status not in _FAILURES:
                    return response
                problem = f"status {response.status}: {response.body[:500].decode(errors='replace')}"
            except (OSError, TimeoutError, MalformedResponseError) as error:
                problem = str(error) or type(error).__name__
            except InvalidRequestError as error:
                # Any program in the sandbox may have sent it, and it is wrong however often it is tried.
                return ModelResponse(400, "text/plain", f"the request cannot be sent: {error}".encode())
            if pause_s is not None:
                await asyncio.sleep(pause_s)
        raise RefusalError(
            502, "model", f"the model at {self.url} does not answer: {problem}. The rollout stands where it was: send "
            "the same request to go on."
        )  # fmt: skip

    async def _respond(self, request: Mapping[str, Any]) -> ModelResponse:
        if has_dot_segments(request["target"]):
            # The rollout's URL may end where another one's begins.
            raise InvalidRequestError("its target has dot segments")
        own = {name.lower() for name in self.headers}
        headers = [(name, value) for name, value in request["headers"] if name.lower() not in _NOT_PASSED | own]
        body, whole = body_of(request), WholeResponse(_RESPONSE_BYTES)
        await send(
            self.url, request["method"], request["target"], [*headers, *self.headers.items()], body, len(body), whole,
            silence_s=SILENCE_S,
        )  # fmt: skip
        return ModelResponse(whole.status, content_type(whole.headers), bytes(whole.body))
