"""Linear layers with one weight per head, every build against plain products."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.kernels.head_linear import multiply_heads, prepare_heads
from gllm.kernels.native.library import DTYPES
from gllm.kernels.threads import using_num_threads
from tests.kernels.test_native import TOLERANCE, random
from tests.support.examples import num_examples

TYPES = st.sampled_from([*DTYPES])
SHAPES = st.tuples(st.integers(1, 5), st.integers(1, 40), st.sampled_from([1, 2, 7, 12, 32, 70]))
"""Heads, outputs, inputs."""


@settings(max_examples=num_examples(25, 500), deadline=None)
@given(TYPES, SHAPES, st.integers(1, 40), st.integers(1, 3), st.integers(0, 99))
def test_products_are_those_of_each_head(
    way: str,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    tokens: int,
    threads: int,
    seed: int,
) -> None:
    """From heads that lie in wider rows, into heads that lie in wider rows."""
    heads, outputs, inputs = shape
    weight = random(seed, dtype, heads, outputs, inputs)
    wider = random(seed + 1, dtype, tokens, heads, inputs + 6)
    matrices = prepare_heads(weight)
    with using_num_threads(threads):
        result = torch.full((tokens, heads, outputs + 3), 9.0, dtype=dtype)
        multiply_heads(wider[..., :inputs], matrices, out=result[..., :outputs])
        alone = multiply_heads(wider[..., :inputs].contiguous(), matrices)
    wanted = torch.einsum("thi,hoi->tho", wider[..., :inputs].double(), weight.double())
    limit = TOLERANCE[dtype] * max(wanted.abs().max().item(), 1.0) * inputs**0.5
    assert (alone.double() - wanted).abs().max().item() <= limit
    assert (result[..., :outputs].double() - wanted).abs().max().item() <= limit
    assert (result[..., outputs:] == 9.0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_do_not_depend_on_each_other(way: str, dtype: torch.dtype) -> None:
    if way == "torch":
        pytest.skip("a BLAS decides the order of sums")
    matrices = prepare_heads(random(1, dtype, 3, 40, 70))
    x = random(2, dtype, 70, 3, 70)
    whole = multiply_heads(x, matrices)
    for begin, end in ((0, 1), (1, 17), (17, 49), (49, 70)):
        assert torch.equal(multiply_heads(x[begin:end], matrices), whole[begin:end])
