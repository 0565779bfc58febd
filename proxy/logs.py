"""Logs, pretty or as JSON, on stderr. The one door to structlog's configuration."""

import contextlib
import io
import logging
import sys
from collections import deque
from collections.abc import Mapping, MutableMapping
from typing import Any, TextIO, cast

from sandboxes.lean_imports import without

with without("rich"):
    import structlog


_RECENT = 500
"""Warnings and errors that are kept for the page."""
_TEXT = 2000
"""Longest text of a kept event's member, in characters: 10 MB for all of them at the very most."""
_SEVERE = frozenset({"warning", "error", "critical"})
_recent: deque[Mapping[str, str]] = deque(maxlen=_RECENT)


def recent() -> list[Mapping[str, str]]:
    """Return the latest warnings and errors of this process, the newest first, with their members as texts."""
    return list(reversed(_recent))


def remember(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Keep a warning or an error. A processor of structlog."""
    if event.get("level") in _SEVERE:
        _recent.append({name: str(value)[:_TEXT] for name, value in event.items() if not name.startswith("_")})
    return event


class _BestEffort(io.TextIOBase):
    """Standard error, whose failures are ignored: a log on a full disk must not turn an answer into an error."""

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            sys.stderr.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.flush()


def setup(level_name: str, *, json: bool) -> None:
    """Configure logging for this process, the web server's too, from a least severe level on."""
    level = logging.getLevelNamesMapping()[level_name.upper()]
    shared: list[structlog.types.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        remember,
    ]
    last = structlog.processors.JSONRenderer() if json else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    structlog.configure(
        processors=[*shared, last],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(cast("TextIO", _BestEffort())),
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, last], foreign_pre_chain=shared
        )
    )
    logging.basicConfig(level=max(level, logging.WARNING), handlers=[handler], force=True)
