"""An engine on emulated devices whose stages are on two nodes, joined by gllm-link.

The nodes are network namespaces of this machine with a shaped link between them.
"""

import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from benchmarks.net.engine import RigEngine
from benchmarks.net.rig import NamespaceRig, unsupported_reason
from experiments.base import ExperimentOptions, ExperimentResult
from experiments.claims import ExpectedLimit, PaperClaim
from experiments.emulated_trials import trial_config
from experiments.emulation import step_seconds
from experiments.parallel import map_parallel
from experiments.trials import (
    HardwareSetting,
    SimulationTrial,
    TrialRun,
    deploy_trial,
    simulate_trial,
    trial_jobs,
)
from gllm.observability.step_log import read_step_log
from gllm.scheduler.config import TCP_DEPTH
from gllm.sim.deployment import simulate
from gllm.sim.depth_control import AUTO_DEPTH
from gllm.sim.hardware.devices import find_link, name_link
from gllm.sim.metrics.report import format_table, show_value
from gllm.sim.metrics.run_record import RunRecord, build_run_record

ONE = HardwareSetting("qwen2.5-14b", "L20", 2)
"""One machine."""
LINK = "25gbit+0.05ms"
"""Between the nodes."""
TWO = replace(ONE, stages=4, link=f"pcie,{LINK},pcie")
WORKLOAD, POLICY = "azure-conv", "throttle-paper"
REQUESTS = 300
MAX_NUM_SEQS = 512
"""Enough for all requests: memory limits them."""
MIN_GAIN = 1.8
NODES = 2
MTU = 65_000
"""Bytes per packet, as segments of a network card with offload."""
TIMEOUT_SECONDS = 900.0
MAX_LATE_SHARE, MAX_ATTEMPTS = 0.02, 2
"""Lateness of the workers, relative to the time of their steps, above which a run is repeated, and
the largest number of runs."""

RATES, DELAYS = (25, 10, 1, 0.5, 0.1), (0.05, 5)
"""Gbit/s and one-way milliseconds of the links with which the controller is simulated."""
FIXED_DEPTHS = (3, 4, 5, 6, 8, 12, 16)
MIN_CONTROLLED = 0.99
"""Least throughput of the controller over that of the best fixed number, on the fastest link."""


class NodesRun(NamedTuple):
    """A run on two nodes."""

    record: RunRecord
    late_share: float = 0.0
    """Time from the ends of steps until the workers noticed them, over the time of the steps."""


NodeServer = Callable[[SimulationTrial, str], NodesRun]
"""Serves a trial on two nodes over a link with this name."""


def serve_on_nodes(trial: SimulationTrial, link: str) -> NodesRun:
    """Serve a trial, all requests at once, with half of its stages on each of two nodes.

    A run whose workers were late, because others used the cores, is repeated.

    Args:
        trial: The trial; the links of its setting are those within a node.
        link: Name of the link between the nodes.

    Raises:
        ValueError: Namespaces are not permitted here.
        RuntimeError: The engine or the load fails.
    """
    runs: list[NodesRun] = []
    while len(runs) < MAX_ATTEMPTS and all(run.late_share > MAX_LATE_SHARE for run in runs):
        runs.append(_serve_once(trial, link))
    return min(runs, key=lambda run: run.late_share)


def _serve_once(trial: SimulationTrial, link: str) -> NodesRun:
    """Serve a trial on two nodes.

    Raises:
        ValueError: Namespaces are not permitted here.
        RuntimeError: The engine or the load fails.
    """
    if reason := unsupported_reason():
        raise ValueError(f"two nodes cannot run here: {reason}")
    flags, spec = engine_flags(trial), find_link("link", link)
    with (
        tempfile.TemporaryDirectory(prefix="gllm-") as folder,
        NamespaceRig(NODES, shaped=(), mtu=MTU) as rig,
    ):
        for node in range(NODES):
            rig.limit_rate(node, 8 * spec.bandwidth)
        model = Path(trial.setting.model)
        with RigEngine(rig, model, Path(folder), flags) as engine:
            command = [*load_command(trial), "--base-url", engine.url]
            load = rig.popen(0, command, stdout=subprocess.DEVNULL)
            if status := load.wait(TIMEOUT_SECONDS):
                raise RuntimeError(f"the load ended with {status}: {engine.read_logs()}")
            with rig.inside(0), urllib.request.urlopen(f"{engine.url}/metrics") as answer:
                late_share = read_late_share(answer.read().decode())
        return NodesRun(build_run_record(read_step_log(engine.step_log)), late_share)


def read_late_share(metrics: str) -> float:
    """Return the lateness of all stages over the time of their steps, from an engine's metrics."""

    def total(name: str) -> float:
        lines = (line for line in metrics.splitlines() if line.startswith(f"gllm:{name}_total{{"))
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    return total("emulation_late_seconds") / total("stage_busy_seconds")


def engine_flags(trial: SimulationTrial) -> list[str]:
    """Return the flags of the nodes of the engine of a trial."""
    config = trial_config(trial)
    flags = {
        "device": config.device,
        "pp": config.pipeline_parallel_size,
        "emulated-link": config.emulation.emulated_link,
        "max-model-len": config.max_model_len,
        "policy": config.scheduler.policy,
        **{name.replace("_", "-"): value for name, value in trial.options},
    }
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


def load_command(trial: SimulationTrial) -> list[str]:
    """Return the command that sends the requests of a trial, all at once."""
    command = [sys.executable, "-m", "gllm", "bench", "serve", "--workload", trial.workload]
    command += ["--num-prompts", str(trial.requests), "--seed", str(trial.seed)]
    return [*command, "--num-warmups", "0", "--no-progress"]


def run(options: ExperimentOptions, serve: NodeServer = serve_on_nodes) -> ExperimentResult:
    """Serve the same requests with the depth controller and with a fixed depth.

    Args:
        options: Of the experiment.
        serve: Runs the engine.
    """
    count = 8 if options.quick else REQUESTS
    seqs = ("max_num_seqs", MAX_NUM_SEQS)
    base = SimulationTrial(TWO, WORKLOAD, POLICY, 1.0, count, "static", options=(seqs,))
    one = replace(base, setting=ONE)
    alone = _read_speed(TrialRun(one, simulate_trial(one)))
    rows, claims = [], []
    late_shares = []
    cases = {
        "depth controller": DepthCase(LINK, "2", AUTO_DEPTH),
        f"--max-in-flight {TWO.stages} --lanes 1": DepthCase(LINK, "1", TWO.stages),
    }
    for name, case in cases.items():
        trial = case.trial(count)
        on_nodes = replace(trial, setting=replace(TWO, link="pcie"))
        served = serve(on_nodes, LINK)
        late_shares.append(served.late_share)
        runs = {
            "simulated": simulate_depth((case, count)),
            "two nodes": TrialRun(on_nodes, served.record),
        }
        late = {"simulated": "", "two nodes": show_value(100 * served.late_share)}
        rows += [[*_row(name, kind, each, alone), late[kind]] for kind, each in runs.items()]
        gains = {kind: _read_speed(each) / alone for kind, each in runs.items()}
        claims.append(
            PaperClaim(
                f"{name}: tokens/s of two nodes over one simulated machine",
                ExpectedLimit(MIN_GAIN, is_minimum=True, unit="x", digits=2),
                gains["two nodes"],
                f"(simulated {gains['simulated']:.2f} x)",
            )
        )
    claims.append(
        PaperClaim(
            "largest lateness of a run, over the time of its steps",
            ExpectedLimit(MAX_LATE_SHARE),
            max(late_shares),
        )
    )
    table, controlled = _compare_depths(count, options)
    claims += controlled
    text = (
        f"{count} requests of {WORKLOAD}, all there at once, under {POLICY}: {TWO}, half of the "
        f"stages on each of two nodes with a link of {LINK}. Nodes are network namespaces; their "
        "activations travel through gllm-link. The kernel limits what each one sends; the delay is "
        "that of the kernel and of the processes. Between machines, a controller chooses by "
        "measured times the number of micro-batches in flight, their prefill tokens, and whether "
        "decodes and prefill are in the same micro-batches; a fixed number of micro-batches turns "
        f"it off. One machine: {ONE}, simulated, {show_value(alone)} tokens/s. Tokens per "
        "second are those of the first 80 % of all tokens.\n\n"
        + format_table(
            [
                "micro-batches in flight",
                "",
                "tokens/s",
                "gain",
                "bubbles, %",
                "micro-batches",
                "ms of a step",
                "requests/s",
                "late, %",
            ],
            rows,
        )
        + "\n\nThe controller beside fixed numbers, simulated, with other links between the "
        "nodes. The best fixed number is that with one lane and the most requests per second of "
        "the whole run, in which batches become small when the last requests drain. Each cell: "
        "tokens/s and requests/s. Two lanes are the default between machines.\n\n" + table
    )
    return ExperimentResult(
        "Two nodes as one pipeline",
        text,
        claims,
        reference="none; the limits are this project's",
    )


class DepthCase(NamedTuple):
    """Number of micro-batches in flight over a link between the nodes."""

    link: str
    lanes: str
    depth: int | str
    """Micro-batches, or AUTO_DEPTH."""

    def trial(self, count: int) -> SimulationTrial:
        """Return the trial of so many requests."""
        is_fixed = isinstance(self.depth, int)
        options = {
            "max_num_seqs": MAX_NUM_SEQS,
            "max_in_flight": self.depth if is_fixed else TCP_DEPTH * TWO.stages,
            "lanes": self.lanes,
        }
        setting = replace(TWO, link=f"pcie,{self.link},pcie")
        return SimulationTrial(
            setting, WORKLOAD, POLICY, 1.0, count, "static", options=tuple(options.items())
        )


def simulate_depth(case_and_count: tuple[DepthCase, int]) -> TrialRun:
    """Simulate so many requests with a number of micro-batches in flight."""
    case, count = case_and_count
    trial = case.trial(count)
    deployment = replace(deploy_trial(trial), depth=case.depth)
    return TrialRun(trial, simulate(deployment, trial_jobs(trial)))


def _measure_depth(case_and_count: tuple[DepthCase, int]) -> tuple[float, float]:
    """Return tokens and requests per second."""
    run = simulate_depth(case_and_count)
    return _read_speed(run), float(run.figures["requests_per_second"])


def _compare_depths(count: int, options: ExperimentOptions) -> tuple[str, list[PaperClaim]]:
    """Return the table of the controller beside fixed numbers by link, and the claims on it."""
    links = [name_link(*pair) for pair in product(RATES, DELAYS)]
    depths: tuple[int, ...] = FIXED_DEPTHS
    if options.quick:
        links, depths = links[:1], (TWO.stages,)
    fixed = [DepthCase(link, "1", depth) for link in links for depth in depths]
    controlled = [DepthCase(link, lanes, AUTO_DEPTH) for link in links for lanes in "12"]
    cases = [(case, count) for case in fixed + controlled]
    measured = map_parallel(_measure_depth, cases, options.jobs, options.progress)
    speeds = {case: speed for (case, _), speed in zip(cases, measured, strict=True)}
    rows, shares = [], []
    for link in links:
        best = max(fixed, key=lambda case: (case.link == link, speeds[case][1]))
        ours = [speeds[DepthCase(link, lanes, AUTO_DEPTH)] for lanes in "12"]
        shares.append([speed / limit for speed, limit in zip(ours[1], speeds[best], strict=True)])
        cells = (" / ".join(map(show_value, pair)) for pair in (speeds[best], *ours))
        ratio = " / ".join(f"{share:.2f} x" for share in shares[-1])
        rows.append([link, str(best.depth), *cells, ratio])
    header = ["link", "best fixed number", "", "controller, one lane", "two lanes", "over the best"]
    claims = [
        PaperClaim(
            f"{links[0]}: {name} of the controller over those of the best fixed number, simulated",
            ExpectedLimit(MIN_CONTROLLED, is_minimum=True, unit="x", digits=3),
            share,
        )
        for name, share in zip(("tokens/s", "requests/s"), shares[0], strict=True)
    ]
    return format_table(header, rows), claims


def _read_speed(run: TrialRun) -> float:
    return float(run.figures["steady_tokens_per_second"])


def _row(name: str, kind: str, run: TrialRun, alone: float) -> list[str]:
    return [
        name,
        kind,
        show_value(_read_speed(run)),
        f"{_read_speed(run) / alone:.2f} x",
        show_value(100 * fmean(run.figures["bubble_share"])),
        str(len(run.record.micro_batches)),
        show_value(step_seconds(run.record), 1e3),
        show_value(run.figures["requests_per_second"]),
    ]
