"""Compare gllm with other engines for machines without a GPU, in one run.

    python -m benchmarks.cpu.compare                     servers: 1, 4, 16 equal streams
    python -m benchmarks.cpu.compare --mode poisson      servers: lengths of traces, rising rates
    python -m benchmarks.cpu.compare --mode in-process   engines without HTTP
    python -m benchmarks.cpu.compare --mode four-bit     the same with weights of 4 bits
    python -m benchmarks.cpu.compare --mode hybrid       hybrids beside a dense model
    python -m benchmarks.cpu.compare --mode docs         the page of the saved results

Everything that the comparison needs is created in the work folder: the model, the peers'
environments from PyPI, and the results.
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
from benchmarks.cpu.peers import select_peers
from benchmarks.cpu.results import Results
from benchmarks.cpu.session import Session
from benchmarks.cpu.workplace import PeerError, Workplace
from benchmarks.policies import processor
from gllm.options.flags import add_flags, config_from_flags


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command: one flag per field of CompareConfig."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cpu.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_flags(parser, CompareConfig)
    return parser


def workplace(config: CompareConfig) -> Workplace:
    """Return the work folder and the settings that all peers share."""
    llama_bin = Path(config.llama_bin).resolve() if config.llama_bin else None
    folder = Path(config.work).resolve()
    return Workplace(folder, config.threads, config.kv_cache_memory, llama_bin)


def empty_results(config: CompareConfig, argv: list[str]) -> Results:
    """Return the results' header: everything known before the first measurement."""
    versions = f"Python {platform.python_version()}, torch {version('torch')}"
    return Results(
        config.mode,
        str(datetime.date.today()),
        shlex.join(["python", "-m", "benchmarks.cpu.compare", *argv]),
        f"{os.cpu_count()} cores, {processor()}, {versions}",
        dataclasses.asdict(config),
    )


def main(argv: list[str]) -> int:
    """Run the command.

    Returns:
        The exit status: 0 for success, 1 if nothing was measured, 2 for invalid options, 130
        after Ctrl-C or SIGTERM; the rounds completed before it are kept.
    """
    values = make_parser().parse_args(argv)
    try:
        config = config_from_flags(CompareConfig, values)
        work = workplace(config)
        if config.mode == "docs":
            print(f"wrote {write_docs(work.folder / 'results')}")
            return 0
        peers = select_peers(config.peers, config.mode)
    except (ValueError, OSError) as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2
    # SIGTERM also stops the child processes.
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
