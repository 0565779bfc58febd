"""Serves the page's files: static, read once, with headers under which nothing that a tool wrote can run."""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from fastapi import APIRouter, Request, Response

from proxy.refusals import RefusalError

_FILES = Path(__file__).parent / "static"
_TYPES = {
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
    # Asked for each time, answered with 304: a page of another version than its proxy would not be understood.
    "cache-control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class StaticFile:
    """A file of the page, ready to be sent."""

    media_type: str
    data: bytes
    tag: str


def read_files(folder: Path = _FILES) -> Mapping[str, StaticFile]:
    """Return the page's files by their path below `/ui/`."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix in _TYPES:
            data = path.read_bytes()
            tag = f'"{blake2b(data, digest_size=12).hexdigest()}"'
            files[path.relative_to(folder).as_posix()] = StaticFile(_TYPES[path.suffix], data, tag)
    return files


def page() -> APIRouter:
    """Return the routes of the page: `/ui` and its files."""
    router = APIRouter(include_in_schema=False)
    files = read_files()

    @router.get("/")
    async def root() -> Response:
        """Lead who opens the proxy's address to the page."""
        return Response(status_code=307, headers={"location": "/ui/"})

    @router.get("/ui")
    async def bare() -> Response:
        # Relative to the address with the slash its files are found.
        return Response(status_code=307, headers={"location": "/ui/"})

    @router.get("/ui/{path:path}")
    async def file(path: str, request: Request) -> Response:
        found = files.get(path or "index.html")
        if found is None:
            raise RefusalError(404, "no-such-file", f"the page has no file {path!r}. It begins at /ui/.")
        headers = {**HEADERS, "etag": found.tag}
        if request.headers.get("if-none-match") == found.tag:
            return Response(status_code=304, headers=headers)
        return Response(found.data, media_type=found.media_type, headers=headers)

    return router
