"""Starts and stops the engines of this node as a router that scales decides.

All nodes of a plan ask the same router and choose by the order of the plan, so that together they
run as many engines as it wants.
"""

import asyncio
import logging
from collections.abc import Collection, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple

from gllm.deploy.server_client import ServerClient, follow_router
from gllm.deploy.up.engine_manager import EngineManager
from gllm.recovery.backoff import Backoff

POLL_SECONDS = 0.5
"""Time between two looks at the router's decision."""
RETRY_SECONDS = 5.0
MAX_RETRY_SECONDS = 60.0
"""Shortest and longest time after which an engine that has failed is started again."""
log = logging.getLogger("gllm")


class EngineActions(NamedTuple):
    """Names of the engines of this node to start, drain, undrain (serve again) and stop."""

    start: tuple[str, ...] = ()
    drain: tuple[str, ...] = ()
    undrain: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()


def choose_actions(
    order: Sequence[str],
    own: Collection[str],
    running: Collection[str],
    attached: Mapping[str, str],
    scaling: Mapping[str, Any],
) -> EngineActions:
    """Return the actions of this node that lead to the number of engines that the router requests.

    Args:
        order: names of all engines of the plan, in its order.
        own: engines of this node.
        running: engines of this node whose processes run.
        attached: state of each engine that is connected to the router.
        scaling: field `scaling` in the router's response to GET /engines.
    """
    if not scaling["is_leader"]:
        return EngineActions()
    drain, undrain = scaling["drain"], scaling["undrain"]
    active = {
        name for name, state in attached.items()
        if name in undrain or (state != "draining" and name not in drain)
    }  # fmt: skip
    num_lacking = max(0, scaling["num_wanted"] - len(active))
    # Those that start on any node are not attached yet: they are first in this order on all nodes.
    candidates = [name for name in order if name not in attached][:num_lacking]
    return EngineActions(
        tuple(name for name in candidates if name in own and name not in running),
        tuple(name for name in drain if name in running),
        tuple(name for name in undrain if name in running),
        tuple(name for name in scaling["removable"] if name in running),
    )


class EngineScaler:
    """Loop that starts and stops engines of this node as the router's autoscaling requests.

    Args:
        manager: starts and ends the engines of this node.
        router: HTTP client of the router.
        order: names of all engines of the plan, in its order.
        own: engines of this node.
        poll_seconds: interval of requests to the router.
        retry_seconds: delay of the first restart of a failed engine; it doubles with each failure.
    """

    def __init__(
        self,
        manager: EngineManager,
        router: ServerClient,
        order: Sequence[str],
        own: Collection[str],
        poll_seconds: float = POLL_SECONDS,
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        self.num_failures = 0
        """Engines that have failed at their start."""
        self._manager = manager
        self._router = router
        self._order = order
        self._own = own
        self._poll_seconds = poll_seconds
        self._backoffs = {
            name: Backoff(first_seconds=retry_seconds, max_seconds=MAX_RETRY_SECONDS)
            for name in own
        }
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Poll the router and apply its scaling decisions, until this task is cancelled."""
        try:
            await follow_router(self._router, self._follow, self._poll_seconds)
        finally:
            for task in self._tasks.values():
                task.cancel()

    async def _follow(self, body: Mapping[str, Any]) -> None:
        if body.get("scaling") is None:
            return
        attached = {row["name"]: row["state"] for row in body["engines"]}
        actions = choose_actions(
            self._order, self._own, self._manager.running, attached, body["scaling"]
        )
        for name in actions.start:
            self._spawn(name, self._start(name))
        for name in actions.stop:
            self._spawn(name, self._stop(name))
        commands = [(name, "drain?scaling=true") for name in actions.drain]
        commands += [(name, "undrain") for name in actions.undrain]
        for name, command in commands:
            await asyncio.to_thread(self._router.post, f"/engines/{name}/{command}")
            log.info("engine %s: %s", name, command.partition("?")[0])

    def _spawn(self, name: str, action: Coroutine[Any, Any, None]) -> None:
        """Run an action, unless the engine has one."""
        task = self._tasks.get(name)
        if task is not None and not task.done():
            action.close()
            return
        self._tasks[name] = asyncio.create_task(action)

    async def _start(self, name: str) -> None:
        log.info("engine %s starts: the router wants it", name)
        try:
            await self._manager.start_engine(name)
            self._backoffs[name].reset()
        except ValueError as error:
            self.num_failures += 1
            log.warning("%s; it is started again", error)
            await asyncio.sleep(self._backoffs[name].next_delay())

    async def _stop(self, name: str) -> None:
        log.info("engine %s ends: it has drained", name)
        try:
            await self._manager.drain_engine(name)
        except ValueError as error:
            log.warning("%s", error)
