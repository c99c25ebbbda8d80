"""`gllm plan NAME`: find machines, parallelism and routes for a model and a workload."""

import importlib
import sys

PLANNERS: dict[str, str] = {
    "goodput": "engines of prefill and of decode with the highest goodput per GPU",
    "pools": "prompt and token machines for a budget of power or cost, or for a rate",
    "capacity": "highest request rate of a configuration within latency limits",
    "search": "devices, parallelism, policy and batch size that serve a workload best",
    "scale": "GPUs per engine, and engines by request rate, within an SLO (Aladdin)",
    "hetero": "prefill and decode replicas on unlike devices (HexGen-2)",
}
"""Descriptions by name; the name is also the module in gllm.commands.plan."""

REPORTS = {"diff": "compare what a plan expects with the step logs of its engines"}
"""The same for commands that read plans."""


def usage() -> str:
    """Return the help text."""
    lines = [f"  {name:12}{text}" for name, text in {**PLANNERS, **REPORTS}.items()]
    end = "`gllm plan NAME --help` lists the arguments of a planner."
    return "\n".join(["usage: gllm plan NAME [ARGUMENTS]", "", *lines, "", end])


def main(argv: list[str]) -> int:
    """Run a planner and return its exit status."""
    name = argv[0] if argv else "--help"
    if name in ("-h", "--help"):
        print(usage())
        return 0
    if name not in PLANNERS and name not in REPORTS:
        print(f"gllm plan: unknown planner {name!r}\n\n{usage()}", file=sys.stderr)
        return 2
    module = importlib.import_module(f"gllm.commands.plan.{name}")
    return int(module.main(argv[1:]))
