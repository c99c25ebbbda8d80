"""Log-probabilities against their definition, and their independence of the batch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.kernels.logprobs import compute_logprobs, gather_logprobs, pack_logprobs, unpack_logprobs
from gllm.kernels.threads import using_num_threads
from tests.support.examples import num_examples


@settings(max_examples=num_examples(80, 2000), deadline=None)
@given(
    rows=st.integers(1, 5),
    vocabulary=st.integers(1, 40),
    top=st.integers(0, 25),
    scale=st.sampled_from([0.0, 1.0, 30.0, 1e4]),
    seed=st.integers(0, 2**31),
)
def test_scores_follow_the_definition(rows, vocabulary, top, scale, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocabulary, generator=generator) * scale
    tokens = torch.randint(vocabulary, (rows,), generator=generator)
    scores = gather_logprobs(compute_logprobs(logits), tokens, top)
    relative = logits.double() - logits.double().amax(-1, keepdim=True)
    exact = relative - relative.exp().sum(-1, keepdim=True).log()
    count = min(top, vocabulary)
    assert scores.top_ids.shape == scores.top_logprobs.shape == (rows, count)
    for row, token in enumerate(tokens.tolist()):
        assert scores.tokens[row] == token
        assert scores.logprobs[row].item() == pytest.approx(exact[row, token].item(), 1e-5, 1e-4)
        assert scores.ranks[row] == 1 + sum(logits[row] > logits[row, token])
        best = exact[row].sort(descending=True)[0][:count]
        assert scores.top_logprobs[row].tolist() == pytest.approx(best.tolist(), 1e-5, 1e-4)
        assert torch.equal(scores.top_logprobs[row].double(), own(scores, logits, row))
        assert len(set(scores.top_ids[row].tolist())) == count


def own(scores, logits, row) -> torch.Tensor:
    """The log-probabilities of the row's top ids."""
    return compute_logprobs(logits)[row, scores.top_ids[row]].double()


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_is_scored_the_same_in_any_batch(threads: int) -> None:
    """However many threads share the rows, no row is cut."""
    with using_num_threads(threads):
        logits = torch.randn(7, 70_000, generator=torch.Generator().manual_seed(0)) * 3
        tokens = torch.arange(7) * 999
        together = gather_logprobs(compute_logprobs(logits), tokens, 20)
        for row in range(7):
            part = slice(row, row + 1)
            alone = gather_logprobs(compute_logprobs(logits[part]), tokens[part], 20)
            assert torch.equal(alone.logprobs, together.logprobs[part])
            assert torch.equal(alone.ranks, together.ranks[part])
            assert torch.equal(alone.top_ids, together.top_ids[part])
            assert torch.equal(alone.top_logprobs, together.top_logprobs[part])


@pytest.mark.parametrize("top", [0, 5])
def test_scores_survive_their_way_in_one_table(top) -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(1)) * 50
    scores = gather_logprobs(compute_logprobs(logits), torch.tensor([7, 39, 0]), top)
    table = pack_logprobs(scores)
    assert table.shape == (3, 3 + 2 * top)
    again = unpack_logprobs(table)
    for name in ("tokens", "logprobs", "ranks", "top_ids", "top_logprobs"):
        wanted, got = getattr(scores, name), getattr(again, name)
        assert torch.equal(wanted, got)
        assert wanted.dtype == got.dtype
