"""Commands such as `gllm bench` and `gllm plan`, whose first argument names a module."""

import importlib
import sys
from collections.abc import Mapping


def run_sub_command(
    command: str, kind: str, names: Mapping[str, str], argv: list[str], end: str = ""
) -> int:
    """Run the module that the first argument names, in the folder of the command.

    Args:
        command: Name of the command after `gllm`.
        kind: Word for a sub-command in the error about an unknown name.
        names: Descriptions by name, for the help text.
        argv: Arguments of the command; without any, the help text is printed.
        end: Last line of the help text.

    Returns:
        The exit status: 2 for an unknown name.
    """
    lines = [f"usage: gllm {command} NAME [ARGUMENTS]", ""]
    lines += (f"  {name:12}{text}" for name, text in names.items())
    usage = "\n".join([*lines, *(["", end] if end else [])])
    name = argv[0] if argv else "--help"
    if name in ("-h", "--help"):
        print(usage)
        return 0
    if name not in names:
        print(f"gllm {command}: unknown {kind} {name!r}\n\n{usage}", file=sys.stderr)
        return 2
    return int(importlib.import_module(f"gllm.commands.{command}.{name}").main(argv[1:]))
