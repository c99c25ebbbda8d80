"""Parts of small simulated clusters for tests."""

from collections import Counter
from collections.abc import Sequence
from random import Random

from gllm.routing.policy_registry import make_policy
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.sequence import SchedulerRequest
from gllm.sim.cluster.cluster import ClusterRun
from gllm.sim.cluster.engine import ClusterEngine
from gllm.sim.cluster.requests import ClusterRequest
from gllm.sim.cluster.router import ClusterRouter, PolicyRouter
from gllm.sim.costs.base import ConstantCostModel
from gllm.sim.deployment import Deployment

STEP_SECONDS, LINK_SECONDS = 0.05, 0.01


def make_deployment(stages: int = 1, blocks: int = 40, policy: str = "throttle") -> Deployment:
    """Return an engine with stages of 50 ms and blocks of four tokens."""
    config = SchedulerConfig(block_size=4, max_num_batched_tokens=16, policy=policy)
    cost = ConstantCostModel(STEP_SECONDS, LINK_SECONDS)
    return Deployment("made up", [1] * stages, cost, config.resolve(stages, blocks, 64))


def token_times(run: ClusterRun, index: int = 0) -> list[float]:
    """Return the times of a request's tokens."""
    return [round(time, 9) for time in run.requests[index].line.times]


class CountingRouter(ClusterRouter):
    """Router that counts the ends of each request.

    Args:
        router: Chooses the engines; default: the least requests.
    """

    def __init__(self, router: ClusterRouter | None = None) -> None:
        self._router = router or PolicyRouter(make_policy("least-requests", Random(0)))
        self.needs = self._router.needs
        self.keeps_order = self._router.keeps_order
        self.num_ends: Counter[int] = Counter()

    def route(
        self, request: ClusterRequest, engines: Sequence[ClusterEngine], now: float
    ) -> str | None:
        """Return the choice of the other router."""
        return self._router.route(request, engines, now)

    def on_finished(self, request: SchedulerRequest, now: float) -> None:
        """Count the end."""
        self.num_ends[request.seq] += 1


class FirstEngineRouter(ClusterRouter):
    """Router that always takes the first engine."""

    def route(
        self, request: ClusterRequest, engines: Sequence[ClusterEngine], now: float
    ) -> str | None:
        """Return the first engine."""
        return engines[0].name if engines else None
