"""The manual: the documentation site, where this installation has it, served below `/manual/` without another host."""

import asyncio
from pathlib import Path

from fastapi import APIRouter, Request, Response

from proxy.refusals import RefusalError
from proxy.ui.static_files import MEDIA_TYPES, read_file, response_to

_SITE = Path(__file__).parent / "manual"
"""Written by `./run docs` in a checkout, and part of a wheel that was built where MkDocs is installed."""
_TYPES = MEDIA_TYPES | {
    ".json": "application/json",
    ".md": "text/markdown; charset=utf-8",
    ".png": "image/png",
    ".webp": "image/webp",
}
_OTHER = "text/plain; charset=utf-8"
"""The type of source files, which a browser shows and never runs."""


def manual(site: Path = _SITE) -> APIRouter:
    """Return the routes of the manual. Files are listed here and read when they are requested."""
    router = APIRouter(include_in_schema=False)
    files = {path.relative_to(site).as_posix(): path for path in site.rglob("*") if path.is_file()}

    @router.get("/manual")
    async def bare() -> Response:
        # The pages' relative links need the slash at the end.
        return Response(status_code=307, headers={"location": "/manual/"})

    @router.get("/manual/{name:path}")
    async def file(name: str, request: Request) -> Response:
        if not files:
            raise RefusalError(
                404, "no-manual", "this installation has no manual. In a checkout, `./run docs` builds it; then start "
                "the proxy again. The same pages are the .md files in docs/.",
            )  # fmt: skip
        path = files.get(name or "index.html")
        if path is None:
            raise RefusalError(404, "no-such-file", f"the manual has no page {name!r}. Open /manual/.")
        kind = _OTHER if name.startswith("source/") else _TYPES.get(path.suffix, _OTHER)
        return response_to(request, await asyncio.to_thread(read_file, path, kind))

    return router
