"""Measure the placement of a heartbeat: 25 requests on 64 loaded engines by the policy aladdin.

CPU time of one core, from the snapshots of the engines to the choice; lengths of azure-conv.
Run: python -m benchmarks.placement
"""

import argparse
import time
from collections.abc import Sequence
from random import Random
from statistics import median

from gllm.options.slo import Slo
from gllm.routing.ongoing import OngoingRequests
from gllm.routing.placement import LatencyModel, PlacementRules
from gllm.routing.policies.aladdin import AladdinPolicy
from gllm.routing.state import EngineSnapshot, RoutingRequest
from gllm.scheduler.output_lengths import LengthEstimate, LengthQuery, PromptLengthPredictor
from gllm.sim.workloads.requests import WorkloadRequest, make_workload

MODEL = LatencyModel(k1=0.3635e-3, c1=4e-3, k2=9.62e-8, c2=0.173e-3, c3=55.8e-3)
"""Llama-2-70B at TP 2 on A100, as planning by Vidur's tables fits it."""
SLO = Slo(1.6, 0.075)
WORKLOAD = "azure-conv"
STEP_SECONDS = 0.06
MAX_NUM_SEQS, NUM_BLOCKS = 128, 3750
NUM_HISTORY = 4000
"""Finished requests that the policy knows at the beginning."""


class LoadedFleet:
    """Engines with requests anywhere in their outputs, to which a policy adds more.

    Args:
        num_engines: Number of engines.
        num_ongoing: Requests of each.
        rate: Requests per second that arrive.
        seed: Of all random numbers.
    """

    def __init__(self, num_engines: int, num_ongoing: int, rate: float, seed: int = 0) -> None:
        rng = Random(seed)
        self.policy = AladdinPolicy(rng, PlacementRules(), MODEL)
        self._lengths = PromptLengthPredictor()
        for job in make_workload(WORKLOAD, NUM_HISTORY, rate, seed=seed):
            self._lengths.record(job.num_prompt_tokens, job.num_output_tokens)
        self._rate = rate
        self._now = 0.0
        self.cpu_seconds = 0.0
        """CPU time of all placements."""
        self._wire_ids: list[list[int]] = [[] for _ in range(num_engines)]
        self._engines = [OngoingRequests() for _ in range(num_engines)]
        jobs = make_workload(WORKLOAD, num_engines * num_ongoing, rate, seed=seed + 1)
        for number, job in enumerate(jobs):
            engine = self._engines[number % num_engines]
            engine.on_sent(number, job.num_prompt_tokens, self._estimate(job))
            self._wire_ids[number % num_engines].append(number)
            num_tokens = rng.randint(1, max(1, job.num_output_tokens - 1))
            for index in range(num_tokens):
                engine.on_tokens([number], (index - num_tokens) * STEP_SECONDS)

    def snapshots(self) -> list[EngineSnapshot]:
        """Return the engines as the policy sees them."""
        return [
            EngineSnapshot(
                str(index), ongoing=engine.list(), time=self._now, num_blocks=NUM_BLOCKS,
                max_num_seqs=MAX_NUM_SEQS,
            )
            for index, engine in enumerate(self._engines)
        ]  # fmt: skip

    def _estimate(self, job: WorkloadRequest) -> LengthEstimate:
        return self._lengths.estimate(LengthQuery(job.num_prompt_tokens))

    def place(self, jobs: Sequence[WorkloadRequest]) -> list[str]:
        """Return the engine of each request; before it, one finishes and engines end a step."""
        names = []
        for number, job in enumerate(jobs):
            self._now += 1 / self._rate
            for engine, wire_ids in zip(self._engines, self._wire_ids, strict=True):
                engine.on_tokens(wire_ids, self._now)
            estimate = self._estimate(job)
            request = RoutingRequest(job.num_prompt_tokens, slo=SLO, length_estimate=estimate)
            begin = time.process_time()
            estimate.record(job.num_output_tokens)
            name = self.policy.choose(request, self.snapshots())
            self.cpu_seconds += time.process_time() - begin
            assert name is not None
            self._engines[int(name)].on_sent(-1 - number, job.num_prompt_tokens, estimate)
            names.append(name)
        return names


def measure(num_engines: int, num_ongoing: int, rate: float, rounds: int) -> list[float]:
    """Return the seconds of CPU time of the placements of one second, in rising order."""
    jobs = make_workload(WORKLOAD, round(rate), rate, seed=2)
    times = []
    for seed in range(rounds):
        fleet = LoadedFleet(num_engines, num_ongoing, rate, seed)
        fleet.place(jobs)
        times.append(fleet.cpu_seconds)
    return sorted(times)


def main() -> None:
    """Print a table of median and longest time by the requests that the engines have."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engines", type=int, default=64)
    parser.add_argument("--rate", type=float, default=25.0, help="requests per second")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    print("| requests per engine | median ms | longest ms |\n| --- | --- | --- |")
    for num_ongoing in (4, 16, 64):
        times = measure(options.engines, num_ongoing, options.rate, options.rounds)
        print(f"| {num_ongoing} | {median(times) * 1e3:.1f} | {times[-1] * 1e3:.1f} |")


if __name__ == "__main__":
    main()
