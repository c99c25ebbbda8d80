"""Follows the workload that a router observes: after a lasting shift a new plan is applied.

One engine at a time starts or ends. If one does not come, all of the change is undone.
"""

import asyncio
import logging
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from gllm.deploy.logged_process import LoggedProcess
from gllm.deploy.server_client import ServerClient, ServerError, follow_router
from gllm.deploy.up.engine_manager import EngineManager
from gllm.observability.child_process import module_command
from gllm.plan.plan_change import (
    ChangeAction,
    ChangeRole,
    PlanChange,
    StartEngine,
    StopEngine,
    adopt_plan,
    change_plan,
    pin_ports,
    undo_actions,
)
from gllm.plan.processes import ProcessSpec
from gllm.plan.search_command import make_search_command
from gllm.plan.serving_plan import PlanError, ServingPlan, read_plan, write_plan
from gllm.recovery.backoff import backoff_seconds

POLL_SECONDS = 2.0
"""Time between two looks at the router's workload."""
ATTACH_POLL_SECONDS = 0.2
"""Time between two looks at an engine that has to attach or to change its role."""
ATTACH_SECONDS = 60.0
"""Time after which an engine that is ready, or was given a role, is not waited for any longer."""
START_SECONDS = 900.0
"""Time in which an engine has to be ready, if START_FACTOR gives no longer one."""
START_FACTOR = 3.0
"""Multiple of the plan's expected start-up time in which an engine has to be ready."""
RETRY_SECONDS, MAX_RETRY_SECONDS = 60.0, 3600.0
"""First and longest delay before a search is repeated after a failure."""
SEARCH_NAME = "search"
"""Name of the process in front of its lines."""
LIMIT_FACTOR, LIMIT_SECONDS = 3.0, 120.0
"""A search is ended after this many times its budget, and this much more for its start."""
log = logging.getLogger("gllm")


class PlanSearchError(Exception):
    """Raised if a search has produced no plan; the message has the cause."""


class PlanSearch:
    """Repeats the `gllm plan` search of a plan for an observed workload, in a child process.

    Args:
        plan: running plan, whose search command is repeated.
        path: file of that plan; new plans are written into the same folder.
        budget_seconds: time limit that is passed to the search.
        on_line: called with the name of the process and a line of its output.
        make_command: returns program and arguments for arguments of `gllm`; None for this Python.
        limit_seconds: time after which the process is killed; None for a multiple of the budget.
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
        """Search for a plan for observed requests; return the plan and its file.

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
    """Return a command line that runs `gllm` with the lowest CPU priority, if `nice` exists."""
    nice = shutil.which("nice")
    return [*([nice, "-n", "19"] if nice else []), *module_command("gllm", *arguments)]


@dataclass(frozen=True)
class ReplanTimes:
    """Intervals and timeouts of a `Replanner`, in seconds."""

    poll_seconds: float = POLL_SECONDS
    attach_poll_seconds: float = ATTACH_POLL_SECONDS
    attach_seconds: float = ATTACH_SECONDS
    start_seconds: float = START_SECONDS
    retry_seconds: float = RETRY_SECONDS


class ReplanAttempts:
    """Decides when a search for a new plan is due: after each shift, and again after a failure.

    Until a plan has been adopted, attempts repeat with delays that double.

    Args:
        retry_seconds: first of these delays.
    """

    def __init__(self, retry_seconds: float = RETRY_SECONDS) -> None:
        self._retry_seconds = retry_seconds
        self._num_shifts = 0
        """Shifts that were seen."""
        self._due: float | None = None
        """Time of the next search; None if the running plan is that of the workload."""
        self._num_failures = 0

    def on_status(self, num_shifts: int, now: float) -> None:
        """Record the number of shifts that the router has counted.

        Args:
            num_shifts: shifts since the start of the router; fewer than before: it started again,
                and knows neither the shift nor the workload that a search is for.
            now: time in seconds.
        """
        if num_shifts > self._num_shifts:
            self._due, self._num_failures = now, 0
        elif num_shifts < self._num_shifts:
            self._due = None
        self._num_shifts = num_shifts

    def is_due(self, now: float) -> bool:
        """Return True if a search has to begin."""
        return self._due is not None and now >= self._due

    def on_failure(self, now: float) -> float:
        """Plan the next attempt after one that changed no plan; return its delay in seconds."""
        seconds = backoff_seconds(self._num_failures, self._retry_seconds, MAX_RETRY_SECONDS)
        self._num_failures += 1
        self._due = now + seconds
        return seconds

    def on_adopted(self) -> None:
        """End the attempts: a plan for the workload runs."""
        self._due = None


class Replanner:
    """Loop that searches for a new plan after each shift of the workload, and applies it.

    A search that has failed, and a plan that could not be applied, are tried again later.

    A shift is a lasting change of request rate or lengths that the router reports. Engines are
    started, stopped or switched between prefill and decode.

    Args:
        manager: starts and ends the engines of this machine.
        router: HTTP client of the router.
        plan: running plan, which has a router.
        nodes: names of the nodes that are this machine.
        make_specs: returns this machine's processes of a plan.
        search: searches for new plans.
        times: intervals and timeouts.
    """

    def __init__(
        self,
        manager: EngineManager,
        router: ServerClient,
        plan: ServingPlan,
        nodes: Sequence[str],
        make_specs: Callable[[ServingPlan], Sequence[ProcessSpec]],
        search: PlanSearch,
        times: ReplanTimes = ReplanTimes(),
    ) -> None:
        self.plan = pin_ports(plan)
        """The plan that runs."""
        self.num_searches = 0
        self._manager = manager
        self._router = router
        self._nodes = nodes
        self._make_specs = make_specs
        self._search = search
        self._times = times
        self._attempts = ReplanAttempts(times.retry_seconds)

    async def run(self) -> None:
        """Poll the router and replan after each shift, until this task is cancelled."""
        await follow_router(self._router, self._follow, self._times.poll_seconds)

    async def _follow(self, body: Mapping[str, Any]) -> None:
        workload = body["workload"]
        if workload is None or not workload["is_leader"]:
            return
        # Later shifts, also those of the time of a search, are one more.
        self._attempts.on_status(workload["num_shifts"], monotonic())
        if not self._attempts.is_due(monotonic()):
            return
        if await self._replan(workload["shift"]):
            self._attempts.on_adopted()
        else:
            seconds = self._attempts.on_failure(monotonic())
            log.info("a new plan is searched again after %.0f s", seconds)

    async def _replan(self, shift: Mapping[str, Any]) -> bool:
        """Search for a plan for the shifted workload and apply it; return True if it runs."""
        rate = shift["after"]["rate"]
        log.info(
            "the workload has shifted (%s): a plan for %.3g requests/s is searched",
            ", ".join(shift["quantities"]), rate,
        )  # fmt: skip
        lengths = await asyncio.to_thread(self._router.get_text, "/workload")
        self.num_searches += 1
        try:
            new, path = await self._search.run(lengths, rate)
        except (PlanSearchError, PlanError, OSError) as error:
            log.warning("no new plan: %s; the running one stays", error)
            return False
        try:
            change = change_plan(self.plan, adopt_plan(self.plan, new))
            self._check_nodes(change)
        except PlanError as error:
            log.warning("%s is not applied: %s", path, error)
            return False
        write_plan(change.plan, path)
        if change.actions:
            return await self._apply(change, path)
        log.info("the new plan has the running engines: nothing changes")
        await self._adopt(change.plan)
        return True

    def _check_nodes(self, change: PlanChange) -> None:
        """Raise PlanError if engines of other nodes would have to start or to end."""
        for action in change.actions:
            plan = self.plan if isinstance(action, StopEngine) else change.plan
            nodes = plan.engines[action.name].nodes
            if not isinstance(action, ChangeRole) and not set(nodes) <= set(self._nodes):
                raise PlanError(
                    f"engines.{action.name}: it would have to start or to end on "
                    f"{', '.join(nodes)}, but engines change on {', '.join(self._nodes)} only, "
                    "where the router is: start the new plan with `gllm up` on all nodes"
                )

    async def _apply(self, change: PlanChange, path: Path) -> bool:
        """Apply the actions of a change, or undo them; without the old engines all ends.

        Returns:
            True if the new plan runs.
        """
        log.info("%s is applied: %s", path, describe_actions(change.actions))
        done: list[ChangeAction] = []
        try:
            await self._run_actions(change.plan, change.actions, done)
        except (ValueError, ServerError, TimeoutError) as error:
            if self._manager.is_stopping:
                return False
            log.warning("%s is taken back: %s", path, error)
            try:
                await self._run_actions(self.plan, undo_actions(done, self.plan), [])
            except (ValueError, ServerError, TimeoutError) as second:
                if not self._manager.is_stopping:
                    self._manager.fail(f"the plan before {path} could not be restored: {second}")
            return False
        await self._adopt(change.plan)
        log.info("%s is the running plan", path)
        return True

    async def _adopt(self, plan: ServingPlan) -> None:
        """Make a plan the running one; the router measures its reference workload anew."""
        self.plan = plan
        try:
            # Clients that wait for answers send more requests now, which is no shift.
            await asyncio.to_thread(self._router.post, "/workload/profile")
        except ServerError as error:
            log.warning("the router keeps its profile: %s", error)

    async def _run_actions(
        self,
        plan: ServingPlan,
        actions: Sequence[ChangeAction],
        done: list[ChangeAction],
    ) -> None:
        """Run actions towards a plan; append each one that has an effect.

        Raises:
            ValueError, ServerError, TimeoutError: One has failed.
        """
        self._manager.set_specs(self._make_specs(plan))
        expected = plan.expected.startup_seconds if plan.expected else None
        limit = max(self._times.start_seconds, START_FACTOR * (expected or 0.0))
        for action in actions:
            match action:
                case StartEngine(name):
                    await self._manager.start_engine(name, limit, may_fail=True)
                    # From here on it has to end if the change is undone.
                    done.append(action)
                    await self._wait_for_engine(name, "state", "ready")
                case StopEngine(name):
                    done.append(action)
                    await self._manager.drain_engine(name, may_fail=True)
                case ChangeRole(name, role):
                    done.append(action)
                    path, body = f"/engines/{name}/role", {"role": role}
                    await asyncio.to_thread(self._router.post, path, body)
                    await self._wait_for_engine(name, "role", role)

    async def _wait_for_engine(self, name: str, field: str, value: str) -> None:
        """Wait until the router shows a value for an engine. Raises TimeoutError."""
        limit = self._times.attach_seconds
        try:
            async with asyncio.timeout(limit):
                while not await self._shows(name, field, value):
                    await asyncio.sleep(self._times.attach_poll_seconds)
        except TimeoutError:
            raise TimeoutError(
                f"the router does not show engine {name} as {value} after {limit:g} s"
            ) from None

    async def _shows(self, name: str, field: str, value: str) -> bool:
        try:
            rows = (await asyncio.to_thread(self._router.get, "/engines"))["engines"]
        except ServerError:
            # A busy router answers the next time.
            return False
        return any(row["name"] == name and row[field] == value for row in rows)


def describe_actions(actions: Sequence[ChangeAction]) -> str:
    """Return the steps of a change between two plans as text, such as `start e1, end e2`."""
    verbs = {StartEngine: "start {0}", StopEngine: "end {0}", ChangeRole: "{0} becomes {1}"}
    return ", ".join(verbs[type(action)].format(*action) for action in actions)
