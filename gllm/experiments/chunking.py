"""A lone prompt on an idle pipeline: how long until its first token, by how it is cut.

Owns the comparison that the chunk rule of `throttle` has to stand: equal chunks of every number,
one big chunk, the paper's rule.
"""

from gllm.experiments.base import ExperimentOptions, ExperimentResult, PaperClaim
from gllm.experiments.trials import MAX_MODEL_LEN
from gllm.scheduler.config import SchedulerConfig
from gllm.sim.deployment import roofline_deployment, simulate
from gllm.sim.metrics.plots import ChartPanel, plot_grid
from gllm.sim.metrics.report import format_table
from gllm.sim.workloads.requests import WorkloadRequest

SETTINGS = (("qwen2.5-14b", "L20"), ("qwen2.5-14b", "A100-40G"), ("qwen2.5-32b", "H200"))
STAGES = (1, 2, 4, 8)
PROMPTS = (256, 512, 1024, 2048, 4096, 8192, 14000)
MOST_CHUNKS = 64
ALLOWED = 1.10
"""Permitted ratio of a TTFT to the best one."""


def ttft(model: str, device: str, stages: int, prompt: int, policy: str, cap: int | None) -> float:
    """Seconds to the first token. cap: most tokens in a micro-batch, where not the default."""
    config = SchedulerConfig(policy=policy, max_num_batched_tokens=cap)
    deployment = roofline_deployment(model, device, stages, MAX_MODEL_LEN, scheduler=config)
    run, _ = simulate(deployment, [WorkloadRequest(0.0, prompt, 1)])
    (served,) = run.requests.values()
    assert served.line.ttft is not None
    return served.line.ttft


def run(options: ExperimentOptions) -> ExperimentResult:
    """Every setting, number of stages and prompt."""
    settings = SETTINGS[:1] if options.quick else SETTINGS
    prompts = PROMPTS[::3] if options.quick else PROMPTS
    most_chunks = MOST_CHUNKS // 4 if options.quick else MOST_CHUNKS
    rows, worst = [], {"auto": 0.0, "throttle-paper": 0.0}
    panels = []
    for model, device in settings:
        for stages in STAGES:
            lines: dict[str, list[tuple[float, float]]] = {}
            for prompt in prompts:
                case = (model, device, stages, prompt)
                equal = {
                    count: ttft(*case, "sarathi", -(-prompt // count))
                    for count in range(1, most_chunks + 1)
                }
                count, best = min(equal.items(), key=lambda item: item[1])
                ratios = {"one chunk": equal[1] / best, "eight equal": equal[8] / best}
                for policy in worst:
                    ratios[policy] = ttft(*case, policy, None) / best
                    worst[policy] = max(worst[policy], ratios[policy])
                cells = [f"{ratio:.2f}" for ratio in ratios.values()]
                name = f"{model}, {device}"
                rows.append([name, str(stages), str(prompt), f"{best * 1e3:.0f}", str(count)])
                rows[-1] += cells
                for label, ratio in ratios.items():
                    lines.setdefault(label, []).append((float(prompt), ratio))
            panels.append(
                ChartPanel(f"{device}, {stages} stages", "prompt tokens", "TTFT / best", lines)
            )
    header = ["setting", "stages", "prompt", "best TTFT, ms", "chunks"]
    text = (
        f"Simulated. Best: the fastest of 1 to {most_chunks} equal chunks; the other columns are "
        "multiples of it. `auto` is the default: sarathi at one stage, throttle at more.\n\n"
        + format_table([*header, "one chunk", "eight equal", "auto", "throttle-paper"], rows)
    )
    claims = [
        PaperClaim(
            "TTFT of the default against the best",
            f"aim: <= {ALLOWED:.2f} x",
            f"{worst['auto']:.2f} x at worst (the paper's rule: {worst['throttle-paper']:.2f} x)",
            worst["auto"] <= ALLOWED,
        )
    ]
    return ExperimentResult(
        "Chunks of a lone prompt",
        text,
        claims,
        {"chunking.svg": lambda path: plot_grid(panels[: len(STAGES)], path)},
    )
