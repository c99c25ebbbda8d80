"""Coefficients of DistServe's form, fitted to a file of measured batches.

The file has a line for each batch: `tp,phase,requests,tokens,milliseconds`. `phase` is prefill or
decode, `tokens` the length of each prompt, or the context of each request; `milliseconds` the time
of one step of an engine of one stage.
"""

import csv
from functools import cache
from pathlib import Path
from typing import NamedTuple

from gllm.sim.costs.distserve import (
    DecodeSample,
    DistServeCoefficients,
    PhaseCoefficients,
    PrefillSample,
    fit_decode,
    fit_prefill,
)

COLUMNS = ("tp", "phase", "requests", "tokens", "milliseconds")
BATCH_THRESHOLD = 95
"""Requests from which decodes have coefficients of their own, as in DistServe's artifact."""
MIN_SAMPLES = 3
"""Batches that determine three coefficients."""


class MeasuredBatch(NamedTuple):
    """A line of the file."""

    tp: int
    phase: str
    requests: int
    tokens: int
    milliseconds: float


def parse_batches(text: str, name: str) -> list[MeasuredBatch]:
    """Return the batches of a file's text.

    Raises:
        ValueError: A column is missing, or a value is invalid; the message names file and line.
    """
    reader = csv.DictReader(text.splitlines())
    if missing := set(COLUMNS) - set(reader.fieldnames or ()):
        raise ValueError(
            f"{name}: no column {', '.join(sorted(missing))}: the first line has to be "
            f"{','.join(COLUMNS)}"
        )
    batches = []
    for row in reader:
        try:
            batch = MeasuredBatch(
                int(row["tp"]),
                row["phase"],
                int(row["requests"]),
                int(row["tokens"]),
                float(row["milliseconds"]),
            )
        except (TypeError, ValueError):
            batch = MeasuredBatch(0, "", 0, 0, 0.0)
        is_positive = min(batch.tp, batch.requests, batch.tokens) > 0
        if not is_positive or batch.phase not in ("prefill", "decode"):
            raise ValueError(
                f"{name}, line {reader.line_num}: needs tp, requests and tokens of at least 1, "
                "prefill or decode, and milliseconds"
            )
        batches.append(batch)
    return batches


@cache
def read_batches(file: str) -> list[MeasuredBatch]:
    """Return the batches of a file. Raises ValueError or OSError."""
    return parse_batches(Path(file).read_text(encoding="utf-8"), file)


@cache
def fit_batches(file: str, tp: int) -> DistServeCoefficients:
    """Return the coefficients of the batches that a file has for a degree of tensor parallelism.

    Raises:
        ValueError: The file has none, or too few to determine the coefficients.
        OSError: The file cannot be read.
    """
    batches = [batch for batch in read_batches(file) if batch.tp == tp]
    if not batches:
        known = sorted({batch.tp for batch in read_batches(file)})
        raise ValueError(f"{file} has no batches of tp {tp}, only of {', '.join(map(str, known))}")
    prefills = [
        PrefillSample([batch.tokens] * batch.requests, batch.milliseconds)
        for batch in batches
        if batch.phase == "prefill"
    ]
    decodes = [batch for batch in batches if batch.phase == "decode"]
    small = [batch for batch in decodes if batch.requests < BATCH_THRESHOLD]
    large = [batch for batch in decodes if batch.requests >= BATCH_THRESHOLD]
    if len(small) < MIN_SAMPLES or len(large) < MIN_SAMPLES:
        small = large = decodes
    try:
        return DistServeCoefficients(
            _at_least_zero(fit_prefill(prefills)),
            _at_least_zero(_fit_decodes(small)),
            _at_least_zero(_fit_decodes(large)),
            BATCH_THRESHOLD,
            {},
        )
    except ValueError as error:
        raise ValueError(f"{file}, tp {tp}: {error}") from None


def _fit_decodes(batches: list[MeasuredBatch]) -> PhaseCoefficients:
    return fit_decode(
        [DecodeSample([batch.tokens] * batch.requests, batch.milliseconds) for batch in batches]
    )


def _at_least_zero(phase: PhaseCoefficients) -> PhaseCoefficients:
    """Return coefficients without negative ones, which noise leaves where a term is near 0."""
    return PhaseCoefficients(*(max(0.0, value) for value in phase))
