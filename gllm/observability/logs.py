"""Log lines of every process, as text or as JSON.

Owns their shape and the id of the request that a line is about. Knows nothing of who logs what, but
that no line has prompts, outputs or keys in it.
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

LOG_REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
"""The id of the request that this task works for; empty where there is none."""


class LogConfig(NamedTuple):
    """What is logged, and how it looks."""

    level: str = "warning"
    format: str = "text"


REPEAT_SECONDS = 60.0
MAX_TRACKED_WARNINGS = 64
"""Warnings whose repetitions are counted apart."""

DEFAULT_LOG_CONFIG = LogConfig()
"""Of an engine that nobody told otherwise."""


def configure_logging(config: LogConfig, stage: int | None = None) -> None:
    """Have this process log to stderr: that of a stage, or the frontend's."""
    handler = DeduplicatingHandler()
    if config.format == "json":
        handler.setFormatter(JsonFormatter("frontend" if stage is None else f"stage {stage}"))
        _keep_other_text_out()
    else:
        where = "" if stage is None else f" stage {stage}:"
        handler.setFormatter(TextFormatter(f"%(levelname)s{where} %(message)s"))
    logging.basicConfig(level=config.level.upper(), handlers=[handler])


@dataclass
class _Window:
    """A warning's last minute."""

    begin: float
    """When it was written last, in seconds of the handler's clock."""
    repeats: int = 0
    """How often it came since, without being written."""
    last: logging.LogRecord | None = None


class DeduplicatingHandler(logging.StreamHandler[TextIO]):
    """Writes log lines; a warning of gllm that repeats is written once a minute, with a count.

    Two warnings are alike if they have the same text before its arguments are filled in, and the
    same `about`, which a caller gives as `extra={"about": ...}` where the text alone says too
    little. The count is written with the next one, or with any line after the minute.
    """

    def __init__(
        self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(stream)
        self._clock = clock
        self._windows: dict[tuple[str, str, str], _Window] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, or count it."""
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
        """Return what is the same for warnings that are alike; None for what is always written."""
        if record.levelno != logging.WARNING or not record.name.startswith("gllm"):
            return None
        key = (record.name, str(record.msg), str(getattr(record, "about", ""))[:200])
        # Who makes up names cannot make up lines without end.
        if key not in self._windows and len(self._windows) >= MAX_TRACKED_WARNINGS:
            return (*key[:2], "")
        return key

    def _write_counts(self, now: float) -> None:
        """Write the counts of minutes that are over."""
        for key, window in list(self._windows.items()):
            if now - window.begin >= REPEAT_SECONDS:
                del self._windows[key]
                if window.last is not None:
                    # Not about the request that this process works for now.
                    counted = _repeated(window.last, window, now)
                    contextvars.Context().run(super().emit, counted)


def _repeated(record: logging.LogRecord, window: _Window, now: float) -> logging.LogRecord:
    """Return a record with the count of those before it."""
    if not window.repeats:
        return record
    counted = copy.copy(record)
    counted.msg = f"{record.getMessage()} ({window.repeats} more in {now - window.begin:.0f} s)"
    counted.args = ()
    return counted


class TextFormatter(logging.Formatter):
    """Lines for people; the request's id comes last."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """As of Formatter."""
        line = super().formatMessage(record)
        request = LOG_REQUEST_ID.get()
        return f"{line} (request {request})" if request else line


class JsonFormatter(logging.Formatter):
    """One JSON object a line, which has what a record was given as `extra={"fields": {...}}`."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """As of Formatter."""
        moment = datetime.fromtimestamp(record.created, UTC)
        told: dict[str, Any] = {
            "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request := LOG_REQUEST_ID.get():
            told["request_id"] = request
        told |= getattr(record, "fields", {})
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return json.dumps(told, default=str)


def _keep_other_text_out() -> None:
    """Warnings and exceptions that nobody catches, which Python would print as text; and no bars of
    downloads, which huggingface_hub would draw."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    logging.captureWarnings(True)
    log = logging.getLogger("gllm")

    def died(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None:
            log.critical("a thread failed", exc_info=args.exc_value)

    sys.excepthook = lambda kind, error, trace: log.critical("the process failed", exc_info=error)
    threading.excepthook = died
