"""Follows a router that decides how many engines run: starts, drains and stops those of this node.

All nodes of a plan ask the same router and choose by the order of the plan, so that together they
run as many engines as it wants.
"""

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import aiohttp

POLL_SECONDS = 0.5
"""Time between two looks at the router's decision."""
RETRY_SECONDS = 5.0
"""Time after which an engine that has failed is started again."""
TIMEOUT_SECONDS = 5.0
log = logging.getLogger("gllm")


class ScaleActions(NamedTuple):
    """Engines of this node to start, to drain, to take back and to stop."""

    start: tuple[str, ...] = ()
    drain: tuple[str, ...] = ()
    undrain: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()


class EngineSupervisor(Protocol):
    """Owner of this node's engine processes."""

    @property
    def running(self) -> list[str]:
        """Names of the processes that run and shall not end."""

    async def start_engine(self, name: str) -> None:
        """Start an engine. Raises ValueError if it fails."""

    async def drain_engine(self, name: str) -> None:
        """Let an engine end. Raises ValueError if it does not run."""


def choose_actions(
    order: Sequence[str],
    own: Collection[str],
    running: Collection[str],
    attached: Mapping[str, str],
    scaling: Mapping[str, Any],
) -> ScaleActions:
    """Return what this node has to do so that all nodes run as many engines as are wanted.

    Args:
        order: All engines of the plan, in its order.
        own: Those of this node.
        running: Engine processes of this node.
        attached: State of each engine that the router knows.
        scaling: The router's decision, as in `GET /engines`.
    """
    if not scaling["is_leader"]:
        return ScaleActions()
    drain, undrain = scaling["drain"], scaling["undrain"]
    active = {
        name for name, state in attached.items()
        if name in undrain or (state != "draining" and name not in drain)
    }  # fmt: skip
    num_lacking = max(0, scaling["num_wanted"] - len(active))
    # Those that start on any node are not attached yet: they are first in this order on all nodes.
    candidates = [name for name in order if name not in attached][:num_lacking]
    return ScaleActions(
        tuple(name for name in candidates if name in own and name not in running),
        tuple(name for name in drain if name in running),
        tuple(name for name in undrain if name in running),
        tuple(name for name in scaling["removable"] if name in running),
    )


class ScaleFollower:
    """Loop that follows a router's decision.

    Args:
        supervisor: Owner of the processes of this node.
        url: URL of the router.
        order: All engines of the plan, in its order.
        own: Those of this node.
        headers: Of each request to the router, such as its API key.
        poll_seconds: Time between two looks at the router's decision.
        retry_seconds: Time after which an engine that has failed is started again.
    """

    def __init__(
        self,
        supervisor: EngineSupervisor,
        url: str,
        order: Sequence[str],
        own: Collection[str],
        headers: Mapping[str, str] | None = None,
        poll_seconds: float = POLL_SECONDS,
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        self.num_failures = 0
        """Engines that have failed at their start."""
        self._supervisor = supervisor
        self._url = url
        self._order = order
        self._own = own
        self._headers = dict(headers or {})
        self._poll_seconds = poll_seconds
        self._retry_seconds = retry_seconds
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Follow the router until this task is cancelled."""
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)
        try:
            async with aiohttp.ClientSession(timeout=timeout, headers=self._headers) as session:
                while True:
                    try:
                        await self._follow(session)
                    except aiohttp.ClientResponseError as error:
                        log.warning("the router refuses GET /engines: %s", error)
                        await asyncio.sleep(self._retry_seconds)
                    except (aiohttp.ClientError, TimeoutError, OSError, KeyError) as error:
                        # The router starts, or restarts; its engines go on.
                        log.debug("the router at %s does not answer: %s", self._url, error)
                    await asyncio.sleep(self._poll_seconds)
        finally:
            for task in self._tasks.values():
                task.cancel()

    async def _follow(self, session: aiohttp.ClientSession) -> None:
        async with session.get(f"{self._url}/engines", ssl=False) as answer:
            answer.raise_for_status()
            body = await answer.json()
        if body.get("scaling") is None:
            return
        attached = {row["name"]: row["state"] for row in body["engines"]}
        actions = choose_actions(
            self._order, self._own, self._supervisor.running, attached, body["scaling"]
        )
        for name in actions.start:
            self._spawn(name, self._start(name))
        for name in actions.stop:
            self._spawn(name, self._stop(name))
        for verb in ("drain", "undrain"):
            for name in getattr(actions, verb):
                async with session.post(f"{self._url}/engines/{name}/{verb}", ssl=False) as answer:
                    log.info("engine %s: %s", name, verb)

    def _spawn(self, name: str, action: Any) -> None:
        """Run an action, unless the engine has one."""
        task = self._tasks.get(name)
        if task is not None and not task.done():
            action.close()
            return
        self._tasks[name] = asyncio.create_task(action)

    async def _start(self, name: str) -> None:
        log.info("engine %s starts: the router wants it", name)
        try:
            await self._supervisor.start_engine(name)
        except ValueError as error:
            self.num_failures += 1
            log.warning("%s; it is started again", error)
            await asyncio.sleep(self._retry_seconds)

    async def _stop(self, name: str) -> None:
        log.info("engine %s ends: it has drained", name)
        try:
            await self._supervisor.drain_engine(name)
        except ValueError as error:
            log.warning("%s", error)
