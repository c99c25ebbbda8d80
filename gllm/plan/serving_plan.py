"""Plan of a service: machines, links, engines, router and expected figures, as `plan.yaml`.

Planners write plans, `gllm up` starts them. Every reader of the file checks it with `read_plan`.
"""

from pathlib import Path
from typing import Any

import msgspec

ROLES = ("mixed", "prefill", "decode")
"""Roles that an engine may begin with."""
PLAN_VERSION = 1
NUM_ENGINE_PORTS = 4
"""Ports of an engine on each of its nodes: API, control, activations, KV caches."""
FIRST_ENGINE_PORT = 29800
"""First port of the first engine; those of the others follow."""
ROUTER_NAME = "router"
"""Name of the router's process."""
ROUTER_HUB_PORT = 29700
"""Port at which engines attach to the router."""
MAX_PORT = 2**16 - 1


class PlanError(ValueError):
    """Error in a serving plan; the message names the field and the fix."""


class LinkPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Schema of a link between two machines or devices in a plan file, equal in both directions."""

    gbit: float
    """Rate in Gbit/s."""
    ms: float
    """One-way delay in milliseconds."""


class NodePlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Schema of a machine in a plan file: address, devices, link between them and price."""

    host: str
    """Address under which the other machines reach it."""
    devices: list[str] = []
    """Name of each accelerator, as in the simulator's table; empty: the machine's CPU serves."""
    price: float | None = None
    """US dollars per hour; None: unknown."""
    link: LinkPlan | None = None
    """Link between two of its devices; None: unknown. Only emulated devices use it."""


class StagePlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Schema of one pipeline stage of an engine in a plan file: machine, layers and devices."""

    node: str
    """Name of the machine."""
    layers: int
    """Number of the model's layers."""
    devices: list[int] = []
    """Index of each tensor-parallel rank's accelerator; empty: one rank on the CPU."""

    @property
    def num_ranks(self) -> int:
        """Degree of tensor parallelism."""
        return len(self.devices) or 1


class EnginePlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Schema of an engine in a plan file: pipeline stages, role, flags and port."""

    stages: list[StagePlan]
    role: str = "mixed"
    """prefill, decode, or mixed for both phases."""
    scheduler: dict[str, Any] = {}
    """Fields of SchedulerConfig that differ from their defaults."""
    flags: dict[str, Any] = {}
    """Further flags of `gllm serve`, by their names without dashes."""
    port: int | None = None
    """First of its ports, NUM_ENGINE_PORTS for each of its nodes in turn, so that nodes may be on
    one host; None: behind those of the engine before it."""

    @property
    def num_devices(self) -> int:
        """Number of ranks over all stages."""
        return sum(stage.num_ranks for stage in self.stages)

    @property
    def nodes(self) -> list[str]:
        """Names of the nodes of its stages, ordered by node rank; the first one has rank 0."""
        return list(dict.fromkeys(stage.node for stage in self.stages))

    def stages_of(self, node: str) -> list[StagePlan]:
        """Return the stages on a node, in their order."""
        return [stage for stage in self.stages if stage.node == node]


class RouterPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Schema of the router in a plan file: machine, port, routing policy and flags."""

    node: str
    """Name of the machine."""
    port: int = 8000
    """Port of the HTTP API."""
    policy: str = "predict"
    """Name of the routing policy."""
    preset: str | None = None
    """Name of a set of options from a paper, such as `flow`, that router and engines use."""
    flags: dict[str, Any] = {}
    """Further flags of `gllm router`, by their names without dashes."""


class LatencyGoals(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Latency limits of each request in a plan file: TTFT and TPOT in seconds; None: no limit."""

    ttft: float | None = None
    tpot: float | None = None


class ExpectedFigures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Performance that a planner predicts for a plan: rate, capacity, latencies, SLO attainment."""

    by: str
    """Command line of the planner."""
    rate: float
    """Requests per second that the plan is for."""
    capacity: float | None = None
    """Highest sustained request rate, requests per second."""
    attainment: float | None = None
    """Share of requests that meet the latency goals at `rate`, 0..1."""
    ttft_seconds: float | None = None
    """Median TTFT at `rate`."""
    tpot_seconds: float | None = None
    """Median TPOT at `rate`."""
    startup_seconds: float | None = None
    """Time from the start of an engine until it serves."""


class ServingPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Schema of a plan file for `gllm up`: model, machines, engines, router and latency goals.

    Nodes and engines are keyed by their names.
    """

    model: str
    nodes: dict[str, NodePlan]
    engines: dict[str, EnginePlan]
    version: int = PLAN_VERSION
    links: dict[str, LinkPlan] = {}
    """Network links by the names of two nodes joined by a dash, as in `a-b`."""
    router: RouterPlan | None = None
    routes: dict[str, dict[str, float]] = {}
    """Share of a prefill engine's requests that each decode engine gets; they sum up to 1."""
    slo: LatencyGoals = LatencyGoals()
    workload: str | None = None
    """Name of the workload for which the performance was predicted."""
    expected: ExpectedFigures | None = None
    simulated_only: str = ""
    """Reason why `gllm serve` cannot do all that was simulated, so that running engines do not
    reach the expected figures; empty if it can."""

    def first_port(self, engine: str, node: str) -> int:
        """Return the first port of an engine on one of its nodes.

        The ports are those of the API, control, activations and KV caches.
        """
        first = self.engines[engine].port
        if first is None:
            before = list(self.engines)[: list(self.engines).index(engine)]
            num_nodes = sum(len(self.engines[name].nodes) for name in before)
            first = FIRST_ENGINE_PORT + NUM_ENGINE_PORTS * num_nodes
        return first + NUM_ENGINE_PORTS * self.engines[engine].nodes.index(node)


def read_plan(path: Path) -> ServingPlan:
    """Read a YAML plan file and check it.

    Raises:
        PlanError: A field is unknown, has a wrong type or an invalid value.
        OSError: The file cannot be read.
    """
    try:
        plan = msgspec.yaml.decode(path.read_bytes(), type=ServingPlan)
    except msgspec.DecodeError as error:
        raise PlanError(f"{path}: {error}") from None
    check_plan(plan)
    return plan


def write_plan(plan: ServingPlan, path: Path) -> None:
    """Check a plan and write it to a YAML file. Raises PlanError or OSError."""
    check_plan(plan)
    path.write_bytes(msgspec.yaml.encode(plan))


def check_plan(plan: ServingPlan) -> None:
    """Check that the fields of a plan are consistent, so that `gllm up` can start it.

    Raises:
        PlanError: A field is invalid; the message names the field and the fix.
    """
    if plan.version != PLAN_VERSION:
        raise PlanError(f"version: {plan.version} is not {PLAN_VERSION}: write the plan anew")
    if not plan.engines:
        raise PlanError("engines: empty: add one at least")
    for name, engine in plan.engines.items():
        if plan.router and name == ROUTER_NAME:
            raise PlanError(
                f"engines.{name}: this is the name of the router's process: give the engine "
                "another name"
            )
        _check_engine(plan, name, engine)
    _check_devices(plan)
    _check_ports(plan)
    for name in plan.links:
        if not any(name == f"{a}-{b}" for a in plan.nodes for b in plan.nodes if a != b):
            raise PlanError(f"links.{name}: join the names of two nodes with a dash")
    if plan.router and plan.router.node not in plan.nodes:
        raise PlanError(f"router.node: {plan.router.node!r} is none of {', '.join(plan.nodes)}")
    for source, shares in plan.routes.items():
        _check_route(plan, source, shares)


def _check_engine(plan: ServingPlan, name: str, engine: EnginePlan) -> None:
    path = f"engines.{name}"
    if engine.role not in ROLES:
        raise PlanError(f"{path}.role: {engine.role!r} is none of {', '.join(ROLES)}")
    if not engine.stages:
        raise PlanError(f"{path}.stages: empty: add one at least")
    for index, stage in enumerate(engine.stages):
        where = f"{path}.stages[{index}]"
        if stage.node not in plan.nodes:
            raise PlanError(f"{where}.node: {stage.node!r} is none of {', '.join(plan.nodes)}")
        if stage.layers < 1:
            raise PlanError(f"{where}.layers: {stage.layers}: a stage has at least 1 layer")
        num_devices = len(plan.nodes[stage.node].devices)
        for device in stage.devices:
            if not 0 <= device < num_devices:
                raise PlanError(
                    f"{where}.devices: {device}: node {stage.node} has {num_devices} devices, "
                    "counted from 0"
                )

    for node in engine.nodes:
        own = engine.stages_of(node)
        first = engine.stages.index(own[0])
        if engine.stages[first : first + len(own)] != own:
            raise PlanError(
                f"{path}.stages: those on node {node} are no neighbours: put them next to each "
                "other, so that activations cross the network once"
            )
        if len({bool(stage.devices) for stage in own}) > 1:
            raise PlanError(
                f"{path}.stages: those on node {node} use its CPU and its devices: name devices "
                "for all of them, or for none"
            )


def _check_ports(plan: ServingPlan) -> None:
    """Raise PlanError if a port is out of range or two processes of a host share one."""
    owners: dict[tuple[str, int], str] = {}

    def claim(path: str, host: str, port: int) -> None:
        if not 0 < port <= MAX_PORT:
            raise PlanError(f"{path}: {port} is no port: choose one of 1 to {MAX_PORT}")
        owner = owners.setdefault((host, port), path)
        if owner != path:
            raise PlanError(f"{path}: {port} of {host} belongs to {owner}: choose another port")

    if plan.router and plan.router.node in plan.nodes:
        claim("router.port", plan.nodes[plan.router.node].host, plan.router.port)
    for name, engine in plan.engines.items():
        for node in engine.nodes:
            path = f"engines.{name}.port (node {node})"
            for number in range(NUM_ENGINE_PORTS):
                claim(path, plan.nodes[node].host, plan.first_port(name, node) + number)


def _check_devices(plan: ServingPlan) -> None:
    """Raise PlanError if two stages share an accelerator."""
    owners: dict[tuple[str, int], str] = {}
    for name, engine in plan.engines.items():
        for index, stage in enumerate(engine.stages):
            where = f"engines.{name}.stages[{index}]"
            for device in stage.devices:
                owner = owners.setdefault((stage.node, device), where)
                if owner != where or stage.devices.count(device) > 1:
                    raise PlanError(
                        f"{where}.devices: {device} of node {stage.node} belongs to {owner}: "
                        "give each rank a device of its own"
                    )


def _check_route(plan: ServingPlan, source: str, shares: dict[str, float]) -> None:
    unfit_roles = {source: "decode", **dict.fromkeys(shares, "prefill")}
    for engine, role in unfit_roles.items():
        if engine not in plan.engines or plan.engines[engine].role == role:
            raise PlanError(f"routes.{source}: {engine!r} is no engine with a role for it")
    if min(shares.values(), default=0) < 0 or abs(sum(shares.values()) - 1) > 1e-6:
        raise PlanError(f"routes.{source}: the shares must be at least 0 and sum up to 1")
