"""Logs, pretty or as JSON, on stderr. The one door to structlog's configuration."""

import logging
import sys

from sandboxes.lean_imports import without

with without("rich"):
    import structlog


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
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, last], foreign_pre_chain=shared
        )
    )
    logging.basicConfig(level=max(level, logging.WARNING), handlers=[handler], force=True)
