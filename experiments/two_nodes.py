"""An engine on emulated devices whose stages are on two nodes, joined by gllm-link.

The nodes are network namespaces of this machine with a shaped link between them.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.net.engine import RigEngine
from benchmarks.net.rig import NamespaceRig, unsupported_reason
from experiments.emulated_trials import trial_config
from experiments.trials import SimulationTrial
from gllm.observability.step_log import read_step_log
from gllm.sim.hardware.devices import find_link
from gllm.sim.metrics.run_record import RunRecord, build_run_record

NODES = 2
MTU = 65_000
"""Bytes per packet, as segments of a network card with offload."""
TIMEOUT_SECONDS = 900.0


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
