"""Request traces: those that ship with gllm, and files of lengths.

data/README.md names sources and licences of the shipped ones.
"""

import csv
from functools import cache
from itertools import pairwise
from math import inf, nan
from typing import NamedTuple

from gllm.sim.data_tables import read_table

Lengths = list[tuple[int, int]]
"""(prompt tokens, output tokens), each at least 1."""

TRACES = {
    "azure-conv": "azure_llm_2023_conv",
    "azure-code": "azure_llm_2023_code",
    "arxiv-4k": "vidur_arxiv4k_lengths",
    "sharegpt": "distserve_sharegpt_lengths",
}
"""Name of the file of each trace, by the name of the workload."""


class WorkloadTrace(NamedTuple):
    """Arrival times and lengths of recorded requests; some traces have lengths only."""

    arrivals: list[float]
    """Seconds since the first request; empty if the trace has lengths only."""
    lengths: Lengths


@cache
def load_trace(file: str) -> WorkloadTrace:
    """Return a trace that ships with gllm.

    Args:
        file: File name without suffix, a value of TRACES.
    """
    rows = read_table(f"{file}.csv.gz")
    lengths = [(int(row["prompt_tokens"]), int(row["output_tokens"])) for row in rows]
    return WorkloadTrace([float(row["arrival_s"]) for row in rows if "arrival_s" in row], lengths)


def read_trace(path: str) -> WorkloadTrace:
    """Read a CSV file with the columns prompt_tokens, output_tokens and, for a replay, arrival_s.

    Args:
        path: Path of the file.

    Raises:
        ValueError: The file has other columns, no rows, a length that is no number above 0, or
            arrival times in seconds that do not rise from 0 or later.
        OSError: The file cannot be read.
    """
    with open(path, newline="", encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    try:
        lengths = [(int(row["prompt_tokens"]), int(row["output_tokens"])) for row in rows]
    except (KeyError, TypeError, ValueError):
        lengths = []
    if not lengths or min(map(min, lengths)) < 1:
        raise ValueError(
            f"{path}: give the columns prompt_tokens and output_tokens, with numbers above 0 and a "
            "row for each request, as GET /workload of a router does"
        )
    if "arrival_s" not in rows[0]:
        return WorkloadTrace([], lengths)
    try:
        arrivals = [float(row["arrival_s"]) for row in rows]
    except (TypeError, ValueError):
        arrivals = [nan]
    # A comparison with NaN is False.
    if not all(a <= b < inf for a, b in pairwise([0.0, *arrivals])):
        raise ValueError(f"{path}: arrival_s: give seconds, from 0 on, that do not fall")
    return WorkloadTrace(arrivals, lengths)
