"""The console script `gllm` and its sub-commands.

Owns the table of commands. Knows nothing of what they do: each is imported when it is called.
"""

import importlib
import os
import sys

from gllm import __version__

COMMANDS = {
    "serve": ("gllm.serve:main", "serve a model over HTTP"),
    "profile": ("gllm.experiments.profile:main", "measure a model on this machine"),
    "simulate": (
        "gllm.commands.simulate:main",
        "predict a deployment from a profile or a data sheet",
    ),
    "experiment": ("gllm.commands.experiment:main", "run a named experiment and write its page"),
    "bench": ("gllm.commands.bench.command:main", "measure a server over HTTP, or an engine"),
    "top": ("gllm.commands.top.command:main", "watch a running server in the terminal"),
    "chat": ("gllm.commands.chat:main", "talk to a running server in the terminal"),
}


def usage() -> str:
    """The help text."""
    lines = [f"  {name:12}{text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(["usage: gllm COMMAND [ARGUMENTS]", "", *lines])


def main(argv: list[str] | None = None) -> int:
    """Run the command that the arguments name; its own arguments follow."""
    arguments = sys.argv[1:] if argv is None else argv
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help"):
        print(usage())
        return 0
    if name in ("-V", "--version"):
        print(__version__)
        return 0
    if name not in COMMANDS:
        print(f"gllm: no command {name!r}\n\n{usage()}", file=sys.stderr)
        return 2
    module, function = COMMANDS[name][0].split(":")
    command = importlib.import_module(module).__dict__[function]
    try:
        return int(command(arguments[1:]))
    except KeyboardInterrupt:
        print(f"gllm {name}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader has enough; nothing is left to be flushed at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(main())
