"""Measure serving over weak links: first come, first served against lanes and link policies.

Machines are network namespaces, and a shaper between them has the rate and the delay of a home or
campus link. Sections: `traffic` has the latency of steps on one link, `idle` that of single tokens,
`engines` the tokens per second of whole engines, and `simulator` compares the simulator with the
rig. Run as `python -m benchmarks.weak_links`, as root; it prints the figures and writes them to
docs/benchmarks/weak-links.md. A section that is not measured keeps its figures.
"""

import argparse
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.cpu.page import (
    ForeignCpu,
    format_sections,
    origin,
    page_path,
    read_results,
    write_results,
)
from benchmarks.net.rig import unsupported_reason
from benchmarks.weak_links.engines import EnginePlan, measure_engines
from benchmarks.weak_links.page import SECTIONS
from benchmarks.weak_links.simulator import ComparisonPlan, measure_comparison
from benchmarks.weak_links.traffic import (
    OTHER_RATES,
    TrafficPlan,
    measure_idle_hops,
    measure_traffic,
)
from benchmarks.weak_model import make_weak_model

TITLE = "Weak links: first come, first served against lanes and link policies"


class Sections:
    """Measurements of the sections with the lengths that the options choose."""

    def __init__(self, options: argparse.Namespace, model: Path) -> None:
        self._options, self._model = options, model
        self._begin = time.monotonic()

    def measure(self, name: str) -> list[dict[str, Any]]:
        """Return the rows of a section."""
        measure: Callable[[], list[dict[str, Any]]] = getattr(self, f"_measure_{name}")
        return measure()

    def progress(self, text: str) -> None:
        """Print a line with the time since the start."""
        print(f"[{time.monotonic() - self._begin:4.0f} s] {text}", file=sys.stderr, flush=True)

    def _measure_traffic(self) -> list[dict[str, Any]]:
        options = self._options
        plan = TrafficPlan(6.0, 1) if options.quick else TrafficPlan(10.0, options.runs)
        rows = []
        for index, congestion in enumerate(options.congestion):
            # Other rates with the first congestion control only.
            rates = () if index or options.quick else OTHER_RATES
            rows += measure_traffic(congestion, rates, plan, self.progress)
        return rows

    def _measure_idle(self) -> list[dict[str, Any]]:
        count = 5 if self._options.quick else 20
        return [
            row
            for congestion in self._options.congestion
            for row in measure_idle_hops(congestion, count, self.progress)
        ]

    def _measure_engines(self) -> list[dict[str, Any]]:
        options = self._options
        counts = (1, 16) if options.quick else (1, 4, 16, 64)
        plan = EnginePlan(options.stages, counts, 4.0 if options.quick else 20.0)
        return measure_engines(options.congestion, self._model, plan, self.progress)

    def _measure_simulator(self) -> list[dict[str, Any]]:
        options = self._options
        plan = ComparisonPlan(options.stages, 10 if options.quick else 26, 32)
        return measure_comparison(self._model, plan, self.progress)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--congestion", nargs="+", default=["cubic", "bbr"])
    parser.add_argument("--stages", type=int, default=3, help="machines of an engine")
    parser.add_argument("--runs", type=int, default=5, help="runs of the traffic at 100 Mbit/s")
    parser.add_argument("--quick", action="store_true", help="short: shows that everything works")
    parser.add_argument("--output", type=page_path, default=Path("docs/benchmarks/weak-links.md"))
    return parser


def main() -> int:
    """Measure the sections, and write the page after each; return 1 if one has failed."""
    options = make_parser().parse_args()
    if reason := unsupported_reason():
        sys.exit(f"the rig does not work here: {reason}")
    results = read_results(options.output)
    failed = False
    with tempfile.TemporaryDirectory(prefix="gllm-weak-model-") as folder:
        sections = Sections(options, make_weak_model(Path(folder) / "model", options.stages))
        for name in options.sections:
            foreign = ForeignCpu()
            try:
                results[name] = sections.measure(name)
            except Exception:
                # The other sections are worth having.
                traceback.print_exc()
                failed = True
                continue
            results.setdefault("origins", {})[name] = (
                f"{origin('benchmarks.weak_links')} Others used {foreign.cores():.2f} cores."
            )
            text = format_sections(SECTIONS, results)
            write_results(options.output, TITLE, text, results)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
