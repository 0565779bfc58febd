"""Requests to servers elsewhere: with TLS, and bounded whatever the server sends before its response."""

import asyncio
import contextlib
import ssl
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from sandboxes.errors import ServerError
from sandboxes.listener import Headers
from sandboxes.spec import EnvironmentSpec
from sandboxes.tool_clients import elsewhere
from sandboxes.tool_clients.elsewhere import UnreachableError, send
from sandboxes.tool_clients.http1 import MalformedResponseError
from sandboxes.upstream.driver import HttpDriver
from sandboxes.video.answer_memo import AnswerMemo
from sandboxes.video.model_client import ModelClient
from sandboxes.video_spec import VideoModel
from tests.sandboxes.box import opened
from tests.sandboxes.upstream.test_sandbox import ask

Test = Callable[[str], Awaitable[None]]


class Heard:
    """Keeps what a listener hears."""

    def __init__(self) -> None:
        self.status, self.body = 0, b""

    async def head(self, status: int, headers: Headers) -> None:  # noqa: ARG002 - the protocol has them
        self.status = status

    async def data(self, chunk: bytes) -> None:
        self.body += chunk


def with_server(
    answer: bytes, test: Test, *, endless: bytes = b"", context: ssl.SSLContext | None = None
) -> list[bytes]:
    """Run a test with the URL of a server; return the requests. `endless` is sent without end before the answer."""
    requests = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, ssl.SSLError, asyncio.IncompleteReadError):
            requests.append(await reader.readuntil(b"\r\n\r\n"))
            while endless:
                writer.write(endless * 1000)
                await writer.drain()
            writer.write(answer)
            await writer.drain()
            await reader.read()
        writer.transport.abort()
        ended.release()

    ended = asyncio.Semaphore(0)

    async def go() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
        async with server:
            port = server.sockets[0].getsockname()[1]
            await test(f"{'https' if context else 'http'}://localhost:{port}/base")
            for _ in requests:
                await ended.acquire()

    asyncio.run(go())
    return requests


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, ssl.SSLContext]:
    """A certificate for localhost, and a server's context with it."""
    file, key = tmp_path / "localhost.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", file],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file, key)
    return file, context


def test_https_is_trusted_by_its_authority(
    certificate: tuple[Path, ssl.SSLContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request goes over TLS to a host whose certificate an authority has signed, and to no other."""
    file, context = certificate
    elsewhere._tls_context.cache_clear()

    async def refused(url: str) -> None:
        with pytest.raises(UnreachableError, match="certificate"):
            await send(url, "GET", "/x", (), b"", 0, Heard(), silence_s=30)

    with_server(b"", refused, context=context)
    monkeypatch.setenv("SSL_CERT_FILE", str(file))
    elsewhere._tls_context.cache_clear()
    heard = Heard()

    async def answered(url: str) -> None:
        await send(url, "POST", "/x?y", [("A", "b")], b"body", 4, heard, silence_s=30)

    (request,) = with_server(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokPOISON", answered, context=context)
    elsewhere._tls_context.cache_clear()
    assert (heard.status, heard.body) == (200, b"ok")
    head, *lines = request.decode().split("\r\n")
    assert head == "POST /base/x?y HTTP/1.1"
    assert lines[0].startswith("Host: localhost:")
    assert lines[1:] == ["A: b", "Content-Length: 4", "Connection: close", "", ""]


INTERIM = b"HTTP/1.1 103 Early Hints\r\n\r\n"


def test_interim_responses_without_end_are_refused(tmp_path: Path) -> None:
    """By every client of servers elsewhere: of the driver `http`, and of models for videos."""

    async def plain(url: str) -> None:
        with pytest.raises(MalformedResponseError, match="interim"):
            await send(url, "GET", "/", (), b"", 0, Heard(), silence_s=60)

    async def driver(url: str) -> None:
        spec = EnvironmentSpec.model_validate({"driver": "http", "servers": {"api": {"upstream": url}}})
        async with opened(HttpDriver(tmp_path)) as running:
            with pytest.raises(ServerError, match="interim"):
                await ask(await running.start(spec), "/x", stateless=True)

    async def model(url: str) -> None:
        memo = AnswerMemo(tmp_path / "models.sqlite")
        memo.open()
        models = ModelClient(memo)
        with pytest.raises(ServerError, match="interim"):
            await models.chat(VideoModel(base_url=url, model="seer"), "What?", [])
        await models.aclose()
        memo.close()

    for test in (plain, driver, model):
        assert len(with_server(b"", test, endless=INTERIM)) == 1
