"""Emulated form of a plan: its machines become this one, its devices those of the simulator.

The engines keep their stages, ranks, layers and options; links between machines become the links
of the cost model, and of hand-offs.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import msgspec

from gllm.config.emulation import EMULATED
from gllm.config.engine import EngineConfig
from gllm.config.kv_backends import MOCK
from gllm.options.addresses import is_loopback, is_wildcard
from gllm.plan.processes import LOOPBACK, find_flag, has_phases
from gllm.plan.serving_plan import (
    NUM_ENGINE_PORTS,
    ROUTER_HUB_PORT,
    EnginePlan,
    LinkPlan,
    NodePlan,
    PlanError,
    RouterPlan,
    ServingPlan,
    StagePlan,
    check_plan,
)
from gllm.scheduler.config import SchedulerConfig
from gllm.sim.hardware.devices import DEVICES, NVLINK_NODES, find_link, name_link
from gllm.sim.hardware.shapes import MODELS
from gllm.sim.hardware.stages import build_hardware
from gllm.sim.profiled import VIDUR_MODEL

NODE = "emulated"
"""Name of this machine in an emulated plan."""
BYTES_PER_GIGABYTE = 1e9
NETWORK, NVLINK, PCIE = "network", "nvlink", "pcie"
"""Links of the simulator where the plan has none: between machines, and within one by its
devices."""
DROPPED_FLAGS = (
    "attention_backend",
    "kv_transfer_encoding",
    "node_listen",
    "node_secret_file",
)
"""Flags of engines and routers that are for real devices or other machines."""


def emulate_plan(plan: ServingPlan, max_model_len: int | None = None) -> ServingPlan:
    """Return a plan that serves on emulated devices of this machine.

    Args:
        plan: checked plan for GPUs.
        max_model_len: longest sequence of router and engines that do not set it, in tokens; None
            for `choose_max_model_len`.

    Raises:
        PlanError: an engine is on CPUs, or its devices have no data sheet. The message names the
            field and the fix.
    """
    first_devices: dict[str, int] = {}
    devices: list[str] = []
    for name, node in plan.nodes.items():
        first_devices[name] = len(devices)
        devices += node.devices
    ports, length = _choose_ports(plan), max_model_len or choose_max_model_len(plan)
    engines = {}
    for name, engine in plan.engines.items():
        stages = [
            StagePlan(
                NODE, stage.layers, [first_devices[stage.node] + index for index in stage.devices]
            )
            for stage in engine.stages
        ]
        flags = _keep_flags(engine.flags) | _emulation_flags(plan, name)
        if length is not None:
            flags.setdefault("max_model_len", length)
        engines[name] = msgspec.structs.replace(
            engine, stages=stages, flags=flags, port=ports[name]
        )
    emulated = msgspec.structs.replace(
        plan,
        nodes={NODE: NodePlan(LOOPBACK, devices)},
        engines=engines,
        links={},
        router=plan.router and _emulate_router(plan.router, length),
    )
    check_plan(emulated)
    return emulated


def _emulate_router(router: RouterPlan, length: int | None) -> RouterPlan:
    flags = _keep_flags(router.flags) | {"device": EMULATED}
    if length is not None:
        flags.setdefault("max_model_len", length)
    if (hub := find_flag(flags, "hub")) is not None:
        # The engines attach on this machine.
        flags["hub"] = str(hub).rpartition(":")[2]
    return msgspec.structs.replace(router, node=NODE, flags=flags)


def _keep_flags(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags that hold for emulated devices of this machine, with underscores."""
    kept = {key.replace("-", "_"): value for key, value in flags.items()}
    host = str(kept.get("host") or LOOPBACK)
    dropped = DROPPED_FLAGS if is_loopback(host) or is_wildcard(host) else (*DROPPED_FLAGS, "host")
    return {key: value for key, value in kept.items() if key not in dropped}


def _emulation_flags(plan: ServingPlan, name: str) -> dict[str, Any]:
    """Return the flags of an engine's emulated devices and links.

    Those that the plan has itself come first. Raises PlanError.
    """
    engine = plan.engines[name]
    devices = [_stage_device(plan, name, index) for index in range(len(engine.stages))]
    nodes = [stage.node for stage in engine.stages]
    inner = [_link_between(plan, node, node) for node in nodes]
    links = [_link_between(plan, *pair) for pair in pairwise(nodes)]
    flags: dict[str, Any] = {
        # Links take the time of the cost model, so their bytes would only cost the host's.
        "emulated_bytes": False,
        "emulated_link": ",".join(map(_link_name, links or inner[:1])),
        "emulated_rank_link": ",".join(map(_link_name, inner)),
    }
    flags |= {key: value for key in flags if (value := find_flag(engine.flags, key)) is not None}
    device = f"{EMULATED}:{','.join(devices)}"
    if (profile := find_flag(engine.flags, "emulated_profile")) is not None:
        # Of a device and links within stages of its own.
        del flags["emulated_rank_link"]
        device = device if str(profile).startswith(VIDUR_MODEL) else EMULATED
    if has_phases(plan) and not str(find_flag(engine.flags, "kv_transfer")).startswith(MOCK):
        flags["kv_transfer"] = f"{MOCK}{_transfer_gigabytes(plan, name):.6g}"
    return flags | {"device": device}


def pin_emulated_ports(plan: ServingPlan) -> ServingPlan:
    """Return a plan for several machines whose engines have ports that one machine can give."""
    engines = {
        name: msgspec.structs.replace(plan.engines[name], port=port)
        for name, port in _choose_ports(plan).items()
    }
    return msgspec.structs.replace(plan, engines=engines)


def choose_max_model_len(plan: ServingPlan) -> int | None:
    """Return the longest sequence in tokens that router and engines serve; None: the model's.

    It is the least that an engine is configured for, or has space for beside its weights. Raises
    PlanError.
    """
    lengths = []
    for name, engine in plan.engines.items():
        configured = find_flag(engine.flags, "max_model_len")
        if configured is not None:
            lengths.append(int(configured))
        elif plan.model in MODELS:
            lengths.append(_count_tokens(plan, name))
    least = min(lengths, default=0)
    is_whole = plan.model in MODELS and least >= MODELS[plan.model].context
    return None if least < 1 or is_whole else least


def _count_tokens(plan: ServingPlan, name: str) -> int:
    """Return the tokens of the KV cache of an engine, of a model of the simulator's table."""
    engine, flags = plan.engines[name], _emulation_flags(plan, name)
    devices = [_stage_device(plan, name, index) for index in range(len(engine.stages))]
    try:
        hardware = build_hardware(
            plan.model,
            ",".join(devices),
            len(engine.stages),
            flags["emulated_link"],
            [stage.num_ranks for stage in engine.stages],
            layers=[stage.layers for stage in engine.stages],
        )
    except ValueError as error:
        raise PlanError(f"engines.{name}: {error}") from None
    share = find_flag(engine.flags, "gpu_memory_utilization")
    share = EngineConfig.gpu_memory_utilization if share is None else float(share)
    block_size = SchedulerConfig.block_size
    return min(hardware.stage_kv_blocks(block_size, share)) * block_size


def _stage_device(plan: ServingPlan, name: str, index: int) -> str:
    """Return the name of the devices of a stage. Raises PlanError."""
    stage = plan.engines[name].stages[index]
    names = {plan.nodes[stage.node].devices[device] for device in stage.devices}
    path = f"engines.{name}.stages[{index}].devices"
    if not names:
        raise PlanError(f"{path}: empty: CPUs are not emulated: run this plan without --emulate")
    if len(names) > 1:
        raise PlanError(f"{path}: {', '.join(sorted(names))}: an emulated stage has equal devices")
    (device,) = names
    if device not in DEVICES:
        raise PlanError(
            f"nodes.{stage.node}.devices: {device!r} has no data sheet: name one of "
            f"{', '.join(DEVICES)}"
        )
    return device


def _link_between(plan: ServingPlan, a: str, b: str) -> LinkPlan | str:
    """Return the link between devices of two nodes, or of one; a name where the plan has none."""
    if a == b:
        node = plan.nodes[a]
        has_nvlink = all(device in NVLINK_NODES for device in node.devices)
        return node.link or (NVLINK if has_nvlink else PCIE)
    return plan.links.get(f"{a}-{b}") or plan.links.get(f"{b}-{a}") or NETWORK


def _link_name(link: LinkPlan | str) -> str:
    return link if isinstance(link, str) else name_link(link.gbit, link.ms)


def _transfer_gigabytes(plan: ServingPlan, name: str) -> float:
    """Return the GB/s of the slowest link over which an engine gives or fetches KV blocks."""
    own = plan.engines[name]

    def is_partner(other: str, engine: EnginePlan) -> bool:
        if other == name or (own.role == engine.role != "mixed"):
            return False
        pairs = [(source, target) for source, shares in plan.routes.items() for target in shares]
        return not pairs or (name, other) in pairs or (other, name) in pairs

    rates = [
        find_link("link", _link_name(_link_between(plan, a, b))).bandwidth
        for other, engine in plan.engines.items()
        if is_partner(other, engine)
        for a in own.nodes
        for b in engine.nodes
    ]
    return min(rates or [find_link("link", NETWORK).bandwidth]) / BYTES_PER_GIGABYTE


def _choose_ports(plan: ServingPlan) -> dict[str, int]:
    """Return the first port of each engine: the plan's own, unless two machines had the same."""
    taken: set[int] = set()
    if plan.router is not None:
        hub = str(find_flag(plan.router.flags, "hub") or ROUTER_HUB_PORT).rpartition(":")[2]
        taken = {plan.router.port} | ({int(hub)} if hub.isdigit() else set())
    ports = {}
    for name, engine in plan.engines.items():
        first, num_ports = (
            plan.first_port(name, engine.nodes[0]),
            NUM_ENGINE_PORTS * len(engine.nodes),
        )
        while clashes := taken & set(range(first, first + num_ports)):
            first = max(clashes) + 1
        taken |= set(range(first, first + num_ports))
        ports[name] = first
    return ports
