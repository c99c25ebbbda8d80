"""gllm beside what a user would pick instead on a machine without a GPU, in one run.

    python -m benchmarks.cpu.compare                     servers: 1, 4, 16 equal streams
    python -m benchmarks.cpu.compare --mode poisson      servers: lengths of traces, rising rates
    python -m benchmarks.cpu.compare --mode in-process   engines without HTTP
    python -m benchmarks.cpu.compare --mode docs         the page of what was measured

Owns the command. Everything it needs is made in the work folder: the model, the peers'
environments from PyPI, results.
"""

import argparse
import dataclasses
import datetime
import os
import platform
import shlex
import signal
import sys
from importlib.metadata import version
from pathlib import Path

from benchmarks.cpu.comparison_page import sections, write_docs
from benchmarks.cpu.modes import MODES
from benchmarks.cpu.options import CompareConfig
from benchmarks.cpu.peers import chosen
from benchmarks.cpu.results import Results
from benchmarks.cpu.session import Session
from benchmarks.cpu.workplace import PeerError, Workplace
from benchmarks.policies import processor
from gllm.config.flags import add_flags, config_from_flags


def make_parser() -> argparse.ArgumentParser:
    """The command's flags: those of CompareConfig."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cpu.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_flags(parser, CompareConfig)
    return parser


def workplace(config: CompareConfig) -> Workplace:
    """The work folder and what all peers are given."""
    given = Path(config.llama_bin).resolve() if config.llama_bin else None
    folder = Path(config.work).resolve()
    return Workplace(folder, config.threads, config.kv_cache_memory, given)


def empty_results(config: CompareConfig, argv: list[str]) -> Results:
    """What is known before anything is measured."""
    versions = f"Python {platform.python_version()}, torch {version('torch')}"
    return Results(
        config.mode,
        str(datetime.date.today()),
        shlex.join(["python", "-m", "benchmarks.cpu.compare", *argv]),
        f"{os.cpu_count()} cores, {processor()}, {versions}",
        dataclasses.asdict(config),
    )


def main(argv: list[str]) -> int:
    """The command. Exit status: 0; 1 where nothing could be measured; 2 for what cannot be asked;
    130 after Ctrl-C or SIGTERM, when the rounds before it are kept."""
    values = make_parser().parse_args(argv)
    try:
        config = config_from_flags(CompareConfig, values)
        work = workplace(config)
        if config.mode == "docs":
            print(f"wrote {write_docs(work.folder / 'results')}")
            return 0
        peers = chosen(config.peers, in_process=config.mode == "in-process")
    except (ValueError, OSError) as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2
    # What it started ends with it in this case, too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    session = Session(work, peers, empty_results(config, argv))
    try:
        session.prepare()
        MODES[config.mode](config, session)
    except PeerError as error:
        print(f"compare: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print("\n\n".join(sections(session.results)))
    print(f"\nwrote {session.path}")
    return 0 if session.results.rows else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
