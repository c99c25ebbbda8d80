"""Options of `gllm simulate`, and the deployment and workload that they describe."""

from dataclasses import dataclass, field, replace

from gllm.config.emulation import DEFAULT_HOST
from gllm.config.engine import MAX_RANKS, NO_EXPERTS, parse_cpu_experts
from gllm.options.degrees import as_degrees
from gllm.options.field_types import convert_fields
from gllm.options.flags import parse_bytes, parse_counts
from gllm.options.options import INT32_MAX, INT64_MAX, MAX_TIMEOUT_SECONDS, option
from gllm.options.slo import Slo
from gllm.routing.policy_registry import POLICIES, check_placement_heartbeat
from gllm.scheduler.config import TCP_DEPTH, SchedulerConfig
from gllm.sim.capacity import CAPACITY_RULES
from gllm.sim.deployment import Deployment, roofline_deployment
from gllm.sim.depth_control import AUTO_DEPTH
from gllm.sim.hardware.devices import DEVICES, HOST_HELP, LINKS
from gllm.sim.hardware.shapes import MODELS
from gllm.sim.profiled import (
    VIDUR_MODEL,
    ProfileOptions,
    is_profile_file,
    profiled_deployment,
)
from gllm.sim.workloads.agents import AGENTS_HELP, DEFAULT_PAUSES, PAUSES_HELP, is_agents
from gllm.sim.workloads.classes import assign_classes, parse_priorities, parse_shares
from gllm.sim.workloads.length_predictions import SIMULATED_HELP, predict_lengths
from gllm.sim.workloads.lengths import WORKLOAD_HELP
from gllm.sim.workloads.requests import (
    WorkloadRequest,
    make_agents,
    make_workload,
    scale_request,
)


@dataclass(frozen=True)
class SimulationConfig:
    """Options of `gllm simulate`: model, devices, parallelism, scheduler and workload."""

    profile: str | None = option(
        None,
        "file of `gllm profile`, or folder of its --operators; vidur: Llama-2-70B, each stage two "
        "A100s, by Vidur's operator profiles; vidur:MODEL: one of its models on --device, "
        "A100-80G or H100, with attention by the roofline; distserve:MODEL or "
        "distserve:MODEL,vllm: OPT on A100s, by DistServe's coefficients; default: a device of the "
        "table",
        is_common=True,
    )
    device: str = option(
        "L20",
        f"device: one name for all stages, or one for each, such as L20,L40: {', '.join(DEVICES)}",
        is_common=True,
    )
    model: str = option("qwen2.5-32b", "model by its shape", choices=tuple(MODELS), is_common=True)
    bytes_per_weight: float | None = option(
        None,
        "bytes per weight: 2 is bfloat16, 1 fp8 or int8, 0.5 four bits; default: the model's",
        gt=0,
        le=4,
    )
    pipeline_parallel_size: int | None = option(
        None,
        "pipeline stages; default 4, or the profile's",
        ge=1,
        le=1024,
        flags=("--pipeline-parallel-size", "--pp"),
        is_common=True,
    )
    tensor_parallel_size: tuple[int, ...] | None = option(
        None,
        "devices that compute each stage together (tensor parallelism): one number, or one for "
        "each stage, such as 2,1; default: 1, or the profile's",
        ge=1,
        le=MAX_RANKS,
        parse=parse_counts,
        flags=("--tensor-parallel-size", "--tp", "-tp"),
        is_common=True,
    )
    layers: tuple[int, ...] | None = option(
        None,
        "number of layers of each stage, such as 20,12; default: equal numbers",
        ge=1,
        le=INT32_MAX,
        parse=parse_counts,
    )
    link: str = option(
        "pcie",
        "between neighbouring stages: one name for all links, or one for each, such as "
        f"pcie,network: {', '.join(LINKS)}",
    )
    tensor_parallel_link: str | None = option(
        None,
        "between the devices of a stage: one name, or one for each stage; default: the first of "
        "--link",
        flags=("--tensor-parallel-link", "--tp-link"),
    )
    cpu_experts: str = option(
        NO_EXPERTS,
        "all, or a number N: routed experts of all layers, or of the first N layers with experts, "
        "are computed by the host; default: none",
        parse=parse_cpu_experts,
    )
    expert_cache: int | None = option(
        None,
        "with --cpu-experts: bytes of each device's memory for experts, such as 8GiB; default: "
        "none",
        ge=1,
        le=INT64_MAX,
        parse=parse_bytes,
    )
    host: str = option(DEFAULT_HOST, f"{HOST_HELP} (default {DEFAULT_HOST})")
    max_model_len: int | None = option(
        None,
        "longest prompt + output; default: the workload's longest, or the profile's",
        ge=1,
        le=INT32_MAX,
    )
    depth: str | None = option(
        None,
        "micro-batches in flight: a number, or auto for those that a driver would choose from the "
        "times of its stages and links; default: --max-in-flight",
    )
    engines: int = option(1, "engines of that kind behind a router", ge=1, le=1024, is_common=True)
    routing_policy: str = option(
        next(iter(POLICIES)),
        "which engine serves a request, as --policy of gllm router; aladdin reads the limits of "
        "--slo-ttft, --slo-tpot and --slo-limits",
        choices=tuple(POLICIES),
    )
    placement_heartbeat: float = option(
        0.0,
        "with --routing-policy aladdin, collect the requests of so many seconds and place them "
        "together, longest prompts first",
        ge=0,
        le=MAX_TIMEOUT_SECONDS,
    )
    workload: str = option("azure-conv", f"{WORKLOAD_HELP}; or {AGENTS_HELP}", is_common=True)
    pauses: str = option(DEFAULT_PAUSES, f"{PAUSES_HELP} (default {DEFAULT_PAUSES})")
    hindsight: bool = option(
        False,
        "evict the cached KV blocks whose next use is farthest in the future, which no server "
        "knows: a yardstick for --prefix-cache-eviction with conversations",
    )
    requests: int = option(1000, "number of requests", ge=1, le=INT32_MAX, is_common=True)
    rate: float = option(4.0, "requests per second", gt=0, le=1e9, is_common=True)
    arrivals: str = option(
        "poisson", "poisson, gamma:CV, burst:SIZE, static, or replay of a trace's own times"
    )
    time_scale: float = option(1.0, "stretches the times of a replay", gt=0, le=1e9)
    length_scale: float = option(1.0, "multiplies prompt and output lengths", gt=0, le=1e6)
    max_request_tokens: int | None = option(
        None,
        "cut longer requests to this many tokens, prompt and output together: half of them at most "
        "for the output, the others for the prompt",
        ge=2,
        le=INT32_MAX,
    )
    priorities: str | None = option(
        None,
        "shares of the requests with each priority, such as 0:0.9,1:0.1; smaller ones run earlier",
    )
    slo_classes: str | None = option(
        None, "shares of the requests in each SLO class, such as chat:0.7,batch:0.3"
    )
    length_predictor: str | None = option(
        None,
        "predicted output length of each request, for --routing-policy predict and aladdin, and "
        f"--kv-admission reserve-static and reserve-dynamic: {SIMULATED_HELP}; default: that of "
        "the policy in production",
        flags=("--length-predictor", "--length-prediction"),
    )
    seed: int = option(
        0, "seed of lengths, arrivals, classes and predictions", ge=0, le=2**63 - 1, is_common=True
    )
    slo_ttft: float | None = option(
        None, "TTFT limit for the SLO, seconds", gt=0, le=MAX_TIMEOUT_SECONDS
    )
    slo_tpot: float | None = option(
        None, "TPOT limit for the SLO, seconds", gt=0, le=MAX_TIMEOUT_SECONDS
    )
    slo_limits: str | None = option(
        None,
        "TTFT and TPOT limits of SLO classes, seconds, such as chat:0.5:0.05,batch:30: (an empty "
        "one is that of --slo-ttft or --slo-tpot)",
    )
    capacity: str | None = option(
        None,
        "search for the highest request rate that the deployment sustains, from --rate on; "
        "sustained: P99 scheduling delay at most 5 s, and the second half's mean at most 1.2 times "
        "the first half's; vidur: P99 at most 5 s, as in Vidur's paper",
        choices=tuple(CAPACITY_RULES),
        is_common=True,
    )
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)

    @property
    def slo(self) -> Slo:
        """Latency limits of each request."""
        return Slo(self.slo_ttft, self.slo_tpot)

    def __post_init__(self) -> None:
        """Check types and ranges.

        Raises:
            ValueError: A field is invalid; the message names the field and the fix.
        """
        degrees = as_degrees(self.tensor_parallel_size)
        object.__setattr__(self, "tensor_parallel_size", degrees)
        convert_fields(self)
        check_placement_heartbeat(self.routing_policy, self.placement_heartbeat, "routing_policy")
        speculation = self.scheduler.speculative_config
        if speculation is not None and speculation.is_drafted_by_stage:
            raise ValueError(
                f"speculative_config: method {speculation.method} drafts with weights, which a "
                "simulation does not have: choose method synthetic and its acceptance rate"
            )


def build_workload(config: SimulationConfig) -> list[WorkloadRequest]:
    """Return the requests of the workload that the options of `gllm simulate` describe.

    Args:
        config: The options.

    Raises:
        ValueError: The workload, the arrivals or the length predictor are unknown, or the shares
            of classes are invalid.
    """
    if config.time_scale != SimulationConfig.time_scale and config.arrivals != "replay":
        raise ValueError(
            f"--time-scale {config.time_scale:g} stretches the times of a replay, and --arrivals "
            f"is {config.arrivals}: choose replay, or another --rate"
        )
    if is_agents(config.workload):
        arguments = config.workload, config.rate, config.arrivals, config.seed, config.pauses
        requests = make_agents(*arguments)
    else:
        requests = make_workload(
            config.workload,
            config.requests,
            config.rate,
            config.arrivals,
            config.seed,
            config.time_scale,
        )
    requests = [
        scale_request(request, config.length_scale, config.max_request_tokens)
        for request in requests
    ]
    if config.length_predictor is not None:
        requests = predict_lengths(requests, config.length_predictor, config.seed)
    return assign_classes(
        requests,
        parse_priorities(config.priorities) if config.priorities else None,
        parse_shares(config.slo_classes) if config.slo_classes else None,
        config.seed,
    )


def table_model(config: SimulationConfig) -> str | None:
    """Return the model of the table that a configuration simulates; None for a measured one."""
    if config.profile is None:
        return config.model
    name = config.profile.removeprefix(VIDUR_MODEL)
    return name if name in MODELS else None


def check_request_lengths(config: SimulationConfig, longest: int) -> None:
    """Check that an engine of the simulated model serves the requests.

    Args:
        config: The options.
        longest: Prompt plus output tokens of the longest request in the workload.

    Raises:
        ValueError: The longest request or `max_model_len` exceeds the model's context.
    """
    name = table_model(config)
    limit = MODELS[name].max_context if name is not None else 0
    if not limit:
        return
    if (config.max_model_len or 0) > limit:
        raise ValueError(
            f"--max-model-len {config.max_model_len}: the context of {name} is {limit} tokens: "
            "lower it"
        )
    if longest > limit:
        raise ValueError(
            f"--workload {config.workload} has a request of {longest} tokens, but the context of "
            f"{name} is {limit}: cut the requests (--max-request-tokens {limit}), or choose "
            "another model or workload"
        )


def describe_cut_requests(config: SimulationConfig) -> list[str]:
    """Return a line with the number of requests that `max_request_tokens` cuts; empty if none."""
    most = config.max_request_tokens
    if most is None:
        return []
    whole = build_workload(replace(config, max_request_tokens=None))
    num_cut = sum(job.num_prompt_tokens + job.num_output_tokens > most for job in whole)
    if not num_cut:
        return []
    share = f"{100 * num_cut / len(whole):.1f} %"
    return [f"{num_cut} of {len(whole)} requests ({share}) are cut to {most} tokens"]


def build_deployment(config: SimulationConfig, longest: int) -> Deployment:
    """Return the engine configuration that the options of `gllm simulate` describe.

    Args:
        config: The options.
        longest: Prompt plus output tokens of the longest request in the workload.

    Raises:
        ValueError: The options are inconsistent.
        OSError: The cost profile cannot be read.
    """
    deployment = _build_deployment(config, longest)
    if config.depth is None:
        return deployment
    depth = parse_depth(config.depth)
    scheduler = deployment.scheduler
    if config.scheduler.max_in_flight is None:
        most = depth if isinstance(depth, int) else TCP_DEPTH * scheduler.stages
        scheduler = replace(scheduler, max_in_flight=most)
    return replace(deployment, scheduler=scheduler, depth=depth)


def parse_depth(text: str) -> int | str:
    """Parse the value of `--depth`: a number of micro-batches in flight, or AUTO_DEPTH.

    Raises:
        ValueError: It is neither.
    """
    if text == AUTO_DEPTH:
        return text
    if not (text.isascii() and text.isdigit() and int(text)):
        raise ValueError(f"--depth {text}: give a number from 1 on, or {AUTO_DEPTH}")
    return int(text)


def _build_deployment(config: SimulationConfig, longest: int) -> Deployment:
    """Return the configured deployment without a depth; see `build_deployment`."""
    stages = config.pipeline_parallel_size
    if config.profile is None:
        length = config.max_model_len or longest
        return roofline_deployment(
            config.model,
            config.device,
            stages or 4,
            length,
            config.link,
            config.scheduler,
            degrees=config.tensor_parallel_size or (1,),
            rank_link=config.tensor_parallel_link,
            layers=config.layers,
            bytes_per_weight=config.bytes_per_weight,
            cpu_experts=config.cpu_experts,
            expert_cache=config.expert_cache,
            host=config.host,
        )
    if config.cpu_experts != NO_EXPERTS:
        raise ValueError("--cpu-experts changes a model of the table: leave --profile out")
    if config.bytes_per_weight is not None:
        raise ValueError("--bytes-per-weight changes a model of the table: leave --profile out")
    _check_profile_flags(config, config.profile)
    options = ProfileOptions(
        config.scheduler,
        longest,
        stages,
        config.tensor_parallel_size,
        config.layers,
        config.link,
        config.max_model_len,
        config.device,
    )
    return profiled_deployment(config.profile, options)


def _check_profile_flags(config: SimulationConfig, profile: str) -> None:
    """Raise ValueError for a flag that chooses what the profile contains."""
    names = [] if profile.startswith(VIDUR_MODEL) else ["device"]
    names += ["model", "tensor_parallel_link"]
    if not is_profile_file(profile):
        names.append("link")
    for name in names:
        if getattr(config, name) != getattr(SimulationConfig, name):
            kind = name.rpartition("_")[2]
            raise ValueError(
                f"--{name.replace('_', '-')} chooses a {kind} of the table, and --profile "
                f"{profile} has its own: leave one of them out"
            )
