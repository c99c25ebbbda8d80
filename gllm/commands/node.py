"""`gllm node`: join an engine or a cluster; create and rotate the machines' node secrets."""

import argparse
import sys
from pathlib import Path

from gllm.commands.server_command import report_failure
from gllm.config.join import JoinConfig
from gllm.observability.logs import LogConfig, configure_logging
from gllm.options.flags import FlagParser, add_flags, config_from_flags
from gllm.runtime.messaging.security import (
    SecretFileError,
    add_secret,
    create_secret_file,
    drop_secret,
)

_CREATED = (
    "Created {path}. Copy it to every machine of the fleet over a safe channel and start routers "
    "and engines with --node-secret-file. Who has the file is a full member of the fleet."
)
_ADDED = (
    "{path} has two secrets now: both are accepted, the first one is still in use. Copy the file "
    "to every machine of the fleet, then run `gllm node --drop-secret {path}` and copy it again."
)
_DROPPED = (
    "{path} has only its newer secret now. Copy it to every machine of the fleet: hubs use it "
    "within seconds, and peers connect again."
)


def make_parser() -> argparse.ArgumentParser:
    """Return the argument parser of `gllm node`."""
    parser = FlagParser(prog="gllm node", description=(__doc__ or "").splitlines()[0])
    actions = parser.add_mutually_exclusive_group(required=True)
    actions.add_argument(
        "--join",
        metavar="HOST:PORT",
        help="run workers of the engine whose head has this address (its --master-addr) until the "
        "engine ends, or services of the cluster whose master has it; the flags below are for that",
    )
    for flag, text in (
        ("--new-secret", "create a file with a random secret that only its owner can read"),
        ("--add-secret", "add a second secret to the file: the first step of a rotation"),
        ("--drop-secret", "remove the first of two secrets: the last step of a rotation"),
    ):
        actions.add_argument(flag, metavar="FILE", type=Path, help=text)
    add_flags(parser, JoinConfig)
    return parser


def main(argv: list[str]) -> int:
    """Join this machine to an engine or a cluster, or create or rotate a node secret file.

    With `--join` it runs until the engine or the membership in the cluster ends.

    Returns:
        The exit status: 2 for invalid options or files, otherwise that of the membership.
    """
    values = make_parser().parse_args(argv)
    if values.join is not None:
        return _join(values)
    try:
        for path, act, text in (
            (values.new_secret, create_secret_file, _CREATED),
            (values.add_secret, add_secret, _ADDED),
            (values.drop_secret, drop_secret, _DROPPED),
        ):
            if path is not None:
                act(path)
                print(text.format(path=path))
    except FileExistsError as error:
        print(f"gllm node: {error.filename} exists already: it is left as it is", file=sys.stderr)
        return 2
    except (SecretFileError, OSError) as error:
        return report_failure("node", error)
    return 0


def _join(values: argparse.Namespace) -> int:
    """Run this machine's part of an engine until its membership ends; return the exit status."""
    # Imported late: the other actions need neither.
    import uvloop

    from gllm.commands.node_process import NodeProcess

    try:
        config = config_from_flags(JoinConfig, values)
        configure_logging(LogConfig(config.log_level, config.log_format))
        return uvloop.run(NodeProcess(values.join, config).run())
    except (ValueError, OSError) as error:
        return report_failure("node", error)
