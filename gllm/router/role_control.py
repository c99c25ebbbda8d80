"""Roles of a router's engines: commands of an operator, and changes by policy.

The role belongs to the engine, which announces it to all its routers. A change is a command to the
engine; it takes effect here with the engine's next announcement. Running requests go on where they
are, because every engine can run both phases.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping

from gllm.config.router import RouterConfig
from gllm.engine.fleet_control import UnknownEngineError
from gllm.messages.fleet import SetEngineRole
from gllm.router.engine_record import EngineRecord
from gllm.routing.disaggregation.policy import PairPolicy, RoleChange
from gllm.routing.scaling.role_changes import FlipPolicy
from gllm.runtime.messaging.fleet_links import FleetLinks

log = logging.getLogger(__name__)


class RoleControl:
    """Changes the roles of engines (prefill, decode, mixed) by command or by load.

    Implements `EngineRoles`.
    """

    def __init__(
        self,
        links: FleetLinks,
        records: Mapping[str, EngineRecord],
        config: RouterConfig,
        clock: Callable[[], float],
        pair_policy: PairPolicy | None,
    ) -> None:
        """Create the control of engines, which may attach and leave later.

        Args:
            links: connections to the engines.
            records: states of the engines, by name.
            config: configuration of the router.
            clock: returns the time in seconds.
            pair_policy: may change roles permanently; None without.
        """
        self.num_commands: Counter[str] = Counter()
        """Commands of this router, by role; one for the role that an engine has changes nothing."""
        self._links = links
        self._records = records
        self._run = links.greeting.run
        self._clock = clock
        self._pair_policy = pair_policy
        self._flip_policy = FlipPolicy(config.flip_conditions) if config.flips else None

    def leads(self, name: str) -> bool:
        """Return True if this router is the only one that may change an engine's role."""
        record = self._records.get(name)
        return record is not None and record.report.leader == self._run

    def leads_all(self) -> bool:
        """Return True if this router may change the roles of all engines, or there are none."""
        return all(map(self.leads, self._records))

    def set_role(self, name: str, role: str) -> str:
        """Command an engine to take a role; return the role that it announces now."""
        record = self._records.get(name)
        if record is None:
            raise UnknownEngineError(f"no engine is named {name!r}")
        # Also if it is the announced one: an earlier command may be on its way.
        self._send(name, role, "an operator")
        return record.announce.role

    def on_tick(self) -> None:
        """Apply the role changes that the policies decide; called once per second.

        All routers observe the engines, so that each can become the leading one at any time.
        """
        if self._pair_policy is None and self._flip_policy is None:
            return
        now = self._clock()
        engines = [record.snapshot() for record in self._records.values()]
        changes: list[RoleChange] = []
        if self._pair_policy is not None:
            changes += self._pair_policy.role_changes(engines, now)
        if self._flip_policy is not None and (flip := self._flip_policy.observe(engines, now)):
            changes.append(flip)
        for change in changes:
            if self.leads(change.engine):
                self._send(change.engine, change.role, "the load")

    def _send(self, name: str, role: str, cause: str) -> None:
        log.info("engine %s gets the role %s because of %s", name, role, cause)
        self.num_commands[role] += 1
        self._links.links[name].send(SetEngineRole(role))
