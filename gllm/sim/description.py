"""Text about a simulation: what it simulates, and how its load compares with what it sustains."""

from collections.abc import Mapping, Sequence
from math import inf
from statistics import fmean

from gllm.sim.capacity import CAPACITY_RULES
from gllm.sim.deployment import Deployment
from gllm.sim.hardware.stages import format_degrees
from gllm.sim.metrics.delays import RunLoad
from gllm.sim.metrics.report import show_value
from gllm.sim.options import SimulationConfig, describe_cut_requests
from gllm.sim.workloads.requests import WorkloadRequest


def describe_simulation(
    config: SimulationConfig, deployment: Deployment, jobs: list[WorkloadRequest]
) -> list[str]:
    """Return text lines on a simulation: model, devices, KV cache, scheduler and workload."""
    scheduler = deployment.scheduler
    num_tokens = scheduler.num_blocks * scheduler.block_size
    layers = ",".join(map(str, deployment.layers))
    num_stages = len(deployment.layers)
    stages = f"{num_stages} stages of {layers}" if num_stages > 1 else "1 stage"
    if any(degree > 1 for degree in deployment.degrees):
        stages += f", tensor parallel {_format_equal(deployment.degrees)}"
    prompt = fmean(job.num_prompt_tokens for job in jobs)
    output = fmean(job.num_output_tokens for job in jobs)
    arrivals = config.arrivals
    if arrivals not in ("static", "replay"):
        arrivals += f" at {show_value(config.rate)} requests/s"
    engines = []
    if config.engines > 1:
        policy = config.routing_policy
        engines = [f"engines: {config.engines}, routing policy {policy}; of each engine:"]
    return [
        *engines,
        f"model: {deployment.model}, {sum(deployment.layers)} layers in {stages}",
        f"devices: {_describe_devices(config, deployment)}",
        f"KV cache: {num_tokens} tokens in {scheduler.num_blocks} blocks of {scheduler.block_size}",
        f"scheduler: {scheduler.policy}, at most {scheduler.max_num_seqs} sequences of up to "
        f"{scheduler.max_model_len} tokens",
        f"workload: {config.workload}, {len(jobs)} requests of {prompt:.0f} prompt and "
        f"{output:.0f} output tokens on average, {arrivals}, seed {config.seed}",
        *describe_cut_requests(config),
    ]


def describe_load(load: RunLoad) -> list[str]:
    """Return text lines with the offered and sustained request rate of a run, and its overload."""
    trial = load.trial
    offered = "all at once" if load.offered_rate is None else show_value(load.offered_rate)
    unit = "" if load.offered_rate is None else " requests/s"
    lines = [
        f"load: offered {offered}{unit}, sustained {show_value(load.sustained_rate)} requests/s"
    ]
    rule = CAPACITY_RULES["sustained"]
    if not load.is_overloaded and rule.is_sustained(trial):
        return lines
    p99, first, second = map(show_value, (trial[1], trial[2], trial[3]))
    delays = f"mean {first} s in the first half of the requests, {second} s in the second"
    if load.is_overloaded:
        return [
            *lines,
            f"overloaded{_describe_excess(load)}: scheduling delay p99 {p99} s,",
            f"    {delays}; latencies grow with the number of requests",
        ]
    num_needed = rule.num_requests(load.offered_rate or 0.0, 0)
    if load.offered_rate is not None and trial.num_requests < num_needed:
        # The first requests find an empty system, so delays grow at any load.
        return [
            *lines,
            f"scheduling delays grow: {delays};",
            f"    --requests {num_needed} or more show whether this is an overload",
        ]
    return [*lines, f"scheduling delay p99 {p99} s, {delays}: the queue does not grow"]


def _describe_excess(load: RunLoad) -> str:
    """Return by how much the rate is too high, or the delays where the rate is sustained."""
    if percent := round(100 * (load.overload or 0.0)):
        return f" by {percent} %"
    if load.trial.p99_delay_seconds == inf:
        return ", requests are never scheduled"
    return f", delays grow by {show_value(100 * (load.trial.growth - 1))} %"


def describe_below_range(counts: Mapping[str, int]) -> list[str]:
    """Return a warning line on batches smaller than the cost model was measured for, if any.

    Args:
        counts: Number of such predictions by name of the quantity.

    Returns:
        One line, or an empty list.
    """
    if not any(counts.values()):
        return []
    shown = ", ".join(f"{name} {count} times" for name, count in counts.items() if count)
    return [f"below the measured range, priced as its smallest value: {shown}"]


def _describe_devices(config: SimulationConfig, deployment: Deployment) -> str:
    """Return the number and names of devices or their profile, links, price and power limit."""
    hardware = deployment.hardware
    if config.profile:
        parts = [f"those of profile {config.profile}"]
    else:
        degrees = deployment.degrees or [1] * len(deployment.layers)
        parts = [_count_devices(config.device, degrees)]
        if max(degrees) > 1:
            rank_link = config.tensor_parallel_link or config.link.split(",")[0]
            parts.append(f"ranks joined by {rank_link}")
        if len(deployment.layers) > 1:
            parts.append(f"stages joined by {config.link}")
    if hardware is not None and hardware.price is not None:
        parts.append(f"{hardware.price:.2f} $/h")
    if hardware is not None and hardware.power is not None:
        parts.append(f"power limit {hardware.power:.0f} W")
    return ", ".join(parts)


def _count_devices(device: str, degrees: Sequence[int]) -> str:
    """Return the numbers of devices by name; `device` has one name, or one per stage."""
    names = device.split(",")
    counts: dict[str, int] = {}
    for stage, degree in enumerate(degrees):
        name = names[stage % len(names)]
        counts[name] = counts.get(name, 0) + degree
    return " + ".join(f"{count} x {name}" for name, count in counts.items())


def _format_equal(degrees: list[int]) -> str:
    """Return numbers of ranks as in --tp, one number if all stages have the same."""
    return format_degrees(degrees[:1] if len(set(degrees)) == 1 else degrees)
