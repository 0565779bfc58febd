"""Questions to models behind an OpenAI-compatible endpoint.

Theory of operation. A question is the endpoint, the path and the request's JSON. Its answer comes from the memo, which
keeps answers across tasks and restarts; or from a request for the same question that is in flight, whose task is
shared; or from a new request, which is tried three times. Errors are not kept. A baseline (`fresh`) always makes a new
request.
"""

import asyncio
import base64
import math
import os
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import partial
from hashlib import blake2b
from typing import Any
from urllib.parse import unquote, urlsplit

import orjson

from sandboxes.errors import ServerError
from sandboxes.http_message import InvalidRequestError
from sandboxes.task_owner import TaskOwner
from sandboxes.tool_clients.elsewhere import UnreachableError, send
from sandboxes.tool_clients.http1 import MalformedResponseError, WholeResponse
from sandboxes.video.answer_memo import AnswerMemo
from sandboxes.video_spec import VideoModel

_ATTEMPTS = 3
_PAUSE_S = 0.25
"""Pause before the second attempt; it doubles with each."""
_MAX_ANSWER_BYTES = 64 << 20
"""Largest response of an endpoint."""
Vector = list[float]


class Spent:
    """The tokens that models counted for one call, as the endpoints' `usage` says. Known answers cost none."""

    def __init__(self) -> None:
        self.tokens = 0


SPENT: ContextVar[Spent | None] = ContextVar("SPENT", default=None)
"""Takes the tokens of the call that runs in this context. A request that several calls share counts for the first."""


class ModelClient:
    """Asks models, and counts requests, tokens and questions that needed no request of their own."""

    def __init__(self, memo: AnswerMemo) -> None:
        self._memo = memo
        self._turns: dict[str, asyncio.Semaphore] = {}
        self._flights: dict[bytes, asyncio.Task[bytes]] = {}
        self._owner = TaskOwner()
        self.sent = self.reused = self.tokens = 0

    async def aclose(self) -> None:
        """Cancel the requests in flight."""
        await self._owner.end()

    async def chat(
        self, model: VideoModel, text: str, pictures: Sequence[bytes], *, variant: int = 0, fresh: bool = False
    ) -> str:
        """Return a model's answer to a text with JPEG images; `variant` selects one of several recorded answers."""
        content: list[dict[str, Any]] = [{"type": "text", "text": text}]
        content += [{"type": "image_url", "image_url": {"url": _data_url(data)}} for data in pictures]
        payload = {
            "model": model.model,
            "messages": [{"role": "user", "content": content}],
            "temperature": model.temperature,
            "seed": model.seed + variant,
            "max_tokens": model.max_tokens,
        }
        return (await self._answer(model, "/chat/completions", payload, _read_text, fresh=fresh)).decode()

    async def embed(self, model: VideoModel, name: str, texts: Sequence[str], *, fresh: bool = False) -> list[Vector]:
        """Return a vector for each text; errors as for `chat`."""
        payload = {"model": name, "input": list(texts), "encoding_format": "float"}
        return await self._embedded(model, payload, len(texts), fresh=fresh)

    async def embed_picture(self, model: VideoModel, name: str, picture: bytes, *, fresh: bool = False) -> Vector:
        """Return the vector of a JPEG file, sent as a message, which is how vLLM takes images; errors as for `chat`."""
        content = [{"type": "image_url", "image_url": {"url": _data_url(picture)}}]
        payload = {"model": name, "messages": [{"role": "user", "content": content}], "encoding_format": "float"}
        return (await self._embedded(model, payload, 1, fresh=fresh))[0]

    async def _embedded(self, model: VideoModel, payload: dict[str, Any], count: int, *, fresh: bool) -> list[Vector]:
        read = partial(_read_vectors, count=count)
        answer = await self._answer(model, "/embeddings", payload, read, fresh=fresh)
        vectors: list[Vector] = orjson.loads(answer)
        return vectors

    # -- one request per question -------------------------------------------------------------------------------------

    async def _answer(
        self, model: VideoModel, path: str, payload: dict[str, Any], read: Callable[[Any], bytes], *, fresh: bool
    ) -> bytes:
        canonical = orjson.dumps([model.base_url, path, payload], option=orjson.OPT_SORT_KEYS)
        if fresh:
            return await self._post(model, path, payload, read)
        question = blake2b(canonical, digest_size=32).digest()
        known = self._memo.find(question)
        if known is not None:
            self.reused += 1
            return known
        flight = self._flights.get(question)
        if flight is not None:
            self.reused += 1
        else:
            coroutine = self._post_and_keep(question, model, path, payload, read)
            flight = self._flights[question] = self._owner.spawn("question to a model", coroutine, awaited=True)
            flight.add_done_callback(lambda _: self._flights.pop(question, None))
        # A caller that is cancelled leaves the request to the others, and its answer to the memo.
        return await asyncio.shield(flight)

    async def _post_and_keep(
        self, question: bytes, model: VideoModel, path: str, payload: dict[str, Any], read: Callable[[Any], bytes]
    ) -> bytes:
        answer = await self._post(model, path, payload, read)
        self._memo.keep(question, answer)
        return answer

    # -- requests ------------------------------------------------------------------------------------------------------

    async def _post(self, model: VideoModel, path: str, payload: dict[str, Any], read: Callable[[Any], bytes]) -> bytes:
        url = model.base_url.rstrip("/") + path
        turns = self._turns.setdefault(f"{model.base_url} {model.parallel}", asyncio.Semaphore(model.parallel))
        async with turns:
            self.sent += 1
            try:
                async with asyncio.timeout(model.timeout_s):
                    response = await self._sent(model, path, payload)
            except TimeoutError:
                raise ServerError(f"the model at {url} sent nothing for {model.timeout_s:g} s", silent=True) from None
            except (MalformedResponseError, InvalidRequestError, OSError) as error:
                reason = str(error) or type(error).__name__
                raise ServerError(f"the model at {url} cannot be reached: {reason}") from error
        text = response.body.decode(errors="replace")
        if response.status != 200:
            raise ServerError(f"the model at {url} answered {response.status}: {text[:300]}")
        try:
            parsed = orjson.loads(response.body)
            answer = read(parsed)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            raise ServerError(
                f"the model at {url} sent an answer of the wrong form ({error!r}): {text[:200]}"
            ) from None
        self._count(parsed)
        return answer

    def _count(self, response: Any) -> None:
        """Count the tokens of a response; an endpoint need not report any."""
        usage = response.get("usage")
        tokens = usage.get("total_tokens") if isinstance(usage, dict) else None
        if isinstance(tokens, int) and tokens > 0:
            self.tokens += tokens
            spent = SPENT.get()
            if spent is not None:
                spent.tokens += tokens

    async def _sent(self, model: VideoModel, path: str, payload: dict[str, Any]) -> WholeResponse:
        """Send a request; try again a little later if the endpoint is busy or cannot be reached."""
        body, headers = orjson.dumps(payload), _headers(model)
        for attempt in range(_ATTEMPTS):
            last = attempt == _ATTEMPTS - 1
            response = WholeResponse(_MAX_ANSWER_BYTES)
            try:
                await send(
                    model.base_url, "POST", path, headers.items(), body, len(body), response, silence_s=model.timeout_s
                )
            except UnreachableError:
                if last:
                    raise
            else:
                if last or (response.status != 429 and response.status < 500):
                    return response
            await asyncio.sleep(_PAUSE_S * 2**attempt)
        raise AssertionError("the last attempt returns or raises")


def _headers(model: VideoModel) -> dict[str, str]:
    headers = {"content-type": "application/json", "accept": "application/json", "user-agent": "forkpoint"}
    url = urlsplit(model.base_url)
    if url.username is not None:
        user = f"{unquote(url.username)}:{unquote(url.password or '')}"
        headers["authorization"] = f"Basic {base64.b64encode(user.encode()).decode()}"
    if model.api_key_env is not None:
        key = os.environ.get(model.api_key_env)
        if not key:
            raise ServerError(
                f"environment variable {model.api_key_env} of the proxy, which holds the model's key, is not set"
            )
        headers["authorization"] = f"Bearer {key}"
    return headers


def _data_url(jpeg: bytes) -> str:
    return f"data:image/jpeg;base64,{base64.b64encode(jpeg).decode()}"


def _read_text(response: Any) -> bytes:
    text = response["choices"][0]["message"]["content"]
    if not isinstance(text, str) or not text.strip():
        raise ValueError("no text")
    return text.strip().encode()


def _read_vectors(response: Any, count: int) -> bytes:
    rows = sorted(response["data"], key=lambda row: row["index"])
    vectors = [[float(number) for number in row["embedding"]] for row in rows]
    if len(vectors) != count or len({len(vector) for vector in vectors}) != 1 or not vectors[0]:
        raise ValueError(f"{len(vectors)} vectors for {count}")
    if not all(math.isfinite(number) for vector in vectors for number in vector):
        raise ValueError("a number is not finite")
    return orjson.dumps(vectors)
