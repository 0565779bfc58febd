"""Questions to models behind an OpenAI-compatible endpoint. The one door to httpx on this side of the proxy.

What is asked is decided elsewhere. Here a question is asked once however many want its answer, an answer that is none
is an error, and nothing of an error is kept.
"""

import asyncio
import base64
import math
import os
from collections.abc import Awaitable, Callable, Sequence
from hashlib import blake2b
from typing import Any

import orjson

from sandboxes.errors import ServerError
from sandboxes.lean_imports import without
from sandboxes.video.answer_memo import AnswerMemo
from sandboxes.video_spec import VideoModel

with without("pygments"):
    import httpx

_ATTEMPTS = 3
_PAUSE_S = 0.25
_LIMITS = httpx.Limits(max_connections=256)
_MAX_ANSWER_BYTES = 64 << 20
Vector = list[float]


class ModelClient:
    """Asks models. asked: how often one really was; repeated: how often the answer was known."""

    def __init__(self, memo: AnswerMemo) -> None:
        self._memo = memo
        self._client: httpx.AsyncClient | None = None
        self._turns: dict[str, asyncio.Semaphore] = {}
        self._flights: dict[bytes, asyncio.Task[bytes]] = {}
        self.asked = self.repeated = 0

    async def aclose(self) -> None:
        """End what is being asked."""
        for flight in list(self._flights.values()):
            flight.cancel()
        await asyncio.gather(*self._flights.values(), return_exceptions=True)
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    async def chat(
        self, model: VideoModel, text: str, pictures: Sequence[bytes], *, variant: int = 0, fresh: bool = False
    ) -> str:
        """Return what a model says to a text and JPEG pictures. fresh: ask again even where the answer is known.

        Raises:
            ServerError: the endpoint is down, silent, refuses, or answers nonsense.
        """
        content: list[dict[str, Any]] = [{"type": "text", "text": text}]
        content += [{"type": "image_url", "image_url": {"url": _data_url(data)}} for data in pictures]
        payload = {
            "model": model.model,
            "messages": [{"role": "user", "content": content}],
            "temperature": model.temperature,
            "seed": model.seed + variant,
            "max_tokens": model.max_tokens,
        }
        return (await self._ask(model, "/chat/completions", payload, _said, fresh=fresh)).decode()

    async def embed(self, model: VideoModel, name: str, texts: Sequence[str], *, fresh: bool = False) -> list[Vector]:
        """Return a vector for each text. See `chat` for what is raised."""
        payload = {"model": name, "input": list(texts), "encoding_format": "float"}
        return await self._embedded(model, payload, len(texts), fresh=fresh)

    async def embed_picture(self, model: VideoModel, name: str, picture: bytes, *, fresh: bool = False) -> Vector:
        """Return the vector of a picture, as vLLM takes it: a message. See `chat` for what is raised."""
        content = [{"type": "image_url", "image_url": {"url": _data_url(picture)}}]
        payload = {"model": name, "messages": [{"role": "user", "content": content}], "encoding_format": "float"}
        return (await self._embedded(model, payload, 1, fresh=fresh))[0]

    async def _embedded(self, model: VideoModel, payload: dict[str, Any], count: int, *, fresh: bool) -> list[Vector]:
        answer = await self._ask(model, "/embeddings", payload, lambda told: _vectors(told, count), fresh=fresh)
        found: list[Vector] = orjson.loads(answer)
        return found

    # -- asking once -------------------------------------------------------------------------------------------------

    async def _ask(
        self, model: VideoModel, path: str, payload: dict[str, Any], read: Callable[[Any], bytes], *, fresh: bool
    ) -> bytes:
        asking = orjson.dumps([model.base_url, path, payload], option=orjson.OPT_SORT_KEYS)
        if fresh:
            return await self._post(model, path, payload, read)
        question = blake2b(asking, digest_size=32).digest()
        known = self._memo.find(question)
        if known is not None:
            self.repeated += 1
            return known
        flight = self._flights.get(question)
        if flight is not None:
            self.repeated += 1
        else:
            flight = asyncio.ensure_future(self._fly(question, lambda: self._post(model, path, payload, read)))
            self._flights[question] = flight
            flight.add_done_callback(lambda done: self._landed(question, done))
        # Whoever goes away leaves the question to those who still want its answer, and to the next.
        return await asyncio.shield(flight)

    async def _fly(self, question: bytes, post: Callable[[], Awaitable[bytes]]) -> bytes:
        answer = await post()
        self._memo.keep(question, answer)
        return answer

    def _landed(self, question: bytes, flight: "asyncio.Task[bytes]") -> None:
        self._flights.pop(question, None)
        if not flight.cancelled():
            # Nobody may be waiting any more.
            flight.exception()

    # -- the wire ----------------------------------------------------------------------------------------------------

    async def _post(self, model: VideoModel, path: str, payload: dict[str, Any], read: Callable[[Any], bytes]) -> bytes:
        url = model.base_url.rstrip("/") + path
        turns = self._turns.setdefault(f"{model.base_url} {model.parallel}", asyncio.Semaphore(model.parallel))
        async with turns:
            self.asked += 1
            try:
                async with asyncio.timeout(model.timeout_s):
                    response = await self._sent(url, payload, _headers(model))
            except TimeoutError:
                raise ServerError(f"the model at {url} said nothing for {model.timeout_s:g} s", silent=True) from None
            except httpx.HTTPError as error:
                told = str(error) or type(error).__name__
                raise ServerError(f"the model at {url} cannot be asked: {told}") from error
        if response.status_code != 200:
            raise ServerError(f"the model at {url} answered {response.status_code}: {response.text[:300]}")
        try:
            return read(orjson.loads(response.content))
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            raise ServerError(f"the model at {url} answered nonsense ({error!r}): {response.text[:200]}") from None

    async def _sent(self, url: str, payload: dict[str, Any], headers: dict[str, str]) -> httpx.Response:
        """Send a question; where the endpoint is busy or was not reached, again, a little later."""
        if self._client is None:
            # The time of a question is measured around it.
            self._client = httpx.AsyncClient(trust_env=False, timeout=httpx.Timeout(None), limits=_LIMITS)
        for attempt in range(_ATTEMPTS):
            last = attempt == _ATTEMPTS - 1
            try:
                response = await self._read(url, payload, headers)
            except httpx.ConnectError:
                if last:
                    raise
            else:
                if last or (response.status_code != 429 and response.status_code < 500):
                    return response
            await asyncio.sleep(_PAUSE_S * 2**attempt)
        raise AssertionError("the last attempt returns or raises")

    async def _read(self, url: str, payload: dict[str, Any], headers: dict[str, str]) -> httpx.Response:
        assert self._client is not None
        async with self._client.stream("POST", url, content=orjson.dumps(payload), headers=headers) as response:
            body = bytearray()
            async for chunk in response.aiter_bytes():
                body += chunk
                if len(body) > _MAX_ANSWER_BYTES:
                    raise httpx.DecodingError("its answer does not end")
        return httpx.Response(response.status_code, content=bytes(body))


def _headers(model: VideoModel) -> dict[str, str]:
    headers = {"content-type": "application/json"}
    if model.api_key_env is not None:
        key = os.environ.get(model.api_key_env)
        if not key:
            raise ServerError(f"the proxy's environment has no {model.api_key_env}, which holds the model's key")
        headers["authorization"] = f"Bearer {key}"
    return headers


def _data_url(jpeg: bytes) -> str:
    return f"data:image/jpeg;base64,{base64.b64encode(jpeg).decode()}"


def _said(told: Any) -> bytes:
    """Return the text of a chat completion.

    Raises:
        ValueError, TypeError, KeyError, IndexError: it is none.
    """
    text = told["choices"][0]["message"]["content"]
    if not isinstance(text, str) or not text.strip():
        raise ValueError("no text")
    return text.strip().encode()


def _vectors(told: Any, count: int) -> bytes:
    """Return the vectors of an answer in order.

    Raises:
        ValueError, TypeError, KeyError: they are not so many, not of one length, or not of numbers.
    """
    rows = sorted(told["data"], key=lambda row: row["index"])
    vectors = [[float(number) for number in row["embedding"]] for row in rows]
    if len(vectors) != count or len({len(vector) for vector in vectors}) != 1 or not vectors[0]:
        raise ValueError(f"{len(vectors)} vectors for {count}")
    if not all(math.isfinite(number) for vector in vectors for number in vector):
        raise ValueError("a number is not finite")
    return orjson.dumps(vectors)
