"""The console script `gllm` and its sub-commands.

A command is imported when it is called.
"""

import importlib
import os
import sys
from collections.abc import Mapping

from gllm.observability.streams import protect_standard_streams
from gllm.options.version import __version__

COMMANDS = {
    "serve": ("gllm.serve:main", "serve a model over HTTP"),
    "router": ("gllm.commands.router:main", "serve many engines over HTTP as if they were one"),
    "profile": ("gllm.commands.profile.entry:main", "measure a model on this machine"),
    "simulate": (
        "gllm.commands.simulate:main",
        "predict a deployment from a profile or a data sheet",
    ),
    "plan": ("gllm.commands.plan.command:main", "find machines, parallelism and routes"),
    "up": ("gllm.commands.up:main", "start this machine's share of a plan"),
    "bench": ("gllm.commands.bench.command:main", "measure a server over HTTP, or an engine"),
    "top": ("gllm.commands.top.command:main", "watch a running server in the terminal"),
    "chat": ("gllm.commands.chat:main", "talk to a running server in the terminal"),
    "node": (
        "gllm.commands.node:main",
        "join an engine on other machines; create and rotate the machines' secret",
    ),
    "nodes": ("gllm.commands.nodes:main", "list the machines of a running engine"),
    "drain": ("gllm.commands.drain:main", "take a machine out of a running engine"),
    "cluster": ("gllm.commands.cluster:main", "run services on machines that joined a cluster"),
    "doctor": ("gllm.commands.doctor:main", "find what keeps machines from forming an engine"),
}


def help_text() -> str:
    """Return the help text of `gllm`, with all sub-commands."""
    lines = [f"  {name:12}{text}" for name, (_, text) in COMMANDS.items()]
    end = "`gllm COMMAND --help` lists the arguments of a command."
    return "\n".join(["usage: gllm COMMAND [ARGUMENTS]", "", *lines, "", end])


def main(argv: list[str] | None = None, commands: Mapping[str, tuple[str, str]] = COMMANDS) -> int:
    """Run the sub-command of `gllm` that the first argument names; return its exit status.

    Args:
        argv: arguments; None for those of this process.
        commands: MODULE:FUNCTION and help text by name of the sub-command.
    """
    protect_standard_streams()
    try:
        try:
            return _run_command(sys.argv[1:] if argv is None else argv, commands)
        finally:
            # A pipe whose reader has gone is noticed here and not at the exit of the interpreter.
            sys.stdout.flush()
    except BrokenPipeError:
        # The reader closed the pipe; do not flush to it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run_command(arguments: list[str], commands: Mapping[str, tuple[str, str]]) -> int:
    """Run the sub-command; raises BrokenPipeError if nothing reads its output any more."""
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help"):
        print(help_text())
        return 0
    if name in ("-V", "--version"):
        print(__version__)
        return 0
    if name not in commands:
        print(f"gllm: no command {name!r}\n\n{help_text()}", file=sys.stderr)
        return 2
    module, function = commands[name][0].split(":")
    command = importlib.import_module(module).__dict__[function]
    try:
        return int(command(arguments[1:]))
    except KeyboardInterrupt:
        print(f"gllm {name}: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
