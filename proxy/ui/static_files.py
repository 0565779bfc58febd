"""The page's static files, served with headers that keep a tool's output from running as script."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from fastapi import APIRouter, Request, Response

from proxy.refusals import RefusalError

_FILES = Path(__file__).parent / "static"
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data: blob:; font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    # Browsers revalidate each time (304), so the page always has the version of its proxy.
    "cache-control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class StaticFile:
    """A file of the page, with its `ETag`."""

    media_type: str
    data: bytes
    tag: str


def read_files() -> Mapping[str, StaticFile]:
    """Read the page's files, by path below `/ui/`."""
    return {
        path.relative_to(_FILES).as_posix(): read_file(path, MEDIA_TYPES[path.suffix])
        for path in sorted(_FILES.rglob("*"))
        if path.is_file() and path.suffix in MEDIA_TYPES
    }


def read_file(path: Path, media_type: str) -> StaticFile:
    """Read one file."""
    data = path.read_bytes()
    return StaticFile(media_type, data, f'"{blake2b(data, digest_size=12).hexdigest()}"')


def response_to(request: Request, static: StaticFile) -> Response:
    """Return a file with the page's headers, or 304 if the browser has it."""
    headers = {**HEADERS, "etag": static.tag}
    if request.headers.get("if-none-match") == static.tag:
        return Response(status_code=304, headers=headers)
    return Response(static.data, media_type=static.media_type, headers=headers)


def page() -> APIRouter:
    """Return the routes of the page: `/ui` and its files."""
    router = APIRouter(include_in_schema=False)
    files = read_files()

    # The page's relative links need the slash at the end.
    @router.get("/")
    @router.get("/ui")
    async def bare() -> Response:
        return Response(status_code=307, headers={"location": "/ui/"})

    # The same page as /ui/docs.html, whose links are relative to /ui/.
    docs = re.sub(rb'(href|src)="', rb'\1="ui/', files["docs.html"].data)

    @router.get("/docs")
    async def describe() -> Response:
        """Show the description of the REST API."""
        return Response(docs, media_type=MEDIA_TYPES[".html"], headers=HEADERS)

    @router.get("/ui/{path:path}")
    async def file(path: str, request: Request) -> Response:
        static = files.get(path or "index.html")
        if static is None:
            raise RefusalError(404, "no-such-file", f"the page has no file {path!r}. Open /ui/.")
        return response_to(request, static)

    return router
