"""Logs: one event a line on stderr, where journald takes it. Names and numbers only, never tensor data."""

from __future__ import annotations

import contextlib
import logging
import sys
from typing import Any, TextIO, cast

import structlog

SERVICE = "tightfit-agent"


def configure(level: str, style: str) -> None:
    """Set up structlog for this process. `style` is json, console, or auto (console on a terminal)."""
    console = style == "console" or (style == "auto" and sys.stderr.isatty())
    # Its own tracebacks show local variables, and so inputs and tokens.
    shown = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
    render: Any = shown if console else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            *([_escape] if console else [_name_service]),
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info if not console else structlog.processors.StackInfoRenderer(),
            render,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, _Lines(sys.stderr))),
        cache_logger_on_first_use=True,
    )
    # Libraries that use the standard library's logging: their warnings belong in the same stream.
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")


class _Lines:
    """Writes as the file does; what cannot be written is lost: that nobody reads is no request's fault."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self._file.write(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._file.flush()


def _name_service(_: Any, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Where the logs of several services come together, whose this is."""
    return {"service_name": SERVICE, **event}


def _escape(_: Any, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """A terminal obeys characters that a client may have chosen, or shows something else for them; JSON has escapes."""
    return {
        name: value.encode("unicode_escape").decode() if isinstance(value, str) and not value.isprintable() else value
        for name, value in event.items()
    }


def get(name: str) -> Any:
    """A logger that says which part speaks."""
    return structlog.get_logger(part=name)
