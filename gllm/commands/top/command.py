"""`gllm top`: show a running server's /metrics in the terminal, refreshed periodically."""

import argparse
import io
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import NoReturn

from gllm.commands.server_command import add_server_flags, make_client, report_failure
from gllm.commands.top.figures import ScrapeHistory, ServerMetrics
from gllm.commands.top.render import fit_lines, format_headline, render
from gllm.deploy.metrics_scrape import parse_metrics
from gllm.deploy.server_client import ServerClient, ServerError
from gllm.options.flags import FlagParser, number_type

MIN_TIMEOUT_SECONDS = 5.0
PIPE_WIDTH = 80
"""Columns when standard output is not a terminal."""

ENTER = "\x1b[?1049h\x1b[?25l"
LEAVE = "\x1b[?25h\x1b[?1049l"
"""Switch to the alternate screen without a cursor, and back."""
HOME, END_OF_LINE, END_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"


class ServerView:
    """Latest metrics of a server, scraped from /metrics, as lines of text for a terminal."""

    def __init__(self, server: ServerClient) -> None:
        self._server = server
        self._history = ScrapeHistory()
        self._metrics: ServerMetrics | None = None
        self._scrape_time = 0.0

    def refresh(self) -> None:
        """Scrape the server; on failure the previous metrics stay.

        Raises:
            ServerError: The server does not return metrics.
        """
        text = self._server.get_text("/metrics")
        try:
            scrape = parse_metrics(text, time.monotonic())
        except ValueError as error:
            raise ServerError(f"cannot read metrics from {self._server.url} ({error})") from error
        self._metrics, self._scrape_time = self._history.add(scrape), scrape.time

    def lines(self, width: int, height: int | None, error: str = "") -> list[str]:
        """Return the view as lines of text.

        Args:
            width: columns per line.
            height: maximum number of lines; None for no limit.
            error: reason why the last scrape failed; shown with the age of the metrics.
        """
        if self._metrics is None:
            return fit_lines(
                [format_headline("gllm top", self._server.url, width), "", error], width, height
            )
        if not error:
            return render(self._metrics, self._history.rates, self._server.url, width, height)
        age = f"{error}; metrics are {time.monotonic() - self._scrape_time:.0f} s old"
        lines_left = None if height is None else max(height - 2, 1)
        lines = render(self._metrics, self._history.rates, self._server.url, width, lines_left)
        return fit_lines([*lines, "", age], width, height)


def print_once(view: ServerView, interval: float) -> int:
    """Scrape the server twice, `interval` seconds apart, and print its metrics between the scrapes.

    Returns:
        The exit status: 1 if the server does not return metrics.
    """
    try:
        view.refresh()
        time.sleep(interval)
        view.refresh()
    except ServerError as error:
        print(f"gllm top: {error}; set --url for another server", file=sys.stderr)
        return 1
    print("\n".join(view.lines(shutil.get_terminal_size((PIPE_WIDTH, 24)).columns, None)))
    return 0


def watch(view: ServerView, interval: float) -> None:
    """Show the metrics of a server, updated every `interval` seconds, until `q` or Ctrl-C.

    On a terminal the view is updated in place, otherwise tables are printed one after another.
    """
    is_terminal = sys.stdout.isatty()
    due = time.monotonic()
    while True:
        error = ""
        try:
            view.refresh()
        except ServerError as failure:
            error = str(failure)
        size = shutil.get_terminal_size((PIPE_WIDTH, 24))
        if is_terminal:
            lines = view.lines(size.columns, size.lines - 1, error)
            text = "".join(f"{line}{END_OF_LINE}\n" for line in lines)
            # One write, without clearing first, avoids flicker.
            sys.stdout.write(f"{HOME}{text}{END_OF_SCREEN}")
        else:
            sys.stdout.write("\n".join([*view.lines(size.columns, None, error), "", ""]))
        sys.stdout.flush()
        due = max(due + interval, time.monotonic())
        if _wait_for_quit(due):
            return


def _wait_for_quit(deadline: float) -> bool:
    """Wait until a time of the monotonic clock; return True as soon as `q` is pressed.

    Other keys are ignored, as is all input if standard input is not a terminal.
    """
    keys = sys.stdin.fileno() if _has_keyboard() else None
    while (seconds_left := deadline - time.monotonic()) > 0:
        if keys is None:
            time.sleep(seconds_left)
        elif select.select([keys], [], [], seconds_left)[0]:
            pressed = os.read(keys, 1024)
            if b"q" in pressed.lower():
                return True
            if not pressed:  # the terminal was closed
                return True
    return False


def _has_keyboard() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


@contextmanager
def _unbuffered_keys() -> Iterator[None]:
    """Deliver key presses immediately and without echo while the context is active."""
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
    """Show the metrics of a running server in the terminal.

    Returns:
        The exit status: 1 if `--once` is given and the server does not return metrics.
    """
    arguments = make_parser().parse_args(argv)
    try:
        client = make_client(arguments, max(arguments.interval, MIN_TIMEOUT_SECONDS))
    except ValueError as error:
        return report_failure("top", error)
    view = ServerView(client)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal whose encoding lacks the bars shows question marks.
        sys.stdout.reconfigure(errors="replace")
    is_full_screen = sys.stdout.isatty() and not arguments.once
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        if arguments.once:
            return print_once(view, arguments.interval)
        if is_full_screen:
            sys.stdout.write(ENTER)
        with _unbuffered_keys() if is_full_screen else nullcontext():
            watch(view, arguments.interval)
        return 0
    except KeyboardInterrupt:
        return 0
    except BrokenPipeError:
        # The reader closed the pipe: nothing may be flushed at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    finally:
        if is_full_screen:
            sys.stdout.write(LEAVE)
            sys.stdout.flush()


def make_parser() -> argparse.ArgumentParser:
    """Return the argument parser of `gllm top`."""
    parser = FlagParser(prog="gllm top", description="Watch a running server. q or Ctrl-C exits.")
    add_server_flags(parser)
    parser.add_argument(
        "--interval",
        type=number_type(float, ge=0.1, le=3600),
        default=1.0,
        help="seconds between scrapes (default 1)",
    )
    parser.add_argument("--once", action="store_true", help="print one table and exit")
    return parser


def _interrupt(signal_number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
