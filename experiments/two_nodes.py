"""An engine on emulated devices whose stages are on two nodes, joined by gllm-link.

The nodes are network namespaces of this machine with a shaped link between them.
"""

import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from benchmarks.net.engine import RigEngine
from benchmarks.net.rig import NamespaceRig, unsupported_reason
from experiments.base import ExperimentOptions, ExperimentResult
from experiments.claims import ExpectedLimit, PaperClaim
from experiments.emulated_trials import trial_config
from experiments.emulation import step_seconds
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
from gllm.sim.hardware.devices import find_link
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


NodeServer = Callable[[SimulationTrial, str], RunRecord]
"""Serves a trial on two nodes over a link with this name."""


def serve_on_nodes(trial: SimulationTrial, link: str) -> RunRecord:
    """Serve a trial, all requests at once, with half of its stages on each of two nodes.

    Args:
        trial: The trial; the links of its setting are those within a node.
        link: Name of the link between the nodes.

    Raises:
        ValueError: Namespaces are not permitted here.
        RuntimeError: The engine or the load fails.
    """
    if reason := unsupported_reason():
        raise ValueError(f"two nodes cannot run here: {reason}")
    flags, spec = engine_flags(trial), find_link("link", link)
    with tempfile.TemporaryDirectory(prefix="gllm-") as folder, NamespaceRig(NODES, mtu=MTU) as rig:
        for node in range(NODES):
            # Both hops are on the way.
            rig.hop(node).set_rate(8 * spec.bandwidth)
            rig.hop(node).set_delay(spec.latency / NODES)
        model = Path(trial.setting.model)
        with RigEngine(rig, model, Path(folder), flags) as engine:
            command = [*load_command(trial), "--base-url", engine.url]
            load = rig.popen(0, command, stdout=subprocess.DEVNULL)
            if status := load.wait(TIMEOUT_SECONDS):
                raise RuntimeError(f"the load ended with {status}: {engine.read_logs()}")
        return build_run_record(read_step_log(engine.step_log))


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
    cases = {"depth controller": AUTO_DEPTH, f"--max-in-flight {TWO.stages}": None}
    for name, depth in cases.items():
        most = TWO.stages if depth is None else TCP_DEPTH * TWO.stages
        trial = replace(base, options=(seqs, ("max_in_flight", most)))
        deployment = replace(deploy_trial(trial), depth=depth)
        on_nodes = replace(trial, setting=replace(TWO, link="pcie"))
        runs = {
            "simulated": TrialRun(trial, simulate(deployment, trial_jobs(trial))),
            "two nodes": TrialRun(on_nodes, serve(on_nodes, LINK)),
        }
        rows += [_row(name, kind, each, alone) for kind, each in runs.items()]
        gains = {kind: _read_speed(each) / alone for kind, each in runs.items()}
        claims.append(
            PaperClaim(
                f"{name}: tokens/s of two nodes over one simulated machine",
                ExpectedLimit(MIN_GAIN, is_minimum=True, unit="x", digits=2),
                gains["two nodes"],
                f"(simulated {gains['simulated']:.2f} x)",
            )
        )
    text = (
        f"{count} requests of {WORKLOAD}, all there at once, under {POLICY}: {TWO}, half of the "
        f"stages on each of two nodes with a link of {LINK}. Nodes are network namespaces; their "
        "activations travel through gllm-link. Between machines, a controller chooses the number "
        "of micro-batches in flight and their prefill tokens by measured times; a fixed number "
        f"turns it off. One machine: {ONE}, simulated, {show_value(alone)} tokens/s. Tokens per "
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
            ],
            rows,
        )
    )
    return ExperimentResult(
        "Two nodes as one pipeline",
        text,
        claims,
        reference="none; the limits are this project's",
    )


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
