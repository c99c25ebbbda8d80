"""`gllm up --on ray`: run a plan in a Ray cluster until a signal.

With a router that scales, the actors and placement groups of an engine exist only while the router
wants the engine, so that Ray's autoscaler follows too.
"""

import asyncio
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gllm.deploy.ray.manager import POLL_SECONDS
from gllm.deploy.up import scale_follower
from gllm.deploy.up.ray_plan import RayPlan
from gllm.deploy.up.scale_follower import ScaleFollower
from gllm.plan.processes import LaunchOptions, router_headers, scaling_router_url
from gllm.plan.serving_plan import ServingPlan


@dataclass(frozen=True)
class RayTimes:
    """Intervals of the checks of a plan in Ray, in seconds."""

    poll_seconds: float = POLL_SECONDS
    """Interval of the checks of processes and resources."""
    follow_seconds: float = scale_follower.POLL_SECONDS
    """Interval at which the router's decision is read."""
    retry_seconds: float = scale_follower.RETRY_SECONDS
    """Time after which an engine that has failed is started again."""


class RayEngineSupervisor:
    """Engines of a plan in Ray, for a `ScaleFollower`: calls of `RayPlan` in threads."""

    def __init__(self, ray_plan: RayPlan) -> None:
        self._ray_plan = ray_plan

    @property
    def running(self) -> list[str]:
        """Names of the engines that run and shall not end."""
        return self._ray_plan.running_engines

    async def start_engine(self, name: str) -> None:
        """Start an engine and wait until it is ready. Raises ValueError if it fails."""
        await asyncio.to_thread(self._ray_plan.start_engine, name)

    async def drain_engine(self, name: str) -> None:
        """Let an engine end. Raises ValueError if it does not run."""
        await asyncio.to_thread(self._ray_plan.drain_engine, name)


def run_plan(
    plan: ServingPlan,
    options: LaunchOptions,
    address: str | None,
    on_ready: Callable[[str], None],
    ray: Any = None,
    times: RayTimes = RayTimes(),
) -> None:
    """Run a plan in a Ray cluster until SIGTERM or SIGINT.

    Args:
        plan: with a router.
        options: files of every machine.
        address: of the Ray cluster; None for RAY_ADDRESS or the cluster of this machine.
        on_ready: receives the URL of the router once all processes are ready.
        ray: the package; None to import it.
        times: intervals of the checks.

    Raises:
        LaunchError: Ray cannot be used, or a process cannot run.
        PlanError: the plan cannot be run.
    """
    should_stop = threading.Event()
    is_scaled = bool(scaling_router_url(plan))
    ray_plan = RayPlan(plan, options, address, should_stop, is_scaled, ray, times.poll_seconds)
    urls: list[str] = []

    def report(url: str) -> None:
        urls.append(url)
        on_ready(url)

    try:
        _stop_on_signals(should_stop)
        ray_plan.start()
        # Ray has set handlers of its own.
        _stop_on_signals(should_stop)
        ray_plan.wait_until_ready(report)
        if is_scaled and urls:
            asyncio.run(follow_router(ray_plan, plan, urls[0], should_stop, times))
        else:
            ray_plan.watch()
        ray_plan.drain()
    finally:
        ray_plan.close()


async def follow_router(
    ray_plan: RayPlan,
    plan: ServingPlan,
    url: str,
    should_stop: threading.Event,
    times: RayTimes = RayTimes(),
) -> None:
    """Start and drain the engines of a plan as its router decides, until they shall end.

    Args:
        ray_plan: The plan in Ray, whose router runs.
        plan: The plan.
        url: URL of the router.
        should_stop: Set to end, and set at the end: no engine is waited for any longer.
        times: Intervals of the checks.

    Raises:
        LaunchError: the router cannot run.
    """
    order = list(plan.engines)
    supervisor = RayEngineSupervisor(ray_plan)
    follower = ScaleFollower(
        supervisor,
        url,
        order,
        order,
        router_headers(plan),
        times.follow_seconds,
        times.retry_seconds,
    )
    following = asyncio.create_task(follower.run())
    try:
        while not should_stop.is_set():
            await asyncio.sleep(times.poll_seconds)
            await asyncio.to_thread(ray_plan.poll)
    finally:
        should_stop.set()
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


def _stop_on_signals(should_stop: threading.Event) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: should_stop.set())
