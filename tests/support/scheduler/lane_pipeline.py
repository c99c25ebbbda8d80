"""A pipeline of two lanes: every stage, and the driver, takes the lanes in an order of its own.

Within a lane steps keep their order on every stage. Which lane a stage computes next, and whose
result the driver commits next, is random: any overtaking that links and stages can produce.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from random import Random
from typing import Any

from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.lanes import PREFILL_LANE
from gllm.scheduler.plan import StepPlan
from tests.support.scheduler.pipeline import Pipeline


@dataclass
class RunningStep:
    """A step in flight."""

    plan: StepPlan
    tables: list[list[list[int]]]
    """Block table of each row, by stage, as it was when the plan was made."""
    faulty: frozenset[int]
    num_computed: int = 0
    """Stages that have computed it."""


class LanePipeline(Pipeline):
    """Pipeline that computes its steps on request and checks the order within each lane."""

    def __init__(
        self,
        config: SchedulerConfig,
        rng: Random,
        forces: bool = False,
        changes_mix: bool = False,
        drafter: Any = None,
        stage_drafter: Any = None,
    ) -> None:
        super().__init__(config, forces, drafter, stage_drafter)
        self.rng = rng
        self.changes_mix = changes_mix
        """Decodes and prefill are mixed and separated again at random."""
        self.is_mixed = False
        self.num_mixed = 0
        """Steps with decodes and prefill."""
        self.running: list[list[RunningStep]] = [[] for _ in range(config.num_lanes)]
        """Steps in flight of each lane, the oldest first."""
        self.num_turns = [0] * config.num_lanes
        self.num_overtakes = 0
        """Commits of steps while an older one was in flight."""

    def schedule(self, fails: bool = False, faulty: Iterable[int] = ()) -> StepPlan | None:
        if self.changes_mix and self.rng.random() < 0.1:
            assert self.config.max_in_flight is not None
            self.is_mixed = not self.is_mixed
            depth = self.rng.randint(1, self.config.max_in_flight)
            self.scheduler.set_depth(depth, is_mixed=self.is_mixed)
        return super().schedule(fails, faulty)

    def _run(self, plan: StepPlan, fails: bool, faulty: Iterable[int]) -> None:
        self._check_lane(plan)
        tables = [stage.prepare(plan) for stage in self.stages]
        self._begin(plan, fails)
        self.running[plan.lane].append(RunningStep(plan, tables, frozenset(faulty)))
        for _ in range(self.rng.randint(0, 2 * len(self.stages))):
            self._advance(self.rng.randrange(len(self.stages)))

    def _check_lane(self, plan: StepPlan) -> None:
        """A plan is counted in its lane, and has no sequence of the other lane.

        It is of one phase, unless both are mixed in the prefill lane.
        """
        assert plan.turn == self.num_turns[plan.lane]
        self.num_turns[plan.lane] += 1
        sequences = self.scheduler.table.sequences
        phases = [row.start < sequences[row.seq].num_prefill_tokens for row in plan.rows]
        self.num_mixed += len(set(phases)) > 1
        assert set(phases) == {plan.lane} or (self.is_mixed and plan.lane == PREFILL_LANE)
        others = {row.seq for each in self.running[1 - plan.lane] for row in each.plan.rows}
        assert not others & {row.seq for row in plan.rows}

    def _advance(self, stage: int) -> bool:
        """Compute a step of either lane on a stage; False if none is there."""
        ready = []
        for steps in self.running:
            waiting = next((each for each in steps if each.num_computed <= stage), None)
            if waiting is not None and waiting.num_computed == stage:
                ready.append(waiting)
        if ready:
            step = self.rng.choice(ready)
            self._compute(stage, step.plan, step.tables[stage], step.faulty)
            step.num_computed += 1
        return bool(ready)

    def _pop_plan(self) -> StepPlan:
        """The plan of a computed step that is the oldest one of its lane."""
        while not (done := [steps for steps in self.running if self._is_done(steps)]):
            stages = list(range(len(self.stages)))
            self.rng.shuffle(stages)
            assert any(self._advance(stage) for stage in stages)
        plan = self.rng.choice(done).pop(0).plan
        self.num_overtakes += plan is not self.plans[0]
        self.plans.remove(plan)
        return plan

    def _is_done(self, steps: list[RunningStep]) -> bool:
        return bool(steps) and steps[0].num_computed == len(self.stages)
