"""Stand-in of the package ray: a cluster without processes."""

import itertools
from types import SimpleNamespace
from typing import Any


class FakeGroup:
    """A placement group that is ready after a number of waits."""

    def __init__(self, bundles: list[dict[str, float]], num_waits: int) -> None:
        self.bundles = bundles
        self.num_waits = num_waits

    def wait(self, seconds: float) -> bool:
        self.num_waits -= 1
        return self.num_waits < 0


class FakeRay:
    """A Ray cluster; `places` has the machine of each bundle of its placement group."""

    def __init__(self, machines: list[dict[str, Any]], own: str, num_waits: int = 0) -> None:
        self.machines = machines
        self.own = own
        self.num_waits = num_waits
        self.places: dict[int, str | None] = {}
        self.actors: list[dict[str, Any]] = []
        self.killed: list[Any] = []
        self.removed: list[FakeGroup] = []
        self.address: str | None = None
        self.strategy = ""
        self.error: Exception | None = None
        self.is_connected = False
        self._numbers = itertools.count()
        strategies = SimpleNamespace(
            PlacementGroupSchedulingStrategy=lambda group, placement_group_bundle_index: (
                "bundle",
                placement_group_bundle_index,
            ),
            NodeAffinitySchedulingStrategy=lambda identity, soft: ("machine", identity, soft),
        )
        self.util = SimpleNamespace(
            get_node_ip_address=lambda: next(
                m["NodeManagerAddress"] for m in machines if m["NodeID"] == own
            ),
            placement_group=self._create_group,
            placement_group_table=lambda group: {"bundles_to_node_id": self.places},
            remove_placement_group=self.removed.append,
            scheduling_strategies=strategies,
        )

    def init(self, address: str, **options: Any) -> None:
        if self.error is not None:
            raise self.error
        self.address = address
        self.is_connected = True

    def is_initialized(self) -> bool:
        return self.is_connected

    def shutdown(self) -> None:
        self.is_connected = False

    def nodes(self) -> list[dict[str, Any]]:
        return self.machines

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: self.own)

    def remote(self, kind: type) -> Any:
        def create(**options: Any) -> Any:
            def start(*arguments: Any) -> Any:
                actor = {"kind": kind, "options": options, "arguments": arguments}
                self.actors.append(actor)
                return SimpleNamespace(
                    number=next(self._numbers),
                    gpu_ids=SimpleNamespace(remote=lambda: ["2", "3"]),
                )

            return SimpleNamespace(remote=start)

        return SimpleNamespace(options=create)

    def get(self, value: Any) -> Any:
        return value

    def kill(self, actor: Any, no_restart: bool) -> None:
        assert no_restart
        self.killed.append(actor)

    def _create_group(self, bundles: list[dict[str, float]], strategy: str) -> FakeGroup:
        self.strategy = strategy
        return FakeGroup(bundles, self.num_waits)
