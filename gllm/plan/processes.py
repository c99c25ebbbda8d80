"""Processes that serve a plan: command line, environment and address of each one on a node.

`gllm up` starts them.
"""

import os
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from gllm.config.attachment import AttachmentConfig
from gllm.config.emulation import is_emulated
from gllm.config.engine import EngineConfig
from gllm.config.nodes import NodesConfig
from gllm.config.router import RouterConfig
from gllm.config.server import ServerConfig
from gllm.options.addresses import format_host_port, is_loopback, is_wildcard
from gllm.options.flags import FlagParser, add_flags, config_from_flags, flag_arguments
from gllm.plan.serving_plan import (
    ROUTER_HUB_PORT,
    ROUTER_NAME,
    EnginePlan,
    PlanError,
    ServingPlan,
)
from gllm.routing.disaggregation.flow import format_routes
from gllm.scheduler.config import SchedulerConfig

ENGINE_CONFIGS = (EngineConfig, AttachmentConfig, NodesConfig, ServerConfig)
ROUTER_CONFIGS = (RouterConfig, ServerConfig)
SCHEDULER_CONFIGS = (SchedulerConfig,)
DERIVED_ENGINE_FIELDS = {
    "model": "model",
    "pipeline_parallel_size": "stages",
    "tensor_parallel_size": "devices of the stages",
    "layers": "layers of the stages",
    "nnodes": "nodes of the stages",
    "stages_per_node": "nodes of the stages",
    "node_rank": "nodes of the stages",
    "master_addr": "hosts of the nodes",
    "node_name": "names of the nodes",
    "data_port": "port of the engine",
    "kv_transfer_address": "port of the engine",
    "router": "router",
    "hub": "router",
    "role": "role of the engine",
    "name": "name of the engine",
    "port": "port of the engine",
}
"""Fields of `gllm serve` that a plan sets by others, and the name of these."""
DERIVED_ROUTER_FIELDS = {
    "model": "model",
    "engines": "engines",
    "port": "port of the router",
    "policy": "policy of the router",
    "preset": "preset of the router",
}
"""The same for `gllm router`."""


def render_flags(
    configs: Collection[type],
    values: Mapping[str, Any],
    path: str,
    derived: Mapping[str, str] | None = None,
) -> list[str]:
    """Convert flag values of a plan into command-line arguments, and check them.

    Args:
        configs: configuration classes that define the flags.
        values: values by flag name, with dashes or underscores.
        path: location of the values in the plan, for error messages.
        derived: names of flags that the plan sets from other fields, and these fields; they are not
            allowed here.

    Raises:
        PlanError: a flag is unknown or cannot have its value; the message names the fix.
    """
    parser = FlagParser(add_help=False)
    for config in configs:
        add_flags(parser, config)
    arguments: list[str] = []
    for key, value in values.items():
        try:
            action = parser.action_of(key)
            if source := (derived or {}).get(action.dest):
                raise ValueError(f"the plan sets it by the {source}: remove it here")
            arguments += flag_arguments(action.option_strings[0], action, value, key)
        except ValueError as error:
            raise PlanError(f"{path}.{key}: {error}") from None
    return arguments


def find_flag(values: Mapping[str, Any], name: str) -> Any:
    """Return the value of a flag by its name with underscores; None if it is not set.

    Args:
        values: values by flag name, with dashes or underscores.
        name: name to look for.
    """
    return next((value for key, value in values.items() if key.replace("-", "_") == name), None)


LOOPBACK = "127.0.0.1"


class EnginePorts(NamedTuple):
    """TCP ports of one engine on one of its nodes, by purpose."""

    api: int
    """HTTP API with /health, /ready and /metrics."""
    control: int
    """Messages between the engine's nodes."""
    data: int
    """Activations between neighbouring pipeline stages."""
    kv: int
    """KV caches that other engines fetch."""


class LaunchOptions(NamedTuple):
    """Options of one machine for starting its processes: secret file, CPU cores, log folder."""

    node_secret_file: str | None = None
    """File of the secret that all machines share; None without one."""
    num_cores: int | None = None
    """Cores that the workers on its CPU share; None to leave the number of threads to them."""
    step_log_folder: str | None = None
    """Folder to which each engine writes its step log, ENGINE.jsonl; None for no logs."""


class ProcessSpec(msgspec.Struct, frozen=True):
    """Command line, environment and URL of one process (engine or router) that a plan starts."""

    name: str
    """Name of the engine, or ROUTER_NAME."""
    module: str
    """Python module that the process runs."""
    arguments: list[str]
    """Its arguments."""
    url: str
    """URL under which this machine reaches its API."""
    environment: dict[str, str] = {}
    """Variables that are set in addition to those of the parent process."""
    shutdown_seconds: float = 30.0
    """Time for running requests to finish after SIGTERM."""
    node_rank: int = 0
    """Rank of the node within the engine; only rank 0 serves requests."""

    @property
    def is_router(self) -> bool:
        """True for the router."""
        return self.module == "gllm.commands.router"

    @property
    def certificate(self) -> tuple[str, str] | None:
        """Files of certificate and key that its clients show; None if it requires none."""
        return client_certificate(
            {
                name.removeprefix("--").replace("-", "_"): value
                for name, _, value in (text.partition("=") for text in self.arguments)
            }
        )

    @property
    def title(self) -> str:
        """Name of the process in messages."""
        if self.is_router:
            return self.name
        return f"engine {self.name}" + (f" rank {self.node_rank}" if self.node_rank else "")

    @property
    def command(self) -> str:
        """Sub-command of `gllm`."""
        return self.module.rpartition(".")[2]


def engine_ports(plan: ServingPlan, name: str, node: str) -> EnginePorts:
    """Return the API, control, data and KV ports of an engine on one of its nodes."""
    first = plan.first_port(name, node)
    return EnginePorts(first, first + 1, first + 2, first + 3)


def specs_by_name(specs: Iterable[ProcessSpec]) -> dict[str, ProcessSpec]:
    """Return processes by their names.

    Raises:
        PlanError: Two processes have one name, so that one of them would never be started.
    """
    named: dict[str, ProcessSpec] = {}
    for spec in specs:
        other = named.setdefault(spec.name, spec)
        if other is not spec:
            raise PlanError(
                f"engines.{spec.name}: {other.title} and {spec.title} have the same name: give the "
                "engine another name"
            )
    return named


def commands_for(
    plan: ServingPlan, node: str, options: LaunchOptions | None = None
) -> list[ProcessSpec]:
    """Return the processes that a plan starts on one node, the router first.

    Args:
        plan: checked serving plan.
        node: name of the node.
        options: secret file, CPU cores and log folder of the node.

    Raises:
        PlanError: the plan has no such node, a flag is unknown or must not be set, or a node secret
            is missing. The message names the field and the fix.
    """
    options = options or LaunchOptions()
    if node not in plan.nodes:
        raise PlanError(f"nodes: there is no node {node!r}; choose one of {', '.join(plan.nodes)}")
    _check_secret(plan, options)
    specs = [_router_process(plan, options)] if plan.router and plan.router.node == node else []
    return specs + [
        _engine_process(plan, name, node, options)
        for name, engine in plan.engines.items()
        if node in engine.nodes
    ]


def crosses_machines(plan: ServingPlan) -> bool:
    """Return True if processes of a plan communicate between machines.

    A router or engine on several nodes that all have loopback addresses does not.
    """
    nodes = {node for engine in plan.engines.values() for node in engine.nodes}
    has_wide_engine = any(len(engine.nodes) > 1 for engine in plan.engines.values())
    is_apart = plan.router is not None and nodes != {plan.router.node}
    hosts = [plan.nodes[node].host for node in nodes]
    return (has_wide_engine or is_apart) and not all(map(is_loopback, hosts))


def is_emulated_engine(engine: EnginePlan) -> bool:
    """Return True if the devices of an engine are emulated, by its flag `device`."""
    return is_emulated(str(find_flag(engine.flags, "device")))


def explain_missing_transfers(plan: ServingPlan) -> dict[str, str]:
    """Return, by engine name, why an engine of a disaggregated plan cannot transfer its KV cache.

    Empty if all engines can, or if the plan has no separate prefill and decode engines.
    """
    if not has_phases(plan):
        return {}
    causes = {}
    for name, engine in plan.engines.items():
        if len({bool(stage.devices) for stage in engine.stages}) > 1:
            causes[name] = "some stages are on GPUs, others on CPUs"
    return causes


def find_simulated_only(plan: ServingPlan) -> str:
    """Return the reason why `gllm serve` cannot do all that a plan expects; empty if it can."""
    engines: dict[str, list[str]] = {}
    for name, cause in explain_missing_transfers(plan).items():
        engines.setdefault(cause, []).append(name)
    return "; ".join(
        f"{', '.join(names)}: no KV blocks are passed on, because {cause}: prompts are computed "
        "again after their prefill"
        for cause, names in engines.items()
    )


def check_configurations(plan: ServingPlan) -> dict[str, EngineConfig]:
    """Check the processes of a plan as `gllm serve` and `gllm router` check their command lines.

    The model and the machines are not looked at: see `engine_checks`.

    Returns:
        The configuration that the head of each engine reads, by name of the engine.

    Raises:
        PlanError: a combination of options is refused; the message names process and fix.
    """
    options = LaunchOptions(node_secret_file="secret")
    engines: dict[str, EngineConfig] = {}
    for node in plan.nodes:
        for spec in commands_for(plan, node, options):
            kinds = ROUTER_CONFIGS if spec.is_router else ENGINE_CONFIGS
            parser = FlagParser(add_help=False)
            for kind in kinds:
                add_flags(parser, kind)
            values = parser.parse_args(spec.arguments)
            try:
                configs = [config_from_flags(kind, values) for kind in kinds]
            except ValueError as error:
                raise PlanError(f"gllm {spec.command} refuses {spec.title}: {error}") from None
            if isinstance(configs[0], EngineConfig):
                engines.setdefault(spec.name, configs[0])
    return engines


def transfer_flag_names(plan: ServingPlan, name: str) -> tuple[str, ...]:
    """Return the names of the KV transfer flags of an engine; empty if it transfers no KV cache.

    The flags depend on all engines of the plan, so a change of another engine may change them.
    """
    return tuple(_transfer_flags(plan, name, plan.engines[name].nodes[0]))


def router_hub(plan: ServingPlan) -> str:
    """Return HOST:PORT at which the engines of a plan connect to its router.

    This is the router's port for engines, not its HTTP port.
    """
    assert plan.router is not None
    hub = _own_hub(plan)
    host = plan.nodes[plan.router.node].host if crosses_machines(plan) else LOOPBACK
    return format_host_port(host, int(hub)) if hub.isdigit() else hub


def _own_hub(plan: ServingPlan) -> str:
    """Return the --hub of the router; a port alone is one of all addresses if it has a secret."""
    assert plan.router is not None
    hub = find_flag(plan.router.flags, "hub")
    return str(ROUTER_HUB_PORT if hub is None else hub)


def router_url(plan: ServingPlan) -> str:
    """Return the URL of the router's HTTP API, as the machines of a plan reach it."""
    router = plan.router
    assert router is not None
    flags = {key.replace("-", "_"): value for key, value in router.flags.items()}
    return _make_url(str(flags.get("host") or plan.nodes[router.node].host), router.port, flags)


def scaling_router_url(plan: ServingPlan) -> str:
    """Return the URL of a plan's router if it starts and stops engines by load; empty otherwise."""
    return router_url(plan) if plan.router and find_flag(plan.router.flags, "scale") else ""


def client_certificate(flags: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the files of certificate and key that clients of the same deployment show.

    A server with `ssl_ca_certs` requires a certificate of these authorities from every client; that
    of the server itself is taken.

    Args:
        flags: flags of the server, by names with underscores.

    Returns:
        None if the server requires no certificate.
    """
    if not flags.get("ssl_ca_certs"):
        return None
    return str(flags["ssl_certfile"]), str(flags["ssl_keyfile"])


def router_certificate(plan: ServingPlan) -> tuple[str, str] | None:
    """Return the files of certificate and key that clients of a plan's router show, if any."""
    flags = plan.router.flags if plan.router else {}
    return client_certificate({key.replace("-", "_"): value for key, value in flags.items()})


def router_api_key(plan: ServingPlan) -> str:
    """Return the first API key of the router of a plan; empty if it has none.

    Keys are those of the plan's flag `api-key`, or else of the environment variable GLLM_API_KEY.
    """
    keys = find_flag(plan.router.flags, "api_key") if plan.router else None
    if isinstance(keys, list | tuple):
        keys = keys[0] if keys else None
    text = str(keys) if keys else os.environ.get("GLLM_API_KEY", "")
    return text.partition(",")[0].strip()


def _check_secret(plan: ServingPlan, options: LaunchOptions) -> None:
    flags = [engine.flags for engine in plan.engines.values()]
    flags += [plan.router.flags] if plan.router else []
    has_secret = all(find_flag(values, "node_secret_file") for values in flags)
    if crosses_machines(plan) and not (options.node_secret_file or has_secret):
        raise PlanError(
            "nodes: the machines need a secret: make one with `gllm node --new-secret FILE`, copy "
            "it to all of them, and pass --node-secret-file FILE"
        )


def _router_process(plan: ServingPlan, options: LaunchOptions) -> ProcessSpec:
    router = plan.router
    assert router is not None
    host = find_flag(router.flags, "host") or plan.nodes[router.node].host
    derived: dict[str, Any] = {
        "model": plan.model,
        "host": host,
        "port": router.port,
        "hub": _own_hub(plan),
        "policy": router.policy,
        "preset": router.preset,
        "routes": format_routes(plan.routes) if router.preset == "flow" and plan.routes else None,
        "node_secret_file": options.node_secret_file if crosses_machines(plan) else None,
        "slo_ttft": plan.slo.ttft,
        "slo_tpot": plan.slo.tpot,
    }
    path = "router.flags"
    render_flags(ROUTER_CONFIGS, router.flags, path, DERIVED_ROUTER_FIELDS)
    flags = derived | {key.replace("-", "_"): value for key, value in router.flags.items()}
    flags["hub"] = _own_hub(plan)
    return ProcessSpec(
        ROUTER_NAME,
        "gllm.commands.router",
        render_flags(ROUTER_CONFIGS, flags, path),
        _make_url(host, router.port, flags),
        shutdown_seconds=_shutdown_seconds(flags),
    )


def _engine_process(plan: ServingPlan, name: str, node: str, options: LaunchOptions) -> ProcessSpec:
    engine = plan.engines[name]
    path = f"engines.{name}"
    rank = engine.nodes.index(node)
    ports = engine_ports(plan, name, node)
    # Requests reach an engine by the router; without one, by its head.
    is_entry = plan.router is None and rank == 0
    folder = options.step_log_folder
    host = plan.nodes[node].host
    derived: dict[str, Any] = {
        "model": plan.model,
        "host": host if is_entry or is_loopback(host) else LOOPBACK,
        "port": ports.api,
        "pipeline_parallel_size": len(engine.stages),
        "tensor_parallel_size": [stage.num_ranks for stage in engine.stages],
        "layers": [stage.layers for stage in engine.stages],
        **_node_flags(plan, name, node),
        **_device_flags(plan, engine, node, options),
        **_router_flags(plan, name, engine),
        **_transfer_flags(plan, name, node),
        "slo_ttft": plan.slo.ttft if is_entry else None,
        "slo_tpot": plan.slo.tpot if is_entry else None,
        # The driver writes the log, on the first node.
        "step_log": f"{folder}/{name}.jsonl" if folder is not None and rank == 0 else None,
        "node_secret_file": options.node_secret_file if crosses_machines(plan) else None,
    }
    render_flags(ENGINE_CONFIGS, engine.flags, f"{path}.flags", DERIVED_ENGINE_FIELDS)
    flags = derived | {key.replace("-", "_"): value for key, value in engine.flags.items()}
    arguments = render_flags(ENGINE_CONFIGS, flags, f"{path}.flags")
    arguments += render_flags(SCHEDULER_CONFIGS, engine.scheduler, f"{path}.scheduler")
    return ProcessSpec(
        name,
        "gllm.serve",
        arguments,
        _make_url(str(flags["host"]), ports.api, flags),
        _visible_devices(engine, node),
        _shutdown_seconds(flags),
        rank,
    )


def _node_flags(plan: ServingPlan, name: str, node: str) -> dict[str, Any]:
    """Return the place of a node in an engine of several; none for an engine of one node."""
    engine = plan.engines[name]
    nodes = engine.nodes
    head_port = engine_ports(plan, name, nodes[0]).control
    if len(nodes) == 1:
        return {}
    return {
        "nnodes": len(nodes),
        "stages_per_node": [len(engine.stages_of(other)) for other in nodes],
        "node_rank": nodes.index(node),
        "master_addr": format_host_port(plan.nodes[nodes[0]].host, head_port),
        "node_name": node,
        "data_port": engine_ports(plan, name, node).data,
    }


def _device_flags(
    plan: ServingPlan, engine: EnginePlan, node: str, options: LaunchOptions
) -> dict[str, Any]:
    """Return the device of the workers on a node, and their threads on its CPU."""
    if is_emulated_engine(engine):
        return {"threads": 1}
    if engine.stages_of(node)[0].devices:
        return {"device": "cuda"}
    num_workers = sum(
        not stage.devices for other in plan.engines.values() for stage in other.stages_of(node)
    )
    if options.num_cores is None:
        return {"device": "cpu"}
    return {"device": "cpu", "threads": max(1, options.num_cores // num_workers)}


def _router_flags(plan: ServingPlan, name: str, engine: EnginePlan) -> dict[str, Any]:
    """Return the attachment of an engine to the router of the plan."""
    flags: dict[str, Any] = {"name": name, "role": engine.role}
    if plan.router is None:
        return flags
    flags["router"] = router_hub(plan)
    if not any(find_flag(engine.scheduler, name) for name in ("policy", "preset")):
        flags["preset"] = plan.router.preset
    return flags


def _transfer_flags(plan: ServingPlan, name: str, node: str) -> dict[str, Any]:
    """Return how an engine's part on a node passes KV blocks on; nothing where it need not."""
    if not has_phases(plan) or name in explain_missing_transfers(plan):
        return {}
    flags: dict[str, Any] = {"kv_transfer": "auto"}
    if len({other for engine in plan.engines.values() for other in engine.nodes}) > 1:
        port = engine_ports(plan, name, node).kv
        flags["kv_transfer_address"] = format_host_port(plan.nodes[node].host, port)
    return flags


def has_phases(plan: ServingPlan) -> bool:
    """Return True if engines of the plan pass requests on after their prefill."""
    roles = {engine.role for engine in plan.engines.values()}
    return len(plan.engines) > 1 and bool(
        (plan.router and plan.router.preset) or roles != {"mixed"}
    )


def _visible_devices(engine: EnginePlan, node: str) -> dict[str, str]:
    """Return the variables that restrict an engine to its GPUs of a node, in the order of ranks."""
    devices = [device for stage in engine.stages_of(node) for device in stage.devices]
    if not devices or is_emulated_engine(engine):
        return {}
    return {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, devices)),
    }


def _make_url(host: str, port: int, flags: dict[str, Any]) -> str:
    scheme = "https" if flags.get("ssl_certfile") else "http"
    own = LOOPBACK if is_wildcard(host) else host
    return f"{scheme}://{format_host_port(own, port)}"


def _shutdown_seconds(flags: dict[str, Any]) -> float:
    return float(flags.get("shutdown_timeout") or ServerConfig.shutdown_timeout)
