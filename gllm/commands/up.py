"""`gllm up plan.yaml`: start this machine's share of a plan; the same line on every machine.

Exit status: 0 after SIGTERM or SIGINT, 1 if a process failed, 2 for a plan that cannot be served.
"""

import argparse
import asyncio
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TextIO

import msgspec

from gllm.observability.logs import LogConfig, configure_logging
from gllm.options.flags import FlagParser, FlagType, input_file, number_type, output_folder
from gllm.plan.emit.registry import EMITTERS, IMAGE, EmitOptions, emit_manifests
from gllm.plan.emulated_plan import NODE as EMULATED_NODE
from gllm.plan.emulated_plan import choose_max_model_len, emulate_plan, pin_emulated_ports
from gllm.plan.processes import (
    LaunchOptions,
    ProcessSpec,
    check_configurations,
    commands_for,
    find_simulated_only,
    router_api_key,
    router_certificate,
    router_url,
    scaling_router_url,
)
from gllm.plan.search_command import check_replannable, with_shift_detection
from gllm.plan.serving_plan import PlanError, ServingPlan, read_plan

if TYPE_CHECKING:
    from gllm.deploy.lifecycle import RunningProcess
    from gllm.deploy.up.engine_manager import EngineManager
    from gllm.deploy.up.engine_scaler import EngineScaler
    from gllm.deploy.up.replanner import Replanner

TITLE = "gllm-up"


class PlanShare(NamedTuple):
    """Part of a plan that this machine starts."""

    plan: ServingPlan
    """Plan of the file."""
    nodes: Sequence[str]
    """Its nodes that are this machine."""
    emulate: Callable[[ServingPlan], ServingPlan] | None
    """Returns the emulated form of the plan, or of a later one; None for real devices."""

    @property
    def started(self) -> ServingPlan:
        """Plan whose processes are started."""
        return self.plan if self.emulate is None else self.emulate(self.plan)

    def make_specs(self, options: LaunchOptions, plan: ServingPlan) -> list[ProcessSpec]:
        """Return this machine's processes of the plan or of a later one. Raises PlanError."""
        if self.emulate is not None:
            return commands_for(self.emulate(plan), EMULATED_NODE, options)
        return commands_for(plan, self.nodes[0], options)


def make_parser() -> argparse.ArgumentParser:
    """Return the argument parser of `gllm up`."""
    parser = FlagParser(
        prog="gllm up",
        description="Start this machine's share of a plan: its router and its engines.",
    )
    parser.add_argument("plan", type=Path, help="plan.yaml of a planner of `gllm plan`, or yours")
    parser.add_argument(
        "--node", help="name of this machine in the plan; default: the one whose host it is"
    )
    parser.add_argument(
        "--model",
        help="folder or hub name of the model, where the plan has the name of a shape of the "
        "simulator; default: that of the plan",
    )
    parser.add_argument(
        "--emulate",
        action="store_true",
        help="start all machines of the plan on this one, with emulated devices that take the "
        "times of the simulator",
    )
    parser.add_argument(
        "--node-secret-file",
        type=FlagType(input_file),
        help="file of `gllm node --new-secret`, the same on all machines",
    )
    parser.add_argument(
        "--on",
        choices=("local", "ray"),
        default="local",
        help="local: this machine's share; ray: all processes, on machines of a Ray cluster to "
        "which this one belongs (default local)",
    )
    parser.add_argument(
        "--ray-address",
        help="address of the Ray cluster; default: RAY_ADDRESS, or the cluster of this machine",
    )
    parser.add_argument(
        "--step-logs",
        type=FlagType(output_folder),
        metavar="FOLDER",
        help="folder for the step log of each engine, ENGINE.jsonl, which `gllm plan diff` reads; "
        "it is made on this machine if it is missing",
    )
    parser.add_argument(
        "--replan",
        action="store_true",
        help="make the plan again by its own command when lengths or rate of the requests have "
        "shifted for good, and apply it to the running engines of the router's machine",
    )
    parser.add_argument(
        "--replan-budget",
        metavar="SECONDS",
        type=number_type(float, gt=0, le=1e6),
        default=600.0,
        help="time of such a search (default 600)",
    )
    parser.add_argument(
        "--emit",
        nargs=2,
        metavar=("MANAGER", "FOLDER"),
        help="write manifests for a cluster manager instead: "
        + "; ".join(f"{name} ({text})" for name, text in EMITTERS.items()),
    )
    parser.add_argument("--image", default=IMAGE, help=f"container image (default {IMAGE})")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the commands instead of running them"
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Start the router and the engines of a serving plan, and run them until a signal or a failure.

    With `--dry-run` or `--emit` it prints or writes commands or manifests instead.

    Returns:
        The exit status: 1 after a failure of a process, 2 for an invalid plan.
    """
    arguments = make_parser().parse_args(argv)
    configure_logging(LogConfig("info", "text"))
    try:
        plan = read_plan(arguments.plan)
        if arguments.model:
            plan = msgspec.structs.replace(plan, model=arguments.model)
        if arguments.replan:
            if arguments.emit or arguments.on == "ray":
                raise PlanError("--replan: only `gllm up` of this machine replans: remove it")
            check_replannable(plan)
            plan = with_shift_detection(plan)
        share = _emulated_share(plan, arguments) if arguments.emulate else PlanShare(plan, (), None)
        check_configurations(share.started)
        if reason := find_simulated_only(share.started):
            print(f"gllm up: this plan is simulated only: {reason}", file=sys.stderr, flush=True)
        if arguments.emit:
            return _emit(plan, arguments)
        if arguments.on == "ray":
            return _run_on_ray(plan, arguments)
        if not arguments.emulate:
            share = share._replace(nodes=[arguments.node or find_own_node(plan)])
        specs = share.make_specs(_launch_options(arguments), share.plan)
        if not specs:
            raise PlanError(
                f"nodes.{share.nodes[0]}: no router and no engine of the plan runs on it"
            )
    except (PlanError, OSError) as error:
        print(f"gllm up: {error}", file=sys.stderr)
        return 2
    if arguments.dry_run:
        print("\n".join(format_command(spec) for spec in specs))
        return 0
    if arguments.step_logs:
        try:
            Path(arguments.step_logs).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            print(f"gllm up: --step-logs: {error}", file=sys.stderr)
            return 2
    # Imported late: --dry-run and --emit need none of it.
    from gllm.deploy.logged_process import LocalProcess

    return _run(share, specs, partial(LocalProcess, on_line=_print_line), arguments)


def _emulated_share(plan: ServingPlan, arguments: argparse.Namespace) -> PlanShare:
    """Return the whole plan for emulated devices, after checking the flags. Raises PlanError."""
    for flag, is_set in (
        ("--node", arguments.node),
        ("--on ray", arguments.on == "ray"),
        ("--emit", arguments.emit),
    ):
        if is_set:
            raise PlanError(f"{flag}: --emulate starts the whole plan on this machine: remove it")
    # Ports and the longest sequence are those of all later plans, because the router keeps them.
    plan = pin_emulated_ports(plan)
    emulate = partial(emulate_plan, max_model_len=choose_max_model_len(plan))
    return PlanShare(plan, list(plan.nodes), emulate)


def find_own_node(plan: ServingPlan) -> str:
    """Return the plan's node whose address is one of this machine.

    Raises:
        PlanError: no node has an address of this machine, or several have.
    """
    # Imported late: --dry-run with --node needs none of it.
    from gllm.runtime.node.machine import is_own_address

    own = []
    for name, node in plan.nodes.items():
        try:
            if is_own_address(node.host):
                own.append(name)
        except OSError:
            # The name of another machine may be unknown here.
            continue
    if len(own) == 1:
        return own[0]
    names = ", ".join(own or plan.nodes)
    cause = "several have an address of this machine" if own else "none has an address of it"
    raise PlanError(f"nodes: the node of this machine is not known, {cause}: pass --node: {names}")


def format_command(spec: ProcessSpec) -> str:
    """Return the shell command line of a process of a plan, with its environment variables."""
    variables = [f"{name}={value}" for name, value in spec.environment.items()]
    words = ["gllm", spec.command, *spec.arguments]
    return shlex.join([*(["env", *variables] if variables else []), *words])


def _launch_options(arguments: argparse.Namespace) -> LaunchOptions:
    from gllm.runtime.worker.device import count_cores

    return LaunchOptions(arguments.node_secret_file, count_cores(), arguments.step_logs)


def _emit(plan: ServingPlan, arguments: argparse.Namespace) -> int:
    """Write the manifests of a plan. Raises PlanError or OSError."""
    manager, folder = arguments.emit
    secret = arguments.node_secret_file or EmitOptions.node_secret_file
    files = emit_manifests(manager, plan, EmitOptions(arguments.image, secret))
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        path = Path(folder, name)
        path.write_text(text, encoding="utf-8")
        if text.startswith("#!"):
            path.chmod(0o755)
        print(path)
    return 0


def _run_on_ray(plan: ServingPlan, arguments: argparse.Namespace) -> int:
    """Run all processes of a plan in a Ray cluster. Raises PlanError."""
    from gllm.deploy.ray.plan_processes import RayPlan
    from gllm.deploy.ray.ray_cluster import LaunchError, RayCluster, import_ray

    # Ray writes to standard output, which is for the URL.
    output = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    options = LaunchOptions(arguments.node_secret_file, None, arguments.step_logs)
    try:
        cluster = RayCluster(import_ray("--on ray"))
        try:
            cluster.connect(arguments.ray_address)
            placed = RayPlan(plan, options, cluster)
            share = PlanShare(plan, (), None)
            return _run(share, placed.specs, placed.launch, arguments, output)
        finally:
            cluster.close()
    except LaunchError as error:
        print(f"gllm up: {error}", file=sys.stderr)
        return 1


def _run(
    share: PlanShare,
    specs: Sequence[ProcessSpec],
    launch: Callable[[ProcessSpec], "RunningProcess"],
    arguments: argparse.Namespace,
    output: TextIO = sys.stdout,
) -> int:
    """Run processes of a plan until a signal, a failure or their end; return the exit status."""
    import setproctitle

    from gllm.deploy.up.engine_manager import EngineManager

    setproctitle.setproctitle(TITLE)

    async def run() -> int:
        is_scaled = bool(scaling_router_url(share.started))
        manager = EngineManager(specs, launch, partial(_print_urls, output), is_scaled)
        follower = _make_follower(manager, specs, share, arguments)
        following = asyncio.create_task(follower.run()) if follower else None
        status = await manager.run()
        if following:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        if manager.cause:
            print(f"gllm up: {manager.cause}", file=sys.stderr)
        return status

    return asyncio.run(run())


def _make_follower(
    manager: "EngineManager",
    specs: Sequence[ProcessSpec],
    share: PlanShare,
    arguments: argparse.Namespace,
) -> "EngineScaler | Replanner | None":
    """Return the loop that starts and ends engines as the router's load wants; None without."""
    from gllm.deploy.server_client import ServerClient
    from gllm.deploy.up.engine_scaler import EngineScaler
    from gllm.deploy.up.replanner import PlanSearch, Replanner

    plan = share.started
    if plan.router is None:
        return None
    # In Ray the router is not on its host of the plan.
    own_url = next((spec.url for spec in specs if spec.is_router), "")
    router = ServerClient(
        own_url or router_url(plan),
        router_api_key(plan),
        5.0,
        is_own=True,
        certificate=router_certificate(plan),
    )
    if scaling_router_url(plan):
        own = [spec.name for spec in specs if not spec.is_router]
        return EngineScaler(manager, router, list(plan.engines), own)
    # The machine of the router plans for all.
    if arguments.replan and own_url:
        make_specs = partial(share.make_specs, _launch_options(arguments))
        search = PlanSearch(share.plan, arguments.plan, arguments.replan_budget, _print_line)
        return Replanner(manager, router, share.plan, share.nodes, make_specs, search)
    return None


def _print_line(name: str, line: str) -> None:
    print(f"{name} | {line}", file=sys.stderr, flush=True)


def _print_urls(output: TextIO, specs: list[ProcessSpec]) -> None:
    entries = [spec for spec in specs if spec.is_router]
    entries = entries or [spec for spec in specs if spec.node_rank == 0]
    for spec in entries:
        print(f"gllm up: {spec.title} is ready at {spec.url}", file=output, flush=True)
    if not entries:
        print("gllm up: this machine is ready", file=output, flush=True)


if __name__ == "__main__":
    sys.exit(main())
