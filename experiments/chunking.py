"""Time to the first token of a lone prompt on an idle pipeline, by how it is cut into chunks.

Compares the chunk rule of `throttle` with equal chunks of every number, one big chunk and the
paper's rule.
"""

from typing import NamedTuple

from experiments.base import OWN_REFERENCE, ExperimentOptions, ExperimentResult
from experiments.claims import ExpectedLimit, PaperClaim
from experiments.parallel import map_parallel
from experiments.trials import MAX_MODEL_LEN
from gllm.scheduler.config import SchedulerConfig
from gllm.sim.deployment import roofline_deployment, simulate
from gllm.sim.metrics.plots import ChartPanel, plot_grid
from gllm.sim.metrics.report import format_table
from gllm.sim.workloads.requests import WorkloadRequest

SETTINGS = (("qwen2.5-14b", "L20"), ("qwen2.5-14b", "A100-40G"), ("qwen2.5-32b", "H200"))
STAGES = (1, 2, 4, 8)
PROMPTS = (256, 512, 1024, 2048, 4096, 8192, 14000)
MOST_CHUNKS = 64
POLICIES = ("auto", "throttle-paper")
ALLOWED = 1.10
"""Permitted ratio of a TTFT to the best one."""


class ChunkCase(NamedTuple):
    """A prompt on an idle pipeline."""

    model: str
    device: str
    stages: int
    prompt: int
    """Tokens."""
    most_chunks: int
    """Equal chunks that are tried at most."""


class ChunkTimes(NamedTuple):
    """Times to the first token of a case."""

    best_seconds: float
    best_count: int
    """Number of equal chunks that is fastest."""
    ratios: dict[str, float]
    """Times over the best one, by name of the cut."""


def simulate_ttft(case: ChunkCase, policy: str, max_tokens: int | None) -> float:
    """Return the seconds to the first token; `max_tokens` limits a micro-batch if not None."""
    config = SchedulerConfig(policy=policy, max_num_batched_tokens=max_tokens)
    deployment = roofline_deployment(
        case.model, case.device, case.stages, MAX_MODEL_LEN, scheduler=config
    )
    run = simulate(deployment, [WorkloadRequest(0.0, case.prompt, 1)])
    (served,) = run.requests.values()
    assert served.line.ttft is not None
    return served.line.ttft


def compare_chunks(case: ChunkCase) -> ChunkTimes:
    """Simulate equal chunks of every number, and the policies."""
    equal = {
        count: simulate_ttft(case, "sarathi", -(-case.prompt // count))
        for count in range(1, case.most_chunks + 1)
    }
    count, best = min(equal.items(), key=lambda item: item[1])
    ratios = {"one chunk": equal[1] / best, "eight equal": equal[8] / best}
    for policy in POLICIES:
        ratios[policy] = simulate_ttft(case, policy, None) / best
    return ChunkTimes(best, count, ratios)


def run(options: ExperimentOptions) -> ExperimentResult:
    """Simulate every setting, number of stages and prompt."""
    settings = SETTINGS[:1] if options.quick else SETTINGS
    most_chunks = MOST_CHUNKS // 4 if options.quick else MOST_CHUNKS
    cases = [
        ChunkCase(model, device, stages, prompt, most_chunks)
        for model, device in settings
        for stages in STAGES
        for prompt in (PROMPTS[::3] if options.quick else PROMPTS)
    ]
    found = map_parallel(compare_chunks, cases, options.jobs, options.progress, "prompt")
    times = dict(zip(cases, found, strict=True))
    rows = [
        [
            f"{case.model}, {case.device}",
            str(case.stages),
            str(case.prompt),
            f"{each.best_seconds * 1e3:.0f}",
            str(each.best_count),
            *(f"{ratio:.2f}" for ratio in each.ratios.values()),
        ]
        for case, each in times.items()
    ]
    worst = {name: max(each.ratios[name] for each in found) for name in POLICIES}
    header = ["setting", "stages", "prompt", "best TTFT, ms", "chunks"]
    text = (
        f"Simulated. Best: the fastest of 1 to {most_chunks} equal chunks; the other columns are "
        "multiples of it. `auto` is the default, throttle.\n\n"
        + format_table([*header, "one chunk", "eight equal", *POLICIES], rows)
    )
    claims = [
        PaperClaim(
            "TTFT of the default against the best",
            ExpectedLimit(ALLOWED, unit="x", digits=2),
            worst["auto"],
            f"at worst (the paper's rule: {worst['throttle-paper']:.2f} x)",
        )
    ]
    return ExperimentResult(
        "Chunks of a lone prompt",
        text,
        claims,
        {"chunking.svg": lambda path: plot_grid(_panels(times, settings[0]), path)},
        reference=OWN_REFERENCE,
    )


def _panels(times: dict[ChunkCase, ChunkTimes], setting: tuple[str, str]) -> list[ChartPanel]:
    """Return a chart of each number of stages, for one model and device."""
    panels = []
    for stages in STAGES:
        lines: dict[str, list[tuple[float, float]]] = {}
        for case, each in times.items():
            if (case.model, case.device, case.stages) == (*setting, stages):
                for name, ratio in each.ratios.items():
                    lines.setdefault(name, []).append((float(case.prompt), ratio))
        title = f"{setting[1]}, {stages} stages"
        panels.append(ChartPanel(title, "prompt tokens", "TTFT / best", lines))
    return panels
