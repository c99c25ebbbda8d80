"""Rows that cannot be sampled, and bans."""

import pytest
import torch

from gllm.messages import Sampling
from gllm.runtime import sampler
from gllm.runtime.sampler import SampledRows, draw, plan_rows


def rows_of(specs: list[Sampling], indices: list[int]) -> SampledRows:
    return plan_rows([(seq, 0) for seq in range(len(specs))], specs, indices)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_end_their_row(bad: float, temperature: float) -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    specs = [Sampling(temperature, top_k=k, seed=4) for k in (0, 0, 5)]
    wanted, _ = draw(logits.clone(), rows_of(specs, [0, 1, 2]))
    logits[1, 17] = bad
    tokens, errors = draw(logits, rows_of(specs, [0, 1, 2]))
    assert tokens == [wanted[0], 0, wanted[2]]
    assert [bool(error) for error in errors] == [False, True, False]


def test_banned_tokens_wait_for_min_tokens() -> None:
    spec = Sampling(temperature=0.0, min_tokens=2, banned=(3, 4, 1_000_000))
    logits = torch.arange(5.0).expand(4, 5).clone()
    tokens, errors = draw(logits, rows_of([spec] * 4, [0, 1, 2, 3]))
    assert tokens == [2, 2, 4, 4]
    assert not any(errors)


def test_everything_banned_is_an_error_of_the_row() -> None:
    spec = Sampling(temperature=0.0, min_tokens=1, banned=tuple(range(5)))
    tokens, errors = draw(torch.arange(5.0).repeat(2, 1), rows_of([spec, Sampling(0.0)], [0, 0]))
    assert tokens[1] == 4
    assert "banned" in errors[0]
    assert not errors[1]


def test_an_exception_ends_its_own_row(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = sampler.sample

    def breaks(logits: torch.Tensor, plan: sampler.SamplingPlan) -> torch.Tensor:
        if (logits[:, 0] == 7).any():
            raise RuntimeError("no luck")
        return kernel(logits, plan)

    monkeypatch.setattr(sampler, "sample", breaks)
    logits = torch.zeros(3, 9)
    logits[1, 0] = 7
    tokens, errors = draw(logits, rows_of([Sampling(seed=i) for i in range(3)], [5, 6, 7]))
    assert "no luck" in errors[1]
    assert [bool(error) for error in errors] == [False, True, False]
    monkeypatch.undo()
    wanted, _ = draw(torch.zeros(3, 9), rows_of([Sampling(seed=i) for i in range(3)], [5, 6, 7]))
    assert (tokens[0], tokens[2]) == (wanted[0], wanted[2])


def test_no_rows() -> None:
    assert draw(torch.empty(0, 5), rows_of([], [])) == ([], [])
