"""Constant pipelines for tests of simulated pipelines."""

from typing import Any

from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.stage_work import StageWork
from gllm.sim.costs.base import NO_TRANSFER, ConstantCostModel, TransferCost
from gllm.sim.deployment import Deployment, simulate
from gllm.sim.metrics.run_record import RunRecord, ServedRequest
from gllm.sim.workloads.requests import WorkloadRequest

STAGE, LINK = 0.25, 0.0625
"""Seconds of a step and of a message: sums of powers of two are exact."""
LONGEST = 64
"""Tokens of a sequence at most, where nothing else is said."""


class HostCost(ConstantCostModel):
    """A constant pipeline with a host around it."""

    def __init__(self, stage: float, plan: float, sample: float, back: float) -> None:
        super().__init__(stage)
        self._host = plan, sample, back

    def plan_seconds(self, work: StageWork) -> float:
        """The constant."""
        return self._host[0]

    def sample_seconds(self, work: StageWork) -> float:
        """The constant."""
        return self._host[1]

    def return_seconds(self, work: StageWork) -> float:
        """The constant."""
        return self._host[2]


class WiredCost(ConstantCostModel):
    """Constant stages; plans, activations and results travel over links."""

    def __init__(self, stage: float, activations: TransferCost, others: TransferCost) -> None:
        super().__init__(stage)
        self._activations = activations
        self._others = others

    def activation_transfer(self, stage: int, work: StageWork) -> TransferCost:
        """Return the cost of the activations."""
        return self._activations

    def plan_transfer(self, stage: int, work: StageWork) -> TransferCost:
        """Return the cost of a small message; the first stage is beside the driver."""
        return self._others if stage else NO_TRANSFER

    def return_transfer(self, work: StageWork) -> TransferCost:
        """Return the cost of a small message."""
        return self._others


def config(stages: int = 1, blocks: int = 1000, **options: Any) -> SchedulerConfig:
    return SchedulerConfig(**options).resolve(stages, blocks, LONGEST)


def served(
    cost: ConstantCostModel, resolved: SchedulerConfig, jobs: list[WorkloadRequest]
) -> RunRecord:
    return simulate(Deployment("made up", [1] * resolved.stages, cost, resolved), jobs)


def only(run_events: RunRecord) -> ServedRequest:
    """The one request of a run."""
    (request,) = run_events.requests.values()
    return request
