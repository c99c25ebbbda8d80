"""Clocks of the decode runs on the stages of a simulated pipeline, for its links' policies."""

from collections.abc import Sequence

from gllm.pacing.slack import StageClock, decode_round_seconds
from gllm.scheduler.stage_work import StageWork
from gllm.sim.costs.base import CostModel
from gllm.sim.link import SimulatedLink


class DecodeClocks:
    """A clock per stage in front of a link whose policy reads the slack; other stages have none.

    Stage times and transfers are those of the cost model, which is what a profile of the real
    stages and links returns.

    Args:
        cost: Predictor of all times.
        links: From each stage but the last one to the next one.
        owner: Sender on the links, for `SimulatedLink.drop`.
    """

    def __init__(self, cost: CostModel, links: Sequence[SimulatedLink], owner: object) -> None:
        self._cost = cost
        self._num_links = len(links)
        self._clocks = {stage: StageClock() for stage, link in enumerate(links) if link.uses_slack}
        for stage, clock in self._clocks.items():
            links[stage].add_slack_source(owner, clock.slack_seconds)

    def has(self, stage: int) -> bool:
        """Return True if a stage has a clock."""
        return stage in self._clocks

    def on_started(self, stage: int, now: float, seconds: float) -> None:
        """Note a decode run that starts now on a stage with a clock and takes `seconds`."""
        self._clocks[stage].on_decode_started(now, seconds)

    def on_finished(self, stage: int, now: float, work: StageWork) -> None:
        """Note that a decode run of a stage with a clock has finished."""
        self._clocks[stage].on_decode_finished(now, self._round_seconds(work, now))

    def _round_seconds(self, work: StageWork, now: float) -> float:
        """Return the time in which the next step of the same decodes comes to the same stage."""
        cost = self._cost
        stages = [cost.stage_seconds(index, work, now) for index in range(self._num_links + 1)]
        transfers = [cost.activation_transfer(index, work) for index in range(self._num_links)]
        transfers += [cost.return_transfer(work), cost.plan_transfer(0, work)]
        driver_seconds = cost.return_seconds(work) + cost.plan_seconds(work)
        return driver_seconds + decode_round_seconds(
            stages,
            [transfer.occupancy_seconds + transfer.propagation_seconds for transfer in transfers],
        )
