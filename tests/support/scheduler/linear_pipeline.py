"""Simulated pipelines of known times: linear in the rows, or with the corner of a roofline."""

import math
from random import Random
from typing import NamedTuple

from gllm.pacing.depth import LinkSeconds, PipelineSeconds, StageSeconds
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.plan import StepOutput, StepPlan
from gllm.scheduler.sequence import SchedulerRequest
from gllm.scheduler.stage_work import StageWork
from gllm.sim.costs.base import CostModel, TransferCost
from gllm.sim.depth_control import SimulatedDepthControl, start_depth
from gllm.sim.observer import PipelineObserver
from gllm.sim.pipeline import SimulatedPipeline

MAX_DEPTH = 16
PROMPT_TOKENS = 2
ENDLESS_TOKENS = 2**20
"""Output of a sequence that decodes for the whole simulation."""


class LinearCost(CostModel):
    """Cost of a pipeline of known times.

    has_corner: a stage's fixed time and that of its rows overlap, as memory traffic and arithmetic
        do; otherwise they add up.
    """

    def __init__(self, times: PipelineSeconds, has_corner: bool = False) -> None:
        self._times = times
        self._has_corner = has_corner

    def stage_seconds(self, stage: int, work: StageWork, now: float = 0.0) -> float:
        """Return the time; prefill tokens cost as much as decodes."""
        times = self._times.stages[stage]
        if self._has_corner:
            return math.hypot(times.base_seconds, work.num_tokens * times.seconds_per_decode)
        return times.decode_seconds(work.num_tokens)

    def activation_transfer(self, stage: int, work: StageWork) -> TransferCost:
        """Return the time on the link."""
        link = self._times.links[stage]
        return TransferCost(work.num_tokens * link.seconds_per_token, link.latency_seconds)

    def plan_transfer(self, stage: int, work: StageWork) -> TransferCost:
        """Return the latency from the driver."""
        return TransferCost(0.0, self._times.plan_latencies[stage])

    def return_transfer(self, work: StageWork) -> TransferCost:
        """Return the latency to the driver."""
        return TransferCost(0.0, self._times.return_latency)


class Case(NamedTuple):
    """A pipeline and its sequences in decode."""

    times: PipelineSeconds
    num_decoding: int
    has_corner: bool = False

    def simulate(self) -> SimulatedPipeline:
        """Return a pipeline in which all sequences are submitted at time 0."""
        config = SchedulerConfig(
            policy="throttle-paper",
            max_in_flight=MAX_DEPTH,
            max_num_batched_tokens=4096,
            block_size=65536,
            expected_output_tokens=0,
        ).resolve(len(self.times.stages), 100 * self.num_decoding, 2 * ENDLESS_TOKENS)
        pipeline = SimulatedPipeline(config, LinearCost(self.times, self.has_corner))
        for seq in range(self.num_decoding):
            prompt = [seq] * PROMPT_TOKENS
            pipeline.submit(SchedulerRequest(seq, prompt, ENDLESS_TOKENS, frozenset()), 0.0)
        return pipeline


class _Commits(PipelineObserver):
    """Commits of steps: times, and tokens that were sampled."""

    def __init__(self) -> None:
        self.commits: list[tuple[float, int]] = []

    def on_committed(self, plan: StepPlan, output: StepOutput, now: float) -> None:
        """Keep the time and the number of tokens."""
        self.commits.append((now, len(output.token_ids)))


def measure_throughput(case: Case, depth: int, num_rounds: int = 2) -> float:
    """Return the tokens per second of the simulated pipeline at a fixed depth.

    The first rounds, in which prompts and the first decodes fill the pipeline, do not count.
    """
    pipeline, commits = case.simulate(), _Commits()
    pipeline.observers = (commits,)
    start_depth(pipeline, depth)
    num_batches = min(depth, case.num_decoding)
    begin, end = 3 * num_batches, (3 + num_rounds) * num_batches
    round_seconds = case.times.round_seconds(case.num_decoding, depth)
    until = 0.0
    while len(commits.commits) <= end:
        until += round_seconds
        pipeline.loop.run(until)
    seconds = commits.commits[end][0] - commits.commits[begin][0]
    return sum(tokens for _, tokens in commits.commits[begin + 1 : end + 1]) / seconds


def control(case: Case, until: float) -> tuple[int, list[float]]:
    """Let the controller set the depth; return the last one, and the times of all changes."""
    pipeline = case.simulate()
    controller = SimulatedDepthControl(pipeline)
    changes = _Changes(controller)
    pipeline.observers = (controller, changes)
    pipeline.loop.run(until)
    return controller.pacer.pace.depth, changes.times


class _Changes(PipelineObserver):
    """Times at which the depth has changed."""

    def __init__(self, controller: SimulatedDepthControl) -> None:
        self.times: list[float] = []
        self._controller = controller
        self._depth = controller.pacer.pace.depth

    def on_committed(self, plan: StepPlan, output: StepOutput, now: float) -> None:
        """Keep the time if the controller, an earlier observer, has changed the depth."""
        depth = self._controller.pacer.pace.depth
        if depth != self._depth:
            self._depth = depth
            self.times.append(now)


def make_case(seed: int) -> Case:
    """Return a pipeline of random times: of GPUs or CPUs, alike or not, near or far apart."""
    random = Random(seed)
    num_stages = random.randint(2, 5)
    typical = random.uniform(0.02, 0.08)
    # The share of a stage's time that does not depend on the rows: large on GPUs.
    constant = random.choice([0.1, 0.5, 0.95])
    num_decoding = random.choice([2, 8, 12, 16, 24, 40])
    stages = []
    for _ in range(num_stages):
        seconds = typical * random.choice([1.0, 1.0, 1.0, 0.5, 1.5])
        stages.append(
            StageSeconds(constant * seconds, (1 - constant) * seconds / num_decoding * num_stages)
        )
    latency = typical * random.choice([0.0, 0.5, 1.0, 2.0, 3.0])
    occupancy = typical * random.choice([0.0, 0.1, 0.5, 1.5]) / num_decoding * num_stages
    links = [LinkSeconds(latency, occupancy) for _ in range(num_stages - 1)]
    plan_latencies = [0.0, *(latency for _ in links)]
    times = PipelineSeconds(stages, links, plan_latencies, latency)
    return Case(times, num_decoding, has_corner=bool(seed % 2))
