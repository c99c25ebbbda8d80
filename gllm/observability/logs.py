"""Log lines of every process, as text or as JSON.

Each line has the id of the request it belongs to. No line contains prompts, outputs or keys.
"""

import contextvars
import copy
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple, TextIO

LOG_FORMATS = ("text", "json")
"""Values of --log-format."""

LOG_REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
"""Id of the request that the current task serves; empty outside requests."""


class LogConfig(NamedTuple):
    """Log level and format ("text" or "json") of a process."""

    level: str = "warning"
    format: str = "text"


REPEAT_SECONDS = 60.0
"""Interval at which a repeating warning is written."""
MAX_TRACKED_WARNINGS = 64
"""Number of distinct warnings for which repetitions are counted."""

DEFAULT_LOG_CONFIG = LogConfig()
"""Configuration of an engine that is embedded in a program."""


def configure_logging(config: LogConfig, place: str | None = None) -> None:
    """Configure logging of this process to stderr.

    A worker calls this again when its stage or rank changes.

    Args:
        config: level and format.
        place: stage and rank of a worker as they appear in the log, such as `stage 1`; None in the
            frontend.
    """
    handler = DeduplicatingHandler()
    if place is not None:
        logging.getLogger().handlers.clear()
    if config.format == "json":
        handler.setFormatter(JsonFormatter("frontend" if place is None else place))
        _redirect_other_output()
    else:
        where = "" if place is None else f" {place}:"
        handler.setFormatter(TextFormatter(f"%(levelname)s{where} %(message)s"))
    logging.basicConfig(level=config.level.upper(), handlers=[handler])


@dataclass
class _Window:
    """Repetitions of a warning since it was last written."""

    begin: float
    """Time of the last line, in seconds of the handler's clock."""
    repeats: int = 0
    """Number of repetitions since."""
    last: logging.LogRecord | None = None


class DeduplicatingHandler(logging.StreamHandler[TextIO]):
    """Log handler that writes a repeating warning at most once per minute, with its count.

    Two warnings are equal if they have the same format string and the same `about`, which a caller
    passes as `extra={"about": ...}` to distinguish warnings of one format string. The count is
    written with the next such warning, or with any line after the minute. Only warnings of gllm's
    own loggers are counted.
    """

    def __init__(
        self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(stream)
        self._clock = clock
        self._windows: dict[tuple[str, str, str], _Window] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Write a log record, or only count it if it repeats a recent warning."""
        now, key = self._clock(), self._key(record)
        window = None if key is None else self._windows.get(key)
        if window is not None and now - window.begin < REPEAT_SECONDS:
            window.repeats, window.last = window.repeats + 1, record
            return
        if key is not None:
            self._windows[key] = _Window(now)
            if window is not None:
                record = _repeated(record, window, now)
        self._write_counts(now)
        super().emit(record)

    def _key(self, record: logging.LogRecord) -> tuple[str, str, str] | None:
        """Return the key of equal warnings; None for records that are always written."""
        if record.levelno != logging.WARNING or not record.name.startswith("gllm"):
            return None
        key = (record.name, str(record.msg), str(getattr(record, "about", ""))[:200])
        # Clients that invent names cannot cause an unlimited number of lines.
        if key not in self._windows and len(self._windows) >= MAX_TRACKED_WARNINGS:
            return (*key[:2], "")
        return key

    def _write_counts(self, now: float) -> None:
        """Write the counts of warnings whose minute has passed."""
        for key, window in list(self._windows.items()):
            if now - window.begin >= REPEAT_SECONDS:
                del self._windows[key]
                if window.last is not None:
                    # An empty context: the line does not belong to the current request.
                    counted = _repeated(window.last, window, now)
                    contextvars.Context().run(super().emit, counted)


def _repeated(record: logging.LogRecord, window: _Window, now: float) -> logging.LogRecord:
    """Return a record whose message has the number of repetitions before it."""
    if not window.repeats:
        return record
    counted = copy.copy(record)
    counted.msg = f"{record.getMessage()} ({window.repeats} more in {now - window.begin:.0f} s)"
    counted.args = ()
    return counted


class TextFormatter(logging.Formatter):
    """Log formatter for plain text that appends the request id to the line."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """Return the formatted line with the request id, without an exception's traceback."""
        line = super().formatMessage(record)
        request = LOG_REQUEST_ID.get()
        return f"{line} (request {request})" if request else line


class JsonFormatter(logging.Formatter):
    """Log formatter that writes each record as a JSON object.

    A record's `extra={"fields": {...}}` adds fields to the object.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line of JSON."""
        moment = datetime.fromtimestamp(record.created, UTC)
        fields: dict[str, Any] = {
            "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request := LOG_REQUEST_ID.get():
            fields["request_id"] = request
        fields |= getattr(record, "fields", {})
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)


def _redirect_other_output() -> None:
    """Log warnings and uncaught exceptions, and disable progress bars.

    Python would print the former, and huggingface_hub the latter, as plain text.
    """
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    logging.captureWarnings(True)
    log = logging.getLogger("gllm")

    def log_thread_error(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None:
            log.critical("a thread failed", exc_info=args.exc_value)

    sys.excepthook = lambda kind, error, trace: log.critical("the process failed", exc_info=error)
    threading.excepthook = log_thread_error
