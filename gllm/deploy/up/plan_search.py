"""Search for a new plan in a process of its own, at the lowest priority."""

import asyncio
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from gllm.deploy.logged_process import LoggedProcess
from gllm.plan.search_command import make_search_command
from gllm.plan.serving_plan import ServingPlan, read_plan

SEARCH_NAME = "search"
"""Name of the process in front of its lines."""
LIMIT_FACTOR, LIMIT_SECONDS = 3.0, 120.0
"""A search is ended after this many times its budget, and this much more for its start."""


class PlanSearchError(Exception):
    """No plan was made; the message has the cause."""


class PlanSearch:
    """Searches for plans of one service, one after the other.

    Args:
        plan: The plan that was started, whose command is repeated.
        path: Its file; new ones are written beside it.
        budget_seconds: Time of a search.
        on_line: Receives the name of the process and a line that it writes.
        make_command: Returns program and arguments by those of `gllm`; None for this Python.
        limit_seconds: Time after which a search is ended; None for a multiple of its budget.
    """

    def __init__(
        self,
        plan: ServingPlan,
        path: Path,
        budget_seconds: float,
        on_line: Callable[[str, str], None],
        make_command: Callable[[list[str]], Sequence[str]] | None = None,
        limit_seconds: float | None = None,
    ) -> None:
        self._plan = plan
        self._path = path
        self._budget_seconds = budget_seconds
        self._on_line = on_line
        self._make_command = make_command or nice_command
        if limit_seconds is None:
            limit_seconds = LIMIT_FACTOR * budget_seconds + LIMIT_SECONDS
        self.limit_seconds = limit_seconds
        """Time after which a search is ended."""

    async def run(self, lengths: str, rate: float) -> tuple[ServingPlan, Path]:
        """Return a plan for observed requests, and its file.

        Args:
            lengths: Text of a CSV file of prompt and output tokens.
            rate: Requests per second.

        Raises:
            PlanSearchError: The search has failed or has taken too long.
            PlanError, OSError: Its plan cannot be served, or a file cannot be written.
        """
        workload, output = self._next_files()
        workload.write_text(lengths, encoding="utf-8")
        arguments = make_search_command(self._plan, workload, rate, output, self._budget_seconds)
        child = LoggedProcess(lambda line: self._on_line(SEARCH_NAME, line))
        try:
            async with asyncio.timeout(self.limit_seconds):
                child.start(self._make_command(arguments), os.environ, has_own_group=True)
                cause = await child.wait()
        except TimeoutError:
            raise PlanSearchError(f"it has not ended after {self.limit_seconds:g} s") from None
        finally:
            # Its simulations have processes of their own.
            await child.kill_group()
        if child.status != 0:
            raise PlanSearchError(cause)
        if not output.exists():
            raise PlanSearchError("it has written no plan")
        return read_plan(output), output

    def _next_files(self) -> tuple[Path, Path]:
        """Return files for the lengths and the plan that do not exist."""
        number = 1
        while True:
            stem = self._path.with_name(f"{self._path.stem}.shift-{number}")
            files = Path(f"{stem}.csv"), Path(f"{stem}.yaml")
            if not any(file.exists() for file in files):
                return files
            number += 1


def nice_command(arguments: list[str]) -> list[str]:
    """Return a command of gllm that takes only CPU time which no other process wants."""
    nice = shutil.which("nice")
    return [*([nice, "-n", "19"] if nice else []), sys.executable, "-m", "gllm", *arguments]
