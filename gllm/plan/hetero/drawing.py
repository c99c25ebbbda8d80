"""Plans as text: a table of the replicas, the placement on the machines, and the routes."""

from gllm.plan.hetero.planner import HeteroPlan
from gllm.plan.hetero.replicas import Phase
from gllm.plan.hetero.serving import engine_names, named_routes
from gllm.sim.metrics.report import format_table


def replica_table(plan: HeteroPlan) -> str:
    """Return a row for each replica: devices, parallelism, layers, capacity and flow."""
    best, cluster = plan.best, plan.problem.cluster
    sides = {
        Phase.PREFILL: (best.prefill, best.flow.prefill),
        Phase.DECODE: (best.decode, best.flow.decode),
    }
    rows = []
    for (phase, index), name in engine_names(best).items():
        replicas, flows = sides[phase]
        replica = replicas[index]
        rows.append(
            [
                name,
                str(phase),
                cluster.describe(replica.group),
                replica.degrees,
                ",".join(str(stage.layers) for stage in replica.stages),
                f"{replica.latency:.3g}",
                "-" if phase is Phase.PREFILL else str(replica.batch),
                f"{replica.capacity:.3g}",
                f"{flows[index]:.3g}",
                f"{flows[index] / replica.capacity:.0%}",
            ]
        )
    header = [
        "engine", "phase", "devices", "parallelism", "layers", "latency s", "batch", "capacity /s",
        "flow /s", "used",
    ]  # fmt: skip
    return format_table(header, rows)


def draw_placement(plan: HeteroPlan) -> str:
    """Return a line for each machine: the engine and stage on each of its devices."""
    best, cluster = plan.best, plan.problem.cluster
    cells: list[list[str]] = [[] for _ in cluster.machines]
    sides = {Phase.PREFILL: best.prefill, Phase.DECODE: best.decode}
    for (phase, index), name in engine_names(best).items():
        for number, stage in enumerate(sides[phase][index].stages):
            for place in stage.devices:
                cells[place].append(f"{name}.{number}")
    width = max((len(cell) for row in cells for cell in row), default=0)
    name_width = max(len(machine.name) for machine in cluster.machines)
    lines = []
    for machine, row in zip(cluster.machines, cells, strict=True):
        row += ["idle"] * (machine.num_devices - len(row))
        boxes = " ".join(f"[{cell:^{max(width, 4)}}]" for cell in row)
        lines.append(f"{machine.name:{name_width}}  {machine.device:9} {boxes}")
    return "\n".join(lines)


def draw_routes(plan: HeteroPlan) -> str:
    """Return a line for each prefill engine: the share of each decode engine."""
    lines = []
    for source, targets in named_routes(plan.best).items():
        total = sum(targets.values())
        shares = ", ".join(f"{name} {flow / total:.0%}" for name, flow in targets.items())
        lines.append(f"{source} {total:.3g}/s -> {shares}")
    return "\n".join(lines)


def describe_hetero_search(plan: HeteroPlan) -> str:
    """Return how the plan was found, and what the search left out."""
    search = plan.search
    text = (
        f"first partition {search.first.score.flow:.3g}/s, best {search.best.score.flow:.3g}/s "
        f"after {search.num_evaluations} partitions ({search.num_flows} maximum flows, "
        f"{search.num_kicks} restarts)"
    )
    if search.is_complete:
        text += "; no single change improves the first local optimum. "
    else:
        text += "; the budget ended before every change of the first local optimum was tried. "
    return text + (
        "Left out: groups whose ranks span machines, unequal shares of layers beside those by "
        "memory, and partitions beyond the restarts."
    )
