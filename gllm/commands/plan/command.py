"""`gllm plan NAME`: find machines, parallelism and routes for a model and a workload."""

from gllm.commands.sub_commands import run_sub_command

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
"""Descriptions of the commands that read plans, by name."""


def main(argv: list[str]) -> int:
    """Run a planner and return its exit status."""
    end = "`gllm plan NAME --help` lists the arguments of a planner."
    return run_sub_command("plan", "planner", {**PLANNERS, **REPORTS}, argv, end)
