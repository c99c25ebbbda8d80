"""Log lines of every process, as text or as JSON.

Owns their shape and the id of the request that a line is about. Knows nothing of who logs what, but
that no line has prompts, outputs or keys in it.
"""

import json
import logging
import os
import sys
import threading
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, NamedTuple

FORMATS = ("text", "json")

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
"""The id of the request that this task works for; empty where there is none."""


class LogConfig(NamedTuple):
    """What is logged, and how it looks."""

    level: str = "warning"
    format: str = "text"


QUIET = LogConfig()
"""Of an engine that nobody told otherwise."""


def configure(config: LogConfig, stage: int | None = None) -> None:
    """Have this process log to stderr: that of a stage, or the frontend's."""
    handler = logging.StreamHandler()
    if config.format == "json":
        handler.setFormatter(JsonLines("frontend" if stage is None else f"stage {stage}"))
        _keep_other_text_out()
    else:
        where = "" if stage is None else f" stage {stage}:"
        handler.setFormatter(TextLines(f"%(levelname)s{where} %(message)s"))
    logging.basicConfig(level=config.level.upper(), handlers=[handler])


class TextLines(logging.Formatter):
    """Lines for people; the request's id comes last."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """As of Formatter."""
        line = super().formatMessage(record)
        request = REQUEST_ID.get()
        return f"{line} (request {request})" if request else line


class JsonLines(logging.Formatter):
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
        if request := REQUEST_ID.get():
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
