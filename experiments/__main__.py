"""`python -m experiments NAME ...`: run experiments of a paper and write their pages.

Experiments are imported when they run.
"""

import argparse
import importlib
import shlex
import sys
from collections.abc import Collection
from dataclasses import replace
from math import inf
from pathlib import Path

from experiments.base import (
    ExperimentOptions,
    ExperimentResult,
    Stopwatch,
    claims_table,
    write_result,
)
from experiments.parallel import count_cores
from gllm.engine.engine import EngineError
from gllm.options.flags import FlagParser, FlagType, number_type, output_folder
from gllm.options.options import INT32_MAX

EXPERIMENTS = {
    "latency-vs-rate": ("latency_vs_rate", "TTFT, TPOT, E2EL, throughput against request rate"),
    "scalability": ("scalability", "maximum throughput of 1, 2 and 4 devices, as stages or ranks"),
    "slo": ("slo", "SLO attainment against request rate"),
    "ablation": ("ablation", "throttling with parts removed; --real: on this machine's engine"),
    "sensitivity": ("sensitivity", "#T, #MaxP, KV_thresh, #MinP"),
    "volatility": ("volatility", "tokens per micro-batch over time, bubbles of each stage"),
    "chunking": ("chunking", "prefill chunk sizes of a single prompt on an idle pipeline"),
    "code-size": ("code_size", "lines of code of this project and of other servers"),
    "balance": ("balance", "throttling by predicted time compared with throttling by tokens"),
    "policies": ("policy_cells", "the default policy beside others, by device, stages and load"),
    "interference": ("interference", "requests that slow each other down; --real: this engine"),
    "weak-links": ("weak_links", "serving over weak links: the tables of both MoLink papers"),
    "weak-links-timeline": ("weak_links_timeline", "MoLink: a prefill and decodes on one link"),
    "splitwise": ("splitwise", "Splitwise: machines, and clusters within its SLOs"),
    "splitwise-curves": (
        "splitwise_curves",
        "Splitwise: provisioning, transfers, latency by load",
    ),
    "tetri": ("tetri", "TetriInfer: its workloads against colocated engines"),
    "aladdin": ("aladdin", "Aladdin: GPUs per worker, workers saved by placement, scaling rule"),
    "hexgen2": ("hexgen2", "HexGen-2: plans for unlike devices beside the paper's throughput"),
    "hexgen2-placements": ("hexgen2_placements", "HexGen-2: groups beside the paper's"),
    "hexgen2-opt": ("hexgen2_opt", "HexGen-2: OPT-30B, and searches over up to 320 devices"),
    "replay": ("replay", "runs of this machine's engine, replayed in the simulator"),
    "distserve": ("distserve", "prefill and decode apart: goodput and attainment of DistServe"),
    "distserve-runs": ("distserve_runs", "the simulator compared with real runs of DistServe"),
    "distserve-planning": (
        "distserve_planning",
        "run time of DistServe's placement algorithms",
    ),
    "vidur": ("vidur", "Vidur's search: best configurations, costs of wrong ones"),
    "vidur-pareto": (
        "vidur_pareto",
        "Vidur: best designs by latency limit, cost of its search",
    ),
    "link-encoding": ("link_encoding", "loss of encoded activations between machines"),
    "kv-theta": ("kv_theta", "shortest prompt whose KV blocks travel during its prefill, here"),
    "emulation": ("emulation", "emulated serving compared with the simulator"),
    "two-machines": ("two_machines", "two emulated machines over a link against one"),
    "planners": ("planners", "each planner on the shipped clusters: plan, bound, measured share"),
    "pools": ("served_pools", "emulated pools with prefill and decode apart against colocated"),
    "two-nodes": ("two_nodes", "two emulated machines joined by gllm-link, by depth"),
    "speculation": ("speculation", "windows in flight over pipelines, against one and none"),
    "sessions": ("sessions", "eviction of the prefix cache with agents that return after pauses"),
    "prediction": ("prediction", "the simulator compared with this machine's engine"),
}
"""By name: module of experiments with a function `run`, and a description."""

REAL = {"ablation": "real_ablation", "interference": "real_interference"}
"""Modules of experiments that also run on this machine's engine (`--real`)."""
EMULATED_MODULES = {
    "planners": "planners",
    "interference": "emulated_interference",
}
"""Modules of experiments with a function `run_emulated`; the others serve simulated trials."""
EMULATED = (
    "latency-vs-rate",
    "scalability",
    "slo",
    "ablation",
    "sensitivity",
    "volatility",
    "policies",
    "speculation",
    *EMULATED_MODULES,
)
"""Experiments whose trials can be served on emulated devices (`--emulated`)."""
RESUMABLE = ("planners",)
"""Experiments that keep the results of their cases (`--results`)."""
MODES: dict[str, Collection[str]] = {"real": REAL, "emulated": EMULATED}
"""Flags that choose engines instead of simulations, with the experiments that have them."""


def make_parser() -> argparse.ArgumentParser:
    """Return the flags of the command."""
    names = "\n".join(f"  {name:20}{text}" for name, (_, text) in EXPERIMENTS.items())
    parser = FlagParser(
        prog="python -m experiments",
        description=__doc__.splitlines()[0],
        epilog=f"experiments:\n{names}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "names",
        nargs="+",
        choices=tuple(EXPERIMENTS),
        metavar="NAME",
        help="experiments; several share the capacities that they measure",
    )
    parser.add_argument(
        "--output",
        default="experiments/pages",
        type=FlagType(output_folder),
        help="folder for the page and its plots (default experiments/pages)",
    )
    parser.add_argument(
        "--requests",
        type=number_type(int, ge=8, le=INT32_MAX),
        help=f"requests per simulation (default {ExperimentOptions.requests}; "
        "with --emulated as the experiment says, fewer)",
    )
    parser.add_argument(
        "--jobs",
        type=number_type(int, ge=1, le=1024),
        default=count_cores(),
        help="processes for independent simulations (default: one per core)",
    )
    parser.add_argument("--quick", action="store_true", help="few points: a functional check")
    parser.add_argument(
        "--results",
        metavar="FOLDER",
        type=FlagType(output_folder),
        help="keep the result of each case in this folder, and run no case that has one there "
        f"({', '.join(RESUMABLE)})",
    )
    parser.add_argument(
        "--seconds",
        type=number_type(float, gt=0, le=1e7),
        help="begin no further case after this time; the page names those that are missing; only "
        "with --results",
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--real", action="store_true", help="run on this machine's engine")
    mode.add_argument(
        "--emulated",
        action="store_true",
        help="serve the trials with engines on emulated devices, beside the simulation",
    )
    parser.add_argument(
        "--emulated-speed",
        type=number_type(float, gt=0, le=1000),
        default=1.0,
        help="emulated seconds per second; lateness has to stay below 2 %% of a step (default 1)",
    )
    return parser


def format_command(name: str, values: argparse.Namespace) -> str:
    """Return the command that repeats a page, without flags that change no figures."""
    words = ["python", "-m", "experiments", name]
    if values.requests is not None:
        words += ["--requests", str(values.requests)]
    words += [f"--{flag}" for flag in ("quick", *MODES) if getattr(values, flag)]
    if values.emulated and values.emulated_speed != 1:
        words += ["--emulated-speed", f"{values.emulated_speed:g}"]
    return shlex.join(words)


def run_experiment(name: str, values: argparse.Namespace) -> None:
    """Run an experiment, write its page and print its tables.

    Raises:
        ValueError: The options do not suit the experiment.
        OSError: The page cannot be written.
        EngineError: An engine of this machine fails.
    """
    options = ExperimentOptions(
        values.requests or ExperimentOptions.requests,
        values.quick,
        jobs=values.jobs,
        results=Path(values.results) if values.results else None,
        seconds=values.seconds or inf,
    )
    stopwatch = Stopwatch(options.jobs)
    result: ExperimentResult
    if values.emulated and name in EMULATED_MODULES:
        module = importlib.import_module(f"experiments.{EMULATED_MODULES[name]}")
        result = module.run_emulated(options)
    elif values.emulated:
        emulated = importlib.import_module("experiments.emulated")
        requests = values.requests or emulated.EMULATED[name].requests
        result = emulated.run(name, replace(options, requests=requests), values.emulated_speed)
    else:
        module_name = REAL[name] if values.real else EXPERIMENTS[name][0]
        result = importlib.import_module(f"experiments.{module_name}").run(options)
    page = write_result(
        result,
        name + "".join(f"-{mode}" for mode in MODES if getattr(values, mode)),
        format_command(name, values),
        Path(values.output),
        stopwatch.read(),
    )
    print(f"{result.text.strip()}\n")
    if result.claims:
        print(claims_table(result.claims, result.measured))
    print(f"wrote {page}")


def main(argv: list[str] | None = None) -> int:
    """Run `python -m experiments` and return the exit status."""
    values = make_parser().parse_args(argv)
    for name in values.names:
        for mode, supported in MODES.items():
            if getattr(values, mode) and name not in supported:
                message = f"--{mode} supports {', '.join(supported)}, not {name}"
                print(f"python -m experiments: {message}", file=sys.stderr)
                return 2
        if values.results and name not in RESUMABLE:
            message = f"--results supports {', '.join(RESUMABLE)}, not {name}"
            print(f"python -m experiments: {message}", file=sys.stderr)
            return 2
    if values.seconds and not values.results:
        print("python -m experiments: --seconds needs --results FOLDER", file=sys.stderr)
        return 2
    for name in values.names:
        try:
            run_experiment(name, values)
        except (ValueError, OSError, EngineError) as error:
            print(f"python -m experiments: {error}", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
