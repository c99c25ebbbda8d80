"""Measure prefill and decode on different engines of this machine.

Sections: `load` compares one prefill and one decode engine with two mixed ones, `break-even`
compares the prompt length from which on an engine fetches KV blocks with the one from which on that
is faster. Run as `python -m benchmarks.disaggregation` on at least two cores; it prints the figures
and writes them to docs/benchmarks/disaggregation.md. A section that is not measured keeps its
figures.
"""

import argparse
import asyncio
import os
import sys
import time
from pathlib import Path

import msgspec

from benchmarks.cpu.page import (
    ForeignCpu,
    format_sections,
    origin,
    page_path,
    read_results,
    write_results,
)
from benchmarks.disaggregation.crossing import measure_crossing
from benchmarks.disaggregation.load import measure_load
from benchmarks.disaggregation.page import SECTIONS

TITLE = "Prefill and decode apart, on one machine"
MEASURES = {"load": measure_load, "break-even": measure_crossing}


def main() -> int:
    """Measure the sections and write the page after each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--requests", type=int, default=200, help="per round of the load")
    parser.add_argument("--rounds", type=int, default=3, help="of the load")
    parser.add_argument("--repeats", type=int, default=25, help="of each time of the break-even")
    parser.add_argument("--quick", action="store_true", help="short: shows that everything works")
    parser.add_argument(
        "--output", type=page_path, default=Path("docs/benchmarks/disaggregation.md")
    )
    options = parser.parse_args()
    if len(os.sched_getaffinity(0)) < 2:
        sys.exit("the engines need a core each: run this on a machine with two cores at least")
    if options.quick:
        options.requests, options.rounds, options.repeats = 30, 1, 3
    begin = time.monotonic()

    def progress(text: str) -> None:
        print(f"[{time.monotonic() - begin:4.0f} s] {text}", file=sys.stderr, flush=True)

    results = read_results(options.output)
    for name in options.sections:
        foreign = ForeignCpu()
        results[name] = asyncio.run(MEASURES[name](options, progress))
        results.setdefault("origins", {})[name] = (
            f"{origin('benchmarks.disaggregation')} Others used {foreign.cores():.2f} cores."
        )
        # JSON has text as keys.
        shown = msgspec.json.decode(msgspec.json.encode(results))
        write_results(options.output, TITLE, format_sections(SECTIONS, shown), shown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
