"""Measure the throughput that a pipeline of two stages loses to its own machinery.

`--pp 2` with one thread per stage is compared with two independent loops over one half of the model
each, with one thread each, at the same time: the same micro-batches, inputs built beforehand,
greedy tokens instead of sampling, and nothing else. Run as `python -m benchmarks.cpu.pipeline
--model FOLDER`; it prints the figures and writes them to docs/benchmarks/pipeline.md.
"""

from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

import uvloop

from benchmarks.cpu.page import make_parser, origin, write_results
from benchmarks.cpu.rounds import Round, start_round_runner
from gllm.config.engine import EngineConfig
from gllm.sim.metrics.report import format_table, show_value
from gllm.sim.metrics.run_record import RunRecord
from gllm.sim.workloads.requests import WorkloadRequest

STAGES = 2
AIM, COST, BUBBLES = 0.95, 0.05, 0.05
"""Minimum ratio of throughputs, maximum share of machinery, and maximum bubble share of a stage."""
MARGIN = 64
"""Tokens of context beyond the longest request."""


class Workload(NamedTuple):
    """Equal requests that all arrive at once."""

    requests: int
    prompt: int
    output: int
    layers: tuple[int, ...]
    """Layers per stage, such that both stages of the model take equally long.

    In benchmarks/cpu/model.py the head costs a decode as much as eight layers, and a long prompt
    almost nothing.
    """

    @property
    def jobs(self) -> list[WorkloadRequest]:
        """Requests for the engine."""
        return [WorkloadRequest(0.0, self.prompt, self.output)] * self.requests


WORKLOADS = {
    "decode-heavy": Workload(32, 16, 192, (16, 8)),
    "prefill-heavy": Workload(16, 512, 4, (12, 12)),
}


def machinery_share(run: RunRecord) -> float:
    """Return the share of a run's length that is spent outside the stages' own work.

    It is the time that the run would be shorter if nothing lay between a step's end on one stage
    and its begin on the next, or between its last end and the plan of the step that waits for it.

    Steps keep their measured times on each stage. The remaining idle time is stages that wait for
    each other: with as many micro-batches as stages, the quicker of two stages waits for the other.
    """
    steps = [step.stage_times for step in run.micro_batches if step.committed_time is not None]
    needed = [[each.end - each.start for each in stages if each is not None] for stages in steps]
    ends: list[float] = []
    through = [0.0] * STAGES
    for place, seconds in enumerate(needed):
        ready = ends[place - STAGES] if place >= STAGES else 0.0
        for stage, time in enumerate(seconds):
            ready = through[stage] = max(ready, through[stage]) + time
        ends.append(ready)
    begin = min(stages[0].start for stages in steps if stages[0] is not None)
    committed = max(
        step.committed_time for step in run.micro_batches if step.committed_time is not None
    )
    return 1 - ends[-1] / (committed - begin)


def figures_of(rounds: list[Round]) -> dict[str, Any]:
    """Return the medians over rounds; ratios are computed within a round."""
    stages = range(STAGES)
    return {
        "served_tokens_per_second": median(r.tokens / r.served_seconds for r in rounds),
        "loops_tokens_per_second": median(r.tokens / r.loops_seconds for r in rounds),
        "ratio": median(r.loops_seconds / r.served_seconds for r in rounds),
        "ratios": [r.loops_seconds / r.served_seconds for r in rounds],
        "machinery_share": median(machinery_share(r.run) for r in rounds),
        "bubble_share": [median(r.bubble_shares[s] for r in rounds) for s in stages],
        "busy_over_loop": [
            median(r.busy_seconds[s] / sum(r.loop_seconds[s]) for r in rounds) for s in stages
        ],
        "loop_seconds": [median(sum(r.loop_seconds[s]) for r in rounds) for s in stages],
        "micro_batches": median(len(r.run.micro_batches) for r in rounds),
        "foreign_cores": [r.foreign_cores for r in rounds],
    }


def format_page(results: dict[str, dict[str, Any]], rounds: int) -> str:
    """Format the figures in words and a table."""
    header = [
        "workload",
        "layers",
        "micro-batches",
        "pipeline, tokens/s",
        "loops, tokens/s",
        "ratio",
    ]
    header += [
        "spread",
        "machinery, %",
        "bubbles by stage, %",
        "busy over loop by stage",
        "loops by stage, s",
    ]
    rows = [
        [
            f"{name}: {work.requests} x {work.prompt} + {work.output}",
            " + ".join(map(str, work.layers)),
            show_value(figures["micro_batches"]),
            show_value(figures["served_tokens_per_second"]),
            show_value(figures["loops_tokens_per_second"]),
            f"{figures['ratio']:.3f}",
            f"{min(figures['ratios']):.3f} to {max(figures['ratios']):.3f}",
            show_value(figures["machinery_share"], 100),
            show_value(figures["bubble_share"], 100),
            show_value(figures["busy_over_loop"]),
            show_value(figures["loop_seconds"]),
        ]
        for (name, work), figures in zip(WORKLOADS.items(), results.values(), strict=True)
    ]
    foreign = max(max(figures["foreign_cores"]) for figures in results.values())
    return "\n\n".join(
        [
            f"{origin('benchmarks.cpu.pipeline')} Rounds: {rounds}, medians; others used at most "
            f"{foreign:.2f} cores.",
            format_table(header, rows),
            verdict(results),
            "Machinery: what the run would be shorter if stages took as long for each step and "
            "nothing else took any time. The loops do not wait for each other, the stages do: with "
            "two micro-batches in flight the one that is quicker at a step waits for the other, "
            "and steps differ (prefill at the beginning, memory shared by both).",
        ]
    )


def verdict(results: dict[str, dict[str, Any]]) -> str:
    """Format the verdict on each target."""
    words = []
    for name, figures in results.items():
        met = "met" if figures["ratio"] >= AIM else "**missed**"
        share = figures["machinery_share"]
        cheap = "met" if share <= COST else "**missed**"
        few = "met" if max(figures["bubble_share"]) <= BUBBLES else "**missed**"
        words.append(f"{name} {met}, machinery {cheap}, bubbles {few}")
    aims = f"ratio at least {AIM}, machinery at most {COST:.0%}, bubbles at most {BUBBLES:.0%}"
    return f"Aims: {aims}. {'; '.join(words)}."


async def measure(config: EngineConfig, rounds: int) -> dict[str, dict[str, Any]]:
    """Measure the workloads one after the other, each after one round that does not count."""
    measured = {}
    for place, (name, work) in enumerate(WORKLOADS.items()):
        async with start_round_runner(replace(config, layers=work.layers)) as runner:
            seeds = range(place, place + len(WORKLOADS) * (rounds + 1), len(WORKLOADS))
            done = [await runner.round(work.jobs, seed) for seed in seeds]
        measured[name] = figures_of(done[1:])
    return measured


def main() -> None:
    """Measure, print the figures and write the page."""
    parser = make_parser(__doc__, "pipeline", rounds=5)
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    longest = max(work.prompt + work.output for work in WORKLOADS.values())
    config = EngineConfig.from_options(
        options.model,
        pipeline_parallel_size=STAGES,
        threads=1,
        dtype=options.dtype,
        max_model_len=longest + MARGIN,
        kv_cache_memory=2**30,
    )
    results = uvloop.run(measure(config, options.rounds))
    title = "A pipeline of two stages against plain loops over its halves"
    write_results(options.output, title, format_page(results, options.rounds), results)


if __name__ == "__main__":
    main()
