"""`gllm bench NAME`: measure a server over HTTP, or an engine in this process."""

from gllm.commands.sub_commands import run_sub_command

BENCHMARKS = {
    "serve": "send load to an OpenAI-compatible server over HTTP",
    "throughput": "offline throughput of an engine in this process",
    "latency": "latency of one batch on an engine in this process",
}
"""Descriptions by name; the name is also the module in gllm.commands.bench."""


def main(argv: list[str]) -> int:
    """Run a benchmark and return its exit status."""
    return run_sub_command("bench", "benchmark", BENCHMARKS, argv)
