"""The measurement of recomputed texts finds what differs, and nothing where nothing does."""

from typing import Any

import pytest

from benchmarks import batch_invariance
from benchmarks.batch_invariance import Case, Counts, Model, format_row, measure
from gllm.kernels.native.library import load_library


@pytest.mark.skipif(load_library() is None, reason="a BLAS decides the order of sums")
def test_compiled_kernels_recompute_the_same_bits() -> None:
    counts = measure(Case("one", {"dtype": "float32", "attention_backend": "native"}), 3, 1)
    assert counts.texts == 3
    assert counts.positions > 6
    assert (counts.differing_positions, counts.differing_texts) == (0, 0)


def test_a_difference_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of chunks are off by as much as turns every text around."""
    run = Model.run

    def off_in_chunks(self: Model, rows: list[tuple[int, list[int]]]) -> list[Any]:
        results = run(self, rows)
        # The undisturbed prompts are one step of all sequences.
        if len(rows) < len(self.lengths) and max(len(tokens) for _, tokens in rows) > 1:
            results = [-logits for logits in results]
        return results

    monkeypatch.setattr(Model, "run", off_in_chunks)
    monkeypatch.setattr(batch_invariance, "CHUNKS_PER_STEP", 2)
    counts = measure(Case("one", {"dtype": "float32"}), 3, 1)
    assert counts.differing_positions > 0
    assert counts.differing_texts > 0
    assert counts.largest_difference > 1


def test_rows_tell_shares() -> None:
    case = Case("KV cache in fp8", {})
    assert format_row(case, Counts(2000, 0, 0.0, 9, 0)) == [case.name, "0 of 2,000", "0", "0 of 9"]
    row = format_row(case, Counts(2000, 7, 0.0123, 9, 1))
    assert row[1:] == ["7 of 2,000", "1.2e-02", "1 of 9"]
