"""Logs, pretty or as JSON, on stderr. The one door to structlog's configuration."""

import logging
import sys

import structlog

from proxy.settings import Settings


def configure(settings: Settings) -> None:
    """Set logging up for this process; the web server's own messages go the same way."""
    level = logging.getLevelNamesMapping()[settings.log_level.upper()]
    shared: list[structlog.types.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    last = (
        structlog.processors.JSONRenderer()
        if settings.log == "json"
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
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
