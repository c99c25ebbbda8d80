"""Connection to a Ray cluster: its machines, reserved resources, and actors on them."""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gllm.deploy.ray.bundles import RayMachine, describe_wait, read_ray_machines

LOG_SECONDS = 5.0
"""Interval of the log lines while Ray looks for machines."""
POLL_SECONDS = 1.0
"""Interval of the checks of resources, machines and processes."""
log = logging.getLogger("gllm")


class LaunchError(RuntimeError):
    """Raised if Ray is not available or lacks resources; the message has the fix."""


class RayUnavailableError(LaunchError):
    """Raised if Ray does not run yet, or has too few machines now."""


def import_ray(flag: str = "--distributed-executor-backend ray") -> Any:
    """Import and return the module ray.

    Args:
        flag: flag that requires Ray, for the message of the error.

    Raises:
        LaunchError: ray is not installed.
    """
    try:
        import ray
        import ray.util
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise LaunchError(
            f"{flag} needs the package ray ({error}): run `pip install -r "
            "requirements-ray.txt` in gllm's checkout on all machines, or leave the flag out"
        ) from error
    return ray


class RayCluster:
    """Connection to a Ray cluster: placement groups, actors and nodes.

    Args:
        ray: the module ray.
        poll_seconds: longest duration of one check for reserved resources.
        log_seconds: interval of log lines while resources are missing.
    """

    def __init__(
        self, ray: Any, poll_seconds: float = POLL_SECONDS, log_seconds: float = LOG_SECONDS
    ) -> None:
        self.ray = ray
        self.poll_seconds = poll_seconds
        self._log_seconds = log_seconds

    def connect(self, address: str | None, shows_logs: bool = True) -> None:
        """Connect this process to Ray.

        Args:
            address: address of the Ray cluster; None for RAY_ADDRESS or this machine's cluster.
            shows_logs: True to write the logs of actors to this process's standard error.

        Raises:
            LaunchError: the cluster cannot be reached.
        """
        try:
            self.ray.init(
                address=address or "auto", log_to_driver=shows_logs, configure_logging=False
            )
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise RayUnavailableError(
                f"Ray cannot be reached: {error}; start it on this machine with `ray start "
                "--head`, or `ray start --address HOST:6379` to join a cluster, or pass "
                "--ray-address"
            ) from error

    @property
    def own_address(self) -> str:
        """Address of this machine in Ray."""
        return str(self.ray.util.get_node_ip_address())

    def machines(self) -> list[RayMachine]:
        """Return the nodes of the Ray cluster, including lost ones."""
        return read_ray_machines(self.ray.nodes())

    def reserve(self, bundles: Sequence[Mapping[str, float]]) -> Any:
        """Create a placement group with each bundle on another machine."""
        strategy = "STRICT_SPREAD" if len(bundles) > 1 else "PACK"
        return self.ray.util.placement_group(bundles, strategy=strategy)

    def wait(self, placement: Any, bundles: Sequence[Mapping[str, float]]) -> Iterator[str]:
        """Wait for a placement group; yield a description of the missing resources per poll."""
        next_log = time.monotonic() + self._log_seconds
        while not placement.wait(self.poll_seconds):
            text = describe_wait(bundles, self.machines())
            if time.monotonic() >= next_log:
                next_log += self._log_seconds
                log.warning("%s", text)
            yield text

    def start_actor(
        self,
        kind: type,
        resources: Mapping[str, float],
        place: tuple[Any, int] | str,
        *arguments: Any,
        **options: Any,
    ) -> Any:
        """Start an actor and return its handle.

        Args:
            kind: class of the actor.
            resources: CPUs and GPUs that it takes.
            place: placement group and number of the bundle, or Ray's id of a node.
            arguments: arguments of the class.
            options: Ray's options of the actor.
        """
        strategies = self.ray.util.scheduling_strategies
        if isinstance(place, str):
            strategy = strategies.NodeAffinitySchedulingStrategy(place, soft=False)
        else:
            strategy = strategies.PlacementGroupSchedulingStrategy(
                place[0], placement_group_bundle_index=place[1]
            )
        creator = self.ray.remote(kind).options(
            num_cpus=resources["CPU"],
            num_gpus=resources.get("GPU", 0),
            scheduling_strategy=strategy,
            **options,
        )
        return creator.remote(*arguments)

    def release(self, actors: Sequence[Any], placement: Any = None) -> None:
        """Kill actors and remove their placement group."""
        for actor in actors:
            self.ray.kill(actor, no_restart=True)
        if placement is not None:
            self.ray.util.remove_placement_group(placement)

    def close(self) -> None:
        """Disconnect from Ray."""
        if self.ray.is_initialized():
            self.ray.shutdown()
