"""What a pipeline of two stages loses to its own machinery.

`--pp 2` with one thread a stage, against two independent loops over half of the model each, with
one thread each, at the same time: the same micro-batches, inputs built beforehand, likeliest tokens
instead of sampling, and nothing else. Run as `python -m benchmarks.cpu.pipeline --model FOLDER`; it
prints the figures and writes them into docs/benchmarks/pipeline.md.
"""

from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

import uvloop

from benchmarks.cpu.page import make_parser, origin, write_results
from benchmarks.cpu.rounds import Round, bench
from gllm.config.engine import EngineConfig
from gllm.sim.report import format_table, show_value
from gllm.sim.run_record import RunRecord
from gllm.sim.workload import WorkloadRequest

STAGES = 2
AIM, COST, BUBBLES = 0.95, 0.05, 0.05
"""Least ratio of throughputs, most share of machinery, and most bubble share of a stage."""
MARGIN = 64
"""Tokens of context beyond the longest request."""


class Workload(NamedTuple):
    """Requests that are there at once, all alike."""

    requests: int
    prompt: int
    output: int
    layers: tuple[int, ...]
    """Of each stage, so that stages of the model of benchmarks/cpu/model.py take equally long: the
    head costs a decode as much as eight layers, and a long prompt next to nothing."""

    @property
    def jobs(self) -> list[WorkloadRequest]:
        """As the engine is asked."""
        return [WorkloadRequest(0.0, self.prompt, self.output)] * self.requests


WORKLOADS = {
    "decode-heavy": Workload(32, 16, 192, (16, 8)),
    "prefill-heavy": Workload(16, 512, 4, (12, 12)),
}


def machinery_share(run: RunRecord) -> float:
    """Of a run's length, what it would be shorter if nothing lay between a step's end on one stage
    and its begin on the next, or between its last end and the plan of the step that waits for it.

    Steps keep the times that stages needed. What is left beside them is that stages wait for each
    other: with as many micro-batches as stages, whichever of two is quicker waits for the other.
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
    """Medians over rounds; ratios are taken within a round."""
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


def page(results: dict[str, dict[str, Any]], rounds: int) -> str:
    """The figures in words and a table."""
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
    """What the aims say."""
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
    """One workload after the other, each with one round before that does not count."""
    measured = {}
    for place, (name, work) in enumerate(WORKLOADS.items()):
        async with bench(replace(config, layers=work.layers)) as made:
            seeds = range(place, place + len(WORKLOADS) * (rounds + 1), len(WORKLOADS))
            done = [await made.round(work.jobs, seed) for seed in seeds]
        measured[name] = figures_of(done[1:])
    return measured


def main() -> None:
    """Measure, print, write."""
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
    write_results(options.output, title, page(results, options.rounds), results)


if __name__ == "__main__":
    main()
