"""Logging is configured here and nowhere else: structlog and the standard library's loggers, both to stderr."""

from __future__ import annotations

import logging
import sys

import structlog
from structlog.typing import Processor

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("console", "json")


def configure_logging(level: str, log_format: str) -> None:
    """Send everything at or above `level` to stderr as `log_format`. Replaces what was configured before."""
    threshold = logging.getLevelNamesMapping()[level.upper()]
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    structlog.configure(
        processors=[*shared, _renderer(log_format)],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
    _configure_standard_library(threshold, log_format, shared)


def _renderer(log_format: str) -> Processor:
    if log_format == "json":
        return structlog.processors.JSONRenderer()
    return structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback)


def _configure_standard_library(threshold: int, log_format: str, shared: list[Processor]) -> None:
    """Libraries (uvicorn, aiohttp) log in the same form; their access lines are ours already, so they stay quiet."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, _renderer(log_format)],
            foreign_pre_chain=shared,
        )
    )
    logging.basicConfig(level=threshold, handlers=[handler], force=True)
    for chatty in ("uvicorn.access", "asyncio"):
        logging.getLogger(chatty).setLevel(max(threshold, logging.WARNING))
