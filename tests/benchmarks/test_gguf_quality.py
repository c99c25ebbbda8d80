"""Benchmark of GGUF files beside llama.cpp: windows, saved log-probabilities, rounded weights."""

import io
import struct
from pathlib import Path

import numpy as np
import pytest

from benchmarks.cpu.llama_tools import LlamaToolError, read_logits
from benchmarks.cpu.perplexity import SCORED, WINDOW, Scores, pad_answers, split_windows
from benchmarks.cpu.written_formats import GROUP, round_in_groups

VOCAB_SIZE = 5
SCALE, LEAST = 0.5, -8.0


def test_windows_begin_with_bos_and_are_complete() -> None:
    tokens = list(range(1, 2 * WINDOW + 100))
    plain, marked = split_windows(tokens, None), split_windows(tokens, 0)
    assert plain == [tokens[:WINDOW], tokens[WINDOW : 2 * WINDOW]]
    assert [window[0] for window in marked] == [0, 0]
    assert [window[1:] for window in marked] == [window[1:] for window in plain]
    assert tokens[0] == 1


def test_the_second_half_is_scored_and_a_prefix_can_be_compared(tmp_path: Path) -> None:
    logprobs = np.concatenate((np.full(SCORED, -1.0), np.full(SCORED, -3.0)))
    empty = np.zeros((2 * SCORED, 0))
    scores = Scores(logprobs, empty.astype(np.int64), empty, pad_answers([[4, 5]]))
    scores.save(tmp_path / "scores.npz")
    loaded = Scores.load(tmp_path / "scores.npz")
    assert SCORED == WINDOW // 2 - 1
    assert loaded.num_windows == 2
    assert loaded.perplexity(1) == pytest.approx(np.e)
    assert loaded.perplexity(2) == pytest.approx(np.e**2)
    assert loaded.answers.tolist() == scores.answers.tolist()


def saved_logits(windows: list[list[int]], codes: np.ndarray) -> bytes:
    """Return the bytes of a logits file of llama-perplexity; codes [scored, VOCAB_SIZE]."""
    header = b"_logits_" + struct.pack("<iii", WINDOW, VOCAB_SIZE, len(windows))
    row = struct.pack("<ff", SCALE, LEAST)
    padded = np.pad(codes, ((0, 0), (0, 1))).astype(np.uint16)
    rows = b"".join(row + line.tobytes() for line in padded)
    return header + np.array(windows, np.int32).tobytes() + rows


def test_saved_log_probabilities_are_those_of_our_likeliest_tokens() -> None:
    windows = [[1] * WINDOW, [2] * WINDOW]
    codes = np.tile(np.array([1, 9, 0, 4, 9]), (2 * SCORED, 1))
    codes[SCORED:, 3] = 12
    ids = np.tile(np.array([4, 2, 3]), (2 * SCORED, 1))
    logprobs, at_top, is_same = read_logits(io.BytesIO(saved_logits(windows, codes)), windows, ids)
    np.testing.assert_array_equal(logprobs[:SCORED], np.full(SCORED, 9 * SCALE + LEAST))
    assert np.isnan(logprobs[SCORED:]).all()
    # A code of 0 is what the tool cuts off.
    np.testing.assert_array_equal(at_top[0], [9 * SCALE + LEAST, np.nan, 4 * SCALE + LEAST])
    assert is_same.tolist() == [1] * SCORED + [0] * SCORED


def test_other_tokens_and_a_stream_that_ends_are_errors() -> None:
    windows, codes = [[1] * WINDOW], np.ones((SCORED, VOCAB_SIZE))
    ids = np.zeros((SCORED, 1), np.int64)
    data = saved_logits(windows, codes)
    for stream, cause in (
        (data[:-1], "ended at window 0"),
        (saved_logits([[1] * 300 + [2] * 212], codes), "other tokens"),
        (data.replace(b"_logits_", b"_______#"), "not the expected windows"),
    ):
        with pytest.raises(LlamaToolError, match=cause):
            read_logits(io.BytesIO(stream), windows, ids)


@pytest.mark.parametrize(("width", "is_symmetric"), [(4, False), (4, True), (3, False), (8, False)])
def test_weights_are_off_by_half_a_step(width: int, is_symmetric: bool) -> None:
    weight = np.random.default_rng(1).normal(size=(6, 2 * GROUP)).astype(np.float32)
    rounded = round_in_groups(weight, width, is_symmetric)
    scales = rounded.scales[:, rounded.groups].astype(np.float32)
    assert rounded.codes.min() >= 0
    assert rounded.codes.max() < 1 << width
    # A zero is an integer, so that the ends of a group may be off by half a step more.
    assert float((np.abs(rounded.floats - weight) / scales).max()) < 1.05
    assert float((np.abs(rounded.floats - weight) / scales).mean()) < 0.3
