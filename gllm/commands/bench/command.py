"""`gllm bench NAME`: measures a server over HTTP, or an engine in this process.

Owns the table of benchmarks. Knows nothing of what they do: each is imported when it is called.
"""

import importlib
import sys

BENCHMARKS = {
    "serve": "load any OpenAI-compatible server over HTTP",
    "throughput": "all requests at once through an engine in this process",
    "latency": "one batch, again and again, through an engine in this process",
}
"""By name, which is also the module of gllm.commands.bench: what it does."""


def usage() -> str:
    """The help text."""
    lines = [f"  {name:12}{text}" for name, text in BENCHMARKS.items()]
    return "\n".join(["usage: gllm bench NAME [ARGUMENTS]", "", *lines])


def main(argv: list[str]) -> int:
    """The command."""
    name = argv[0] if argv else "--help"
    if name in ("-h", "--help"):
        print(usage())
        return 0
    if name not in BENCHMARKS:
        print(f"gllm bench: no benchmark {name!r}\n\n{usage()}", file=sys.stderr)
        return 2
    module = importlib.import_module(f"gllm.commands.bench.{name}")
    return int(module.main(argv[1:]))
