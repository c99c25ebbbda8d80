"""`gllm top`: a running server in the terminal, by its /metrics.

Owns asking, waiting and the terminal. Knows of the server only its URL.
"""

import argparse
import http.client
import io
import os
import select
import shutil
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import NoReturn

from gllm.commands.top.draw import draw, fit, headline
from gllm.commands.top.figures import Figures, History
from gllm.commands.top.scrape import Scrape, parse
from gllm.config.flags import FlagParser, FlagType, number_type, parse_url
from gllm.config.server import check_api_key

DEFAULT_URL = "http://127.0.0.1:8000"
MIN_TIMEOUT_SECONDS = 5.0
PIPE_WIDTH = 80
"""Columns of lines that no terminal shows."""

ENTER = "\x1b[?1049h\x1b[?25l"
LEAVE = "\x1b[?25h\x1b[?1049l"
"""The terminal's second screen, without a cursor, and back."""
HOME, END_OF_LINE, END_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"


class Unreachable(Exception):
    """No figures from the server; the message says why."""


class View:
    """What is known of a server, as text."""

    def __init__(self, url: str, interval: float, api_key: str | None) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        self._timeout = max(interval, MIN_TIMEOUT_SECONDS)
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._history = History()
        self._figures: Figures | None = None
        self._seen = 0.0

    def look(self) -> None:
        """Ask the server. Raises Unreachable; what was known before stays."""
        scrape = self._scrape()
        self._figures, self._seen = self._history.add(scrape), scrape.time

    def lines(self, width: int, height: int | None, trouble: str = "") -> list[str]:
        """The view; with `trouble`, why it is an old one."""
        if self._figures is None:
            return fit([headline("gllm top", self._url, width), "", trouble], width, height)
        if not trouble:
            return draw(self._figures, self._history.rates, self._url, width, height)
        age = f"{trouble}; these are figures of {time.monotonic() - self._seen:.0f} s ago"
        room = None if height is None else max(height - 2, 1)
        known = draw(self._figures, self._history.rates, self._url, width, room)
        return fit([*known, "", age], width, height)

    def _scrape(self) -> Scrape:
        try:
            request = urllib.request.Request(f"{self._url}/metrics", headers=self._headers)
            with urllib.request.urlopen(request, timeout=self._timeout) as answer:
                return parse(answer.read().decode(), time.monotonic())
        except urllib.error.HTTPError as error:
            error.close()
            hint = ": give it an --api-key" if error.code == 401 else ""
            raise Unreachable(f"{self._url} answered {error.code}{hint}") from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise Unreachable(f"no figures from {self._url} ({error})") from error


def once(view: View, interval: float) -> int:
    """Print one table, of the time between two looks."""
    try:
        view.look()
        time.sleep(interval)
        view.look()
    except Unreachable as error:
        print(f"gllm top: {error}; name another server with --url", file=sys.stderr)
        return 1
    print("\n".join(view.lines(shutil.get_terminal_size((PIPE_WIDTH, 24)).columns, None)))
    return 0


def follow(view: View, interval: float) -> None:
    """Show the server until `q` or an interrupt: in place on a terminal, one table after another
    else."""
    terminal = sys.stdout.isatty()
    due = time.monotonic()
    while True:
        trouble = ""
        try:
            view.look()
        except Unreachable as error:
            trouble = str(error)
        size = shutil.get_terminal_size((PIPE_WIDTH, 24))
        if terminal:
            lines = view.lines(size.columns, size.lines - 1, trouble)
            text = "".join(f"{line}{END_OF_LINE}\n" for line in lines)
            # In one write, and nothing is cleared before it is written anew: no flicker.
            sys.stdout.write(f"{HOME}{text}{END_OF_SCREEN}")
        else:
            sys.stdout.write("\n".join([*view.lines(size.columns, None, trouble), "", ""]))
        sys.stdout.flush()
        due = max(due + interval, time.monotonic())
        if _wait_for_quit(due):
            return


def _wait_for_quit(deadline: float) -> bool:
    """Wait until a time of the monotonic clock; return True as soon as `q` is pressed.

    Other keys are ignored, and so is everything where standard input is no terminal.
    """
    keys = sys.stdin.fileno() if _has_keyboard() else None
    while (left := deadline - time.monotonic()) > 0:
        if keys is None:
            time.sleep(left)
        elif select.select([keys], [], [], left)[0]:
            pressed = os.read(keys, 1024)
            if b"q" in pressed.lower():
                return True
            if not pressed:  # the terminal hung up
                return True
    return False


def _has_keyboard() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


@contextmanager
def _keys_at_once() -> Iterator[None]:
    """Have keys read when they are pressed, without a line's end and without showing them."""
    if not _has_keyboard():
        yield
        return
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def main(argv: list[str] | None = None) -> int:
    """Run `gllm top`; 1 where `--once` finds no server."""
    arguments = make_parser().parse_args(argv)
    key = arguments.api_key or os.environ.get("GLLM_API_KEY", "").split(",")[0]
    try:
        if key:
            check_api_key(key, "--api-key or $GLLM_API_KEY")
    except ValueError as error:
        print(f"gllm top: {error}", file=sys.stderr)
        return 2
    view = View(arguments.url, arguments.interval, key)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal that knows no bars shows question marks.
        sys.stdout.reconfigure(errors="replace")
    terminal = sys.stdout.isatty() and not arguments.once
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        if arguments.once:
            return once(view, arguments.interval)
        if terminal:
            sys.stdout.write(ENTER)
        with _keys_at_once() if terminal else nullcontext():
            follow(view, arguments.interval)
        return 0
    except KeyboardInterrupt:
        return 0
    except BrokenPipeError:
        # Who read has enough; nothing is left to be flushed at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    finally:
        if terminal:
            sys.stdout.write(LEAVE)
            sys.stdout.flush()


def make_parser() -> argparse.ArgumentParser:
    parser = FlagParser(prog="gllm top", description="Watch a running server. q or Ctrl-C leaves.")
    parser.add_argument(
        "--url",
        default=DEFAULT_URL,
        type=FlagType(parse_url),
        help=f"the server (default {DEFAULT_URL})",
    )
    parser.add_argument(
        "--interval",
        type=number_type(float, ge=0.1, le=3600),
        default=1.0,
        help="seconds between looks (default 1)",
    )
    parser.add_argument("--once", action="store_true", help="print one table and end")
    parser.add_argument("--api-key", help="default: $GLLM_API_KEY")
    return parser


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
