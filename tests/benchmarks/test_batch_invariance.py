"""The measurement of recomputed texts finds what differs, and nothing where nothing does."""

import pytest
from torch import Tensor

from benchmarks.batch_invariance import (
    CHUNKS_PER_STEP,
    Case,
    Counts,
    Model,
    format_row,
    measure,
)
from gllm.kernels.native.library import load_library

pytestmark = pytest.mark.full


@pytest.mark.skipif(load_library() is None, reason="a BLAS decides the order of sums")
def test_compiled_kernels_recompute_the_same_bits() -> None:
    counts = measure(Case("one", {"dtype": "float32", "attention_backend": "native"}), 3, 1)
    assert counts.texts == 3
    assert counts.positions > 6
    assert (counts.differing_positions, counts.differing_texts) == (0, 0)


class ModelOffInChunks(Model):
    """Model whose logits of recomputed chunks are off by as much as turns every text around."""

    def run(self, rows: list[tuple[int, list[int]]]) -> list[Tensor]:
        """Return wrong logits of chunks, which have fewer rows than the undisturbed prompts."""
        results = super().run(rows)
        if len(rows) < len(self.lengths) and max(len(tokens) for _, tokens in rows) > 1:
            results = [-logits for logits in results]
        return results


def test_a_difference_is_found() -> None:
    num_sequences = CHUNKS_PER_STEP + 1
    counts = measure(Case("one", {"dtype": "float32"}), num_sequences, 1, ModelOffInChunks)
    assert counts.differing_positions > 0
    assert counts.differing_texts > 0
    assert counts.largest_difference > 1


def test_rows_tell_shares() -> None:
    case = Case("KV cache in fp8", {})
    assert format_row(case, Counts(2000, 0, 0.0, 9, 0)) == [case.name, "0 of 2,000", "0", "0 of 9"]
    row = format_row(case, Counts(2000, 7, 0.0123, 9, 1))
    assert row[1:] == ["7 of 2,000", "1.2e-02", "1 of 9"]
