"""`gllm up plan.yaml`: start this machine's share of a plan; the same line on every machine.

Exit status: 0 after SIGTERM or SIGINT, 1 if a process failed, 2 for a plan that cannot be served.
"""

import argparse
import asyncio
import shlex
import sys
from pathlib import Path

from gllm.config.flags import FlagParser, FlagType, input_file
from gllm.observability.logs import LogConfig, configure_logging
from gllm.plan.processes import (
    LaunchOptions,
    ProcessSpec,
    commands_for,
    explain_missing_transfers,
)
from gllm.plan.serving_plan import PlanError, ServingPlan, read_plan

TITLE = "gllm-up"


def make_parser() -> argparse.ArgumentParser:
    """Return the flags of the command."""
    parser = FlagParser(
        prog="gllm up",
        description="Start this machine's share of a plan: its router and its engines.",
    )
    parser.add_argument("plan", type=Path, help="plan.yaml of a planner of `gllm plan`, or yours")
    parser.add_argument(
        "--node", help="name of this machine in the plan; default: the one whose host it is"
    )
    parser.add_argument(
        "--node-secret-file",
        type=FlagType(input_file),
        help="file of `gllm node --new-secret`, the same on all machines",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the commands instead of running them"
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run `gllm up`; return the exit status."""
    arguments = make_parser().parse_args(argv)
    configure_logging(LogConfig("info", "text"))
    try:
        plan = read_plan(arguments.plan)
        node = arguments.node or find_own_node(plan)
        specs = commands_for(plan, node, _launch_options(arguments.node_secret_file))
        if not specs:
            raise PlanError(f"nodes.{node}: no router and no engine of the plan runs on it")
    except (PlanError, OSError) as error:
        print(f"gllm up: {error}", file=sys.stderr)
        return 2
    for engine, cause in explain_missing_transfers(plan).items():
        print(
            f"gllm up: engine {engine} passes no KV blocks on, because {cause}: prompts are "
            "computed again after their prefill",
            file=sys.stderr,
        )
    if arguments.dry_run:
        print("\n".join(format_command(spec) for spec in specs))
        return 0
    return _run(specs)


def find_own_node(plan: ServingPlan) -> str:
    """Return the name of the node whose host is this machine.

    Raises:
        PlanError: none is, or several are.
    """
    # Imported late: --dry-run with --node needs none of it.
    from gllm.runtime.machine import is_own_address

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
    """Return a process as a line for a shell."""
    variables = [f"{name}={value}" for name, value in spec.environment.items()]
    words = ["gllm", spec.command, *spec.arguments]
    return shlex.join([*(["env", *variables] if variables else []), *words])


def _launch_options(secret_file: str | None) -> LaunchOptions:
    from gllm.runtime.device import count_cores

    return LaunchOptions(secret_file, count_cores())


def _run(specs: list[ProcessSpec]) -> int:
    import setproctitle

    from gllm.launch.supervisor import ProcessSupervisor

    setproctitle.setproctitle(TITLE)

    async def run() -> int:
        supervisor = ProcessSupervisor(specs, _print_line, _print_urls)
        status = await supervisor.run()
        if supervisor.cause:
            print(f"gllm up: {supervisor.cause}", file=sys.stderr)
        return status

    return asyncio.run(run())


def _print_line(name: str, line: str) -> None:
    print(f"{name} | {line}", file=sys.stderr, flush=True)


def _print_urls(specs: list[ProcessSpec]) -> None:
    entries = [spec for spec in specs if spec.is_router]
    entries = entries or [spec for spec in specs if spec.node_rank == 0]
    for spec in entries:
        print(f"gllm up: {spec.title} is ready at {spec.url}", flush=True)
    if not entries:
        print("gllm up: this machine is ready", flush=True)


if __name__ == "__main__":
    sys.exit(main())
