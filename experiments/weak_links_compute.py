"""Compute against communication over a weak link: Figures 1 and 2 of MoLink.

Prices single steps: prefills of several lengths, decodes of several batches.
"""

from dataclasses import replace

from experiments.base import ExperimentOptions, ExperimentResult
from experiments.claims import ExpectedFigure, PaperClaim
from experiments.interference import MixedStep
from gllm.sim.costs.roofline import RooflineCostModel
from gllm.sim.hardware.devices import NetworkLink
from gllm.sim.hardware.stages import PipelineSpec, build_hardware
from gllm.sim.metrics.plots import ChartPanel, plot_grid
from gllm.sim.metrics.report import format_table, show_value

REFERENCE = (
    '"Distributed LLM Serving on Consumer-Grade GPUs by Reconciling Computation and '
    'Communication" (MoLink), Findings of EMNLP 2025'
)
MODEL, DEVICE, STAGES = "llama-30b", "RTX4090", 3
LINK = NetworkLink(100e6 / 8, 30e-3)
"""100 Mbit/s; a delay of 30 ms."""
PROMPTS = (64, 128, 256, 512, 1024, 2048)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXT = 1024
"""Context tokens of each decode."""
LONG_PROMPT = 1024
"""Prompt of the claim, tokens."""


def weak_pipeline() -> PipelineSpec:
    """Return the pipeline with weak links between its stages."""
    hardware = build_hardware(MODEL, DEVICE, STAGES)
    return replace(
        hardware,
        links=(LINK,) * (STAGES - 1),
        plan_links=(None,) + (LINK,) * (STAGES - 1),
        return_link=LINK,
    )


def compare_compute(options: ExperimentOptions) -> ExperimentResult:
    """Compare a stage's time with that of sending its activations: a part of a page."""
    cost = RooflineCostModel(weak_pipeline())
    prompts, batches = (PROMPTS[::2], BATCHES[::3]) if options.quick else (PROMPTS, BATCHES)
    steps = {f"prefill of {n}": MixedStep((n,)) for n in prompts}
    steps |= {f"{n} decodes": MixedStep((), (CONTEXT,) * n) for n in batches}
    rows, compute, sending = [], {}, {}
    for name, step in steps.items():
        work = step.stage_work()
        transfer = cost.activation_transfer(0, work)
        compute[name] = cost.stage_seconds(0, work)
        sending[name] = transfer.occupancy_seconds
        rows.append(
            [
                name,
                show_value(transfer.num_bytes / 1e6),
                show_value(compute[name], 1e3),
                show_value(sending[name], 1e3),
                f"{sending[name] / compute[name]:.2f} x",
                show_value(sending[name] + transfer.propagation_seconds, 1e3),
            ]
        )
    header = ["step", "activations, MB", "stage, ms", "link busy, ms", "link / stage"]
    text = (
        f"Simulated: {MODEL} in {STAGES} stages on {DEVICE}, links of "
        f"{LINK.bandwidth * 8 / 1e6:.0f} Mbit/s and {LINK.latency * 1e3:.0f} ms, decodes at a "
        f"context of {CONTEXT} tokens. One stage computes, then its activations go to the next. "
        "A prefill keeps the link busy for longer than the stage computes; decodes that wait "
        "behind it wait for as long.\n\n" + format_table([*header, "arrival after, ms"], rows)
    )
    one = cost.activation_transfer(0, MixedStep((), (CONTEXT,)).stage_work())
    long_work = MixedStep((LONG_PROMPT,)).stage_work()
    long = cost.activation_transfer(0, long_work)
    long_ratio = long.occupancy_seconds / cost.stage_seconds(0, long_work)
    claims = [
        PaperClaim("activations per token", ExpectedFigure(13_312, "B", 0), one.num_bytes),
        PaperClaim(
            "data of a prefill over that of a decode",
            ExpectedFigure(1000, "x", 0),
            long.num_bytes / one.num_bytes,
            f"for {LONG_PROMPT} tokens",
        ),
        PaperClaim(
            "time of compute against communication",
            "two plots without numbers",
            None,
            f"prefill of {LONG_PROMPT}: link {long_ratio:.1f} x the stage",
        ),
    ]
    panels = []
    for title, label, sizes, key in (
        ("Prefill", "prompt tokens", prompts, "prefill of {}"),
        ("Decode", "decodes", batches, "{} decodes"),
    ):
        series = {
            name: [(float(size), 1e3 * seconds[key.format(size)]) for size in sizes]
            for name, seconds in (("stage", compute), ("link", sending))
        }
        panels.append(ChartPanel(title, label, "ms", series, log_y=True))
    return ExperimentResult(
        "Compute against communication",
        text,
        claims,
        {"weak-links.svg": lambda path: plot_grid(panels, path)},
        REFERENCE,
    )
