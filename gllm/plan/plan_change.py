"""Change of a running service from one plan to another: engines that stay, start, stop, or flip.

Engines of one design are equal whatever their names, ports and devices of one kind are, so as many
as possible stay. Pure: `gllm.deploy.up.replanner` applies a change.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from gllm.plan.processes import router_hub, transfer_flag_names
from gllm.plan.serving_plan import (
    NUM_ENGINE_PORTS,
    EnginePlan,
    PlanError,
    ServingPlan,
    StagePlan,
    check_plan,
)

FLOW_PRESET = "flow"
"""Preset of a router whose routes are fixed when it starts."""


class StartEngine(NamedTuple):
    """Step of a plan change: start an engine and wait until it is ready."""

    name: str


class StopEngine(NamedTuple):
    """Step of a plan change: drain an engine's requests, stop it and wait until it has ended."""

    name: str


class ChangeRole(NamedTuple):
    """Step of a plan change: switch a running engine to prefill, decode or both."""

    name: str
    role: str


ChangeAction = StartEngine | StopEngine | ChangeRole


class PlanChange(NamedTuple):
    """New plan of a running service, and the ordered steps from the old plan to it."""

    plan: ServingPlan
    """New plan with explicit ports; engines that keep running have their old names and ports."""
    actions: tuple[ChangeAction, ...]


def pin_ports(plan: ServingPlan) -> ServingPlan:
    """Return a copy of a plan in which every engine has an explicit port."""
    engines = {
        name: msgspec.structs.replace(engine, port=plan.first_port(name, engine.nodes[0]))
        for name, engine in plan.engines.items()
    }
    return msgspec.structs.replace(plan, engines=engines)


def adopt_plan(running: ServingPlan, new: ServingPlan) -> ServingPlan:
    """Return the plan of a running service with its engines and routes replaced by a new plan's.

    Model, nodes, router and latency goals are those of the running plan. So are flags that all
    running engines share, unless the new plan sets them.

    Args:
        running: Plan of the running service.
        new: Plan for the same service that a planner has made.

    Raises:
        PlanError: The running router or the nodes cannot serve the new engines.
    """
    if running.router is None:
        raise PlanError("router: none: engines of a service without a router cannot change")
    preset = new.router.preset if new.router else None
    if preset != running.router.preset or preset == FLOW_PRESET:
        raise PlanError(
            f"router.preset: {preset}: preset and flows of a router are fixed when it starts, and "
            f"the running one has {running.router.preset}: start the new plan with `gllm up`"
        )
    for name, engine in new.engines.items():
        for stage in engine.stages:
            _check_stage(running, new, name, stage)
    shared = _shared_flags(running)
    engines = {}
    for name, engine in new.engines.items():
        own = {key.replace("-", "_") for key in engine.flags}
        kept = {key: value for key, value in shared.items() if key.replace("-", "_") not in own}
        engines[name] = msgspec.structs.replace(engine, flags=kept | engine.flags)
    return msgspec.structs.replace(
        running,
        engines=engines,
        routes=new.routes,
        workload=new.workload,
        expected=new.expected,
    )


def change_plan(old: ServingPlan, new: ServingPlan) -> PlanChange:
    """Return the engine starts, stops and role changes that turn a running plan into a new one.

    Engines with equal stages and options keep running, even if their names, ports, roles or devices
    of the same kind differ.

    Args:
        old: Plan of the running service.
        new: Plan to change to; its names, ports and devices are adapted to the engines that keep
            running.

    Raises:
        PlanError: The new plan is invalid.
    """
    old = pin_ports(old)
    match = _EngineMatch(old, new)
    names, engines = match.match()
    routes = {
        names[source]: {names[target]: share for target, share in shares.items()}
        for source, shares in new.routes.items()
    }
    plan = msgspec.structs.replace(new, engines=engines, routes=routes)
    check_plan(plan)
    return PlanChange(plan, tuple(match.actions(engines)))


def undo_actions(done: Sequence[ChangeAction], old: ServingPlan) -> list[ChangeAction]:
    """Return the steps that undo those steps of a plan change that were already made.

    Args:
        done: Steps that were made, in order.
        old: Plan before the change, with explicit ports and names.
    """
    undoing: list[ChangeAction] = []
    for action in reversed(done):
        match action:
            case StartEngine(name):
                undoing.append(StopEngine(name))
            case StopEngine(name):
                undoing.append(StartEngine(name))
            case ChangeRole(name):
                undoing.append(ChangeRole(name, old.engines[name].role))
    return undoing


def _check_stage(running: ServingPlan, new: ServingPlan, name: str, stage: StagePlan) -> None:
    """Raise PlanError if a stage needs a node or devices that the running service lacks."""
    node = running.nodes.get(stage.node)
    own = new.nodes[stage.node].devices
    fits = node is not None and all(
        device < len(node.devices) and node.devices[device] == own[device]
        for device in stage.devices
    )
    if not fits:
        devices = ", ".join(own[device] for device in stage.devices) or "its CPU"
        raise PlanError(
            f"engines.{name}.stages: {devices} of node {stage.node}: the running service has no "
            "such node or devices: start the new plan with `gllm up`"
        )


def _shared_flags(plan: ServingPlan) -> dict[str, object]:
    """Return the flags that all engines have with equal values."""
    first, *others = (engine.flags for engine in plan.engines.values())
    return {
        key: value
        for key, value in first.items()
        if all(key in flags and flags[key] == value for flags in others)
    }


class _EngineMatch:
    """Engines of a running service, and those that are to run.

    Args:
        old: The running service, with ports.
        wanted: The same service with its new engines.
    """

    def __init__(self, old: ServingPlan, wanted: ServingPlan) -> None:
        self._old = old
        self._wanted = wanted
        self._kept: dict[str, str] = {}
        """Name in the new plan of each engine that stays, by its name."""
        self._restarted: dict[str, str] = {}
        """The same for engines that get other options on their devices."""

    def match(self) -> tuple[dict[str, str], dict[str, EnginePlan]]:
        """Return the name of each engine of the new plan, and all engines by these names."""
        # First those whose role need not change.
        self._pair(_design, self._kept)
        self._pair(_flippable_design, self._kept)
        self._pair(_shape, self._restarted)
        staying = self._kept | self._restarted
        names = {new: name for name, new in staying.items()}
        engines = {
            name: msgspec.structs.replace(
                self._wanted.engines[new],
                stages=self._old.engines[name].stages,
                port=self._old.engines[name].port,
            )
            for name, new in staying.items()
        }
        order = [name for name in self._old.engines if name in engines]
        engines = {name: engines[name] for name in order}
        devices = _DevicePool(self._old, staying)
        ports = _PortPool(self._old)
        for new, engine in self._wanted.engines.items():
            if new not in names:
                name = names[new] = _find_free_name(new, {*self._old.engines, *engines})
                stages = [devices.place(stage) for stage in engine.stages]
                port = ports.claim(len(engine.nodes), engine.port)
                engines[name] = msgspec.structs.replace(engine, stages=stages, port=port)
        return names, engines

    def actions(self, engines: dict[str, EnginePlan]) -> Iterator[ChangeAction]:
        """Yield the actions of the change.

        An engine stops only where a new one needs its devices or its name, until all new ones run.
        """
        leaving = {
            name: engine
            for name, engine in self._old.engines.items()
            if name not in self._kept and name not in self._restarted
        }
        added = {name: engine for name, engine in engines.items() if name not in self._old.engines}
        in_way = {
            name: [other for other in leaving if _share_devices(engine, leaving[other])]
            for name, engine in added.items()
        }
        yield from (StartEngine(name) for name in added if not in_way[name])
        for name in self._kept:
            if engines[name].role != self._old.engines[name].role:
                yield ChangeRole(name, engines[name].role)
        for name in self._restarted:
            yield from (StopEngine(name), StartEngine(name))
        for name in sorted((name for name in added if in_way[name]), key=lambda n: len(in_way[n])):
            for other in in_way[name]:
                if leaving.pop(other, None) is not None:
                    yield StopEngine(other)
            yield StartEngine(name)
        yield from (StopEngine(name) for name in leaving)

    def _pair(self, key: Callable[[ServingPlan, str], object], pairs: dict[str, str]) -> None:
        """Pair running and new engines with equal keys, as far as they have no partner."""
        has_partner = {*self._kept.values(), *self._restarted.values()}
        free = [name for name in self._wanted.engines if name not in has_partner]
        for name in self._old.engines:
            if name in self._kept or name in self._restarted:
                continue
            equal = (new for new in free if key(self._wanted, new) == key(self._old, name))
            if (new := next(equal, None)) is not None:
                free.remove(new)
                pairs[name] = new


def _shape(plan: ServingPlan, name: str) -> object:
    """Return the stages of an engine with the kinds of their devices."""
    return [
        (
            stage.node,
            stage.layers,
            [plan.nodes[stage.node].devices[device] for device in stage.devices],
        )
        for stage in plan.engines[name].stages
    ]


def _flippable_design(plan: ServingPlan, name: str) -> tuple[object, ...]:
    """Return what an engine cannot change while it runs; its role can change."""
    engine = plan.engines[name]
    flags = {key.replace("-", "_"): value for key, value in engine.flags.items()}
    return _shape(plan, name), engine.scheduler, flags, transfer_flag_names(plan, name)


def _design(plan: ServingPlan, name: str) -> tuple[object, ...]:
    return (*_flippable_design(plan, name), plan.engines[name].role)


def _share_devices(first: EnginePlan, second: EnginePlan) -> bool:
    def places(engine: EnginePlan) -> set[tuple[str, int]]:
        return {(stage.node, device) for stage in engine.stages for device in stage.devices}

    return not places(first).isdisjoint(places(second))


def _find_free_name(name: str, names: set[str]) -> str:
    number, free = 1, name
    while free in names:
        number += 1
        free = f"{name}-{number}"
    return free


class _DevicePool:
    """Devices that no engine keeps; those that no running engine has come first.

    Args:
        plan: The running service.
        staying: Its engines that keep their devices.
    """

    def __init__(self, plan: ServingPlan, staying: dict[str, str]) -> None:
        self._nodes = plan.nodes
        owners = {
            (stage.node, device): name
            for name, engine in plan.engines.items()
            for stage in engine.stages
            for device in stage.devices
        }
        every = [(name, i) for name, node in plan.nodes.items() for i in range(len(node.devices))]
        idle = [place for place in every if place not in owners]
        leaving = [place for place, owner in owners.items() if owner not in staying]
        self._free = idle + leaving

    def place(self, stage: StagePlan) -> StagePlan:
        """Return a stage on free devices of the kinds that it has."""
        kinds = self._nodes[stage.node].devices
        devices = []
        for device in stage.devices:
            free = next(
                free
                for node, free in self._free
                if node == stage.node and kinds[free] == kinds[device]
            )
            self._free.remove((stage.node, free))
            devices.append(free)
        return msgspec.structs.replace(stage, devices=devices)


class _PortPool:
    """Ports that no process of a running service has.

    Args:
        plan: The running service, with ports.
    """

    def __init__(self, plan: ServingPlan) -> None:
        assert plan.router is not None
        hub = router_hub(plan).rpartition(":")[2]
        self._used = {plan.router.port, *([int(hub)] if hub.isdigit() else [])}
        self._first = min(engine.port or 0 for engine in plan.engines.values())
        for engine in plan.engines.values():
            self._use(engine.port or 0, len(engine.nodes))

    def claim(self, num_nodes: int, wish: int | None) -> int:
        """Return the first port of a new engine: its wish if that is free, else the lowest one."""
        port = self._first if wish is None else wish
        if not self._is_free(port, num_nodes):
            port = self._first
        while not self._is_free(port, num_nodes):
            port += NUM_ENGINE_PORTS
        self._use(port, num_nodes)
        return port

    def _is_free(self, port: int, num_nodes: int) -> bool:
        return self._used.isdisjoint(range(port, port + NUM_ENGINE_PORTS * num_nodes))

    def _use(self, port: int, num_nodes: int) -> None:
        self._used.update(range(port, port + NUM_ENGINE_PORTS * num_nodes))
