"""Text about a simulation: what it simulates, and how its load compares with what it sustains."""

from collections.abc import Mapping
from statistics import fmean

from gllm.sim.deployment import Deployment
from gllm.sim.hardware.stages import format_degrees
from gllm.sim.metrics.delays import RunLoad
from gllm.sim.metrics.report import show_value
from gllm.sim.options import SimulationConfig
from gllm.sim.workloads.requests import WorkloadRequest


def describe_simulation(
    config: SimulationConfig, deployment: Deployment, jobs: list[WorkloadRequest]
) -> list[str]:
    """Return lines about the model, devices, KV cache, scheduler and workload of a simulation."""
    scheduler = deployment.scheduler
    num_tokens = scheduler.num_blocks * scheduler.block_size
    layers = ",".join(map(str, deployment.layers))
    prompt = fmean(job.num_prompt_tokens for job in jobs)
    output = fmean(job.num_output_tokens for job in jobs)
    arrivals = config.arrivals
    if arrivals not in ("static", "replay"):
        arrivals += f" at {show_value(config.rate)} requests/s"
    engines = []
    if config.engines > 1:
        engines = [f"engines: {config.engines} equal ones, routing policy {config.routing_policy}"]
    return [
        *engines,
        f"model: {deployment.model}, {sum(deployment.layers)} layers in {len(deployment.layers)} "
        f"stages of {layers}",
        f"devices: {_describe_devices(config, deployment)}",
        f"KV cache: {scheduler.num_blocks} blocks of {scheduler.block_size} tokens, "
        f"{num_tokens} tokens per stage",
        f"scheduler: {scheduler.policy}, at most {scheduler.max_num_seqs} sequences of "
        f"{scheduler.max_model_len} tokens",
        f"workload: {config.workload}, {len(jobs)} requests of {prompt:.0f} prompt and "
        f"{output:.0f} output tokens on average, {arrivals}, seed {config.seed}",
    ]


def describe_load(load: RunLoad) -> list[str]:
    """Return lines about the rates of a run, and by how much it is overloaded."""
    trial = load.trial
    offered = "all at once" if load.offered_rate is None else show_value(load.offered_rate)
    unit = "" if load.offered_rate is None else " requests/s"
    lines = [
        f"load: offered {offered}{unit}, sustained {show_value(load.sustained_rate)} requests/s"
    ]
    if load.is_overloaded:
        percent = round(100 * (load.overload or 0.0))
        # A burst makes delays too long at a rate that the engine sustains on average.
        excess = f" by {percent} %" if percent else ""
        p99, first, second = map(show_value, trial[1:])
        lines += [
            f"overloaded{excess}: scheduling delay p99 {p99} s, mean {first} s in the first half",
            f"    of the requests, {second} s in the second; latencies grow with their number",
        ]
    return lines


def describe_below_range(counts: Mapping[str, int]) -> list[str]:
    """Return a line about work below the measured range of the costs; none if there was none."""
    if not any(counts.values()):
        return []
    shown = ", ".join(f"{name} {count} times" for name, count in counts.items() if count)
    return [f"below the measured range, priced as its smallest value: {shown}"]


def _describe_devices(config: SimulationConfig, deployment: Deployment) -> str:
    """Return the number and names of devices or their profile, links, price and power."""
    hardware = deployment.hardware
    names = f"those of profile {config.profile}" if config.profile else config.device
    if hardware is None:
        return f"{names}, --tp {_format_equal(deployment.degrees)}"
    num_devices = sum(hardware.degrees)
    parts = [
        names if config.profile else f"{num_devices} x {names}",
        f"--tp {_format_equal(hardware.degrees)}",
    ]
    if hardware.links and not config.profile:
        parts.append(f"stages joined by {config.link}")
    if hardware.price is not None:
        parts.append(f"{hardware.price:.2f} $/h")
    if hardware.power is not None:
        parts.append(f"{hardware.power:.0f} W")
    return ", ".join(parts)


def _format_equal(degrees: list[int]) -> str:
    """Return numbers of ranks as in --tp, one number if all stages have the same."""
    return format_degrees(degrees[:1] if len(set(degrees)) == 1 else degrees)
