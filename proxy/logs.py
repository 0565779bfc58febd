"""Logs, pretty or as JSON, on stderr. The one door to structlog's configuration."""

import contextlib
import io
import logging
import sys
from typing import TextIO, cast

from sandboxes.lean_imports import without

with without("rich"):
    import structlog


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
    """Configure logging for this process, the web server's own messages included.

    Args:
        level_name: The least severe level that is logged: debug, info, warning or error.
        json: Log one JSON object per line instead of coloured text.
    """
    level = logging.getLevelNamesMapping()[level_name.upper()]
    shared: list[structlog.types.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
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
