"""Other readings of the baselines in the first MoLink paper, and what they change.

The paper states neither how vLLM's messages share a link nor on which runtime Helix ran. Each
reading is simulated, and its directions are counted beside those of the tables.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from experiments.weak_links_directions import compare_directions, mean_factor
from experiments.weak_links_paper import LatencyRow
from experiments.weak_links_systems import SHARED, TrialFigures
from gllm.sim.metrics.report import format_table

READING_SYSTEMS = (SHARED,)
"""Systems that the readings need beside those of the tables."""

TEXT = """\
Helix's tables are those of its published runtime: a request's next token starts as soon as its last
one is back, each stage computes what has arrived, whole prompts before decodes, and each request's
output is a message of its own. The paper gives it two more things that this runtime does not have:
TTFT rises by 204 Mbit from 400 to 200 Mbit/s, which is two tensors per token over two hops (the
runtime sends one), and TPOT rises by 8.5 delays per token (a stream needs 3). Both are those of
vLLM's workers, so the paper's Helix may be vLLM with messages first come, first served. And where
the paper speaks of concurrent messages, vLLM may be meant: links that all messages share fairly,
which lets decodes pass. The last column says by what factor vllm's cells of Tables 3 and 4 differ
from the paper's."""


class Reading(NamedTuple):
    """Simulated system of two of the paper's columns."""

    name: str
    systems: Mapping[str, str]
    """Simulated system of a column; the others are those of the tables."""


READINGS = (
    Reading("vllm in order, helix by its runtime (tables above)", {}),
    Reading("vllm concurrent, helix by its runtime", {"vllm": SHARED}),
    Reading("vllm concurrent, helix as vllm in order", {"vllm": SHARED, "helix": "vllm"}),
)


def format_readings(
    rows: Sequence[LatencyRow],
    ours: Callable[[LatencyRow, str], TrialFigures],
    ablation: Mapping[str, TrialFigures],
) -> str:
    """Return the text and the table of the directions that agree, by reading.

    Args:
        rows: Rows of Tables 2 to 4.
        ours: Simulated figures of a row and a system.
        ablation: Simulated figures of Table 5, by system.
    """
    lines, header = [], ["columns"]
    for reading in READINGS:

        def read(row: LatencyRow, system: str, reading: Reading = reading) -> TrialFigures:
            return ours(row, reading.systems.get(system, system))

        directions = compare_directions(rows, read, ablation)
        kinds = list(dict.fromkeys(direction.kind for direction in directions))
        header = ["columns", *kinds, "all", "vllm's cells"]
        groups = [
            [direction for direction in directions if direction.kind == kind] for kind in kinds
        ]
        cells = [
            f"{sum(each.agrees for each in group)} of {len(group)}"
            for group in (*groups, directions)
        ]
        counted = [row for row in rows if row.table in ("3", "4")]
        lines.append([reading.name, *cells, f"x {mean_factor(counted, read, 'vllm'):.2f}"])
    return f"{TEXT}\n\n{format_table(header, lines)}"
