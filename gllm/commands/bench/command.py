"""`gllm bench NAME`: measure a server over HTTP, or an engine in this process."""

import importlib
import sys

BENCHMARKS = {
    "serve": "send load to an OpenAI-compatible server over HTTP",
    "sessions": "agents that return after pauses: tokens recomputed, TTFT of later turns",
    "throughput": "offline throughput of an engine in this process",
    "latency": "latency of one batch on an engine in this process",
}
"""Descriptions by name; the name is also the module in gllm.commands.bench."""


def main(argv: list[str]) -> int:
    """Run `gllm bench NAME`, the benchmark that the first argument names.

    Without arguments the help text is printed.

    Returns:
        The exit status of the benchmark; 2 for an unknown name.
    """
    lines = (f"  {name:12}{text}" for name, text in BENCHMARKS.items())
    usage = "\n".join(["usage: gllm bench NAME [ARGUMENTS]", "", *lines])
    name = argv[0] if argv else "--help"
    if name in ("-h", "--help"):
        print(usage)
        return 0
    if name not in BENCHMARKS:
        print(f"gllm bench: unknown benchmark {name!r}\n\n{usage}", file=sys.stderr)
        return 2
    return int(importlib.import_module(f"gllm.commands.bench.{name}").main(argv[1:]))
