"""The operations that have compiled kernels, every build of them against plain formulas."""

import platform
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from gllm.kernels.activation import ACTIVATIONS, act_and_mul, apply_activation, sigmoid, softplus
from gllm.kernels.linear import linear, prepare
from gllm.kernels.native.builds import find_compiled_builds
from gllm.kernels.native.library import DTYPES
from gllm.kernels.qkv import rotate_and_store
from gllm.kernels.qkv_layout import QKVLayout
from gllm.kernels.rms_norm import add_rms_norm, rms_norm
from gllm.kernels.rotary import apply_rotary
from tests.support.examples import num_examples

TYPES = st.sampled_from([*DTYPES])
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def close(actual: Tensor, wanted: Tensor) -> None:
    """Within what rounding leaves of numbers around 1 and above."""
    limit = TOLERANCE[actual.dtype] * max(wanted.abs().max().item(), 1.0)
    assert (actual.to(torch.float64) - wanted.to(torch.float64)).abs().max().item() <= limit


def random(seed: int, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_this_machine_has_builds() -> None:
    """Where there is a compiler there is at least one; CI has one."""
    if platform.machine() == "x86_64":
        assert "portable" in find_compiled_builds()


@settings(max_examples=num_examples(30, 1000), deadline=None)
@given(TYPES, st.booleans(), st.integers(1, 5), st.integers(1, 70), st.integers(0, 99))
def test_norms(way: str, dtype: torch.dtype, wide: bool, rows: int, size: int, seed: int) -> None:
    hidden, delta = random(seed, dtype, rows, size), random(seed + 1, dtype, rows, size)
    weight = random(seed + 2, torch.float32 if wide else dtype, size)
    summed = (hidden + delta).to(torch.float64)
    factor = (summed.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()
    wanted = summed * factor * weight.to(torch.float64)
    close(rms_norm(hidden + delta, weight, 1e-5), wanted)
    close(add_rms_norm(hidden, delta, weight, 1e-5), wanted)
    close(hidden, summed)


@settings(max_examples=num_examples(30, 1000), deadline=None)
@given(
    TYPES,
    st.sampled_from(["silu", "gelu", "gelu_tanh", "relu", "swiglu_oai"]),
    st.integers(1, 5),
    st.integers(1, 70),
    st.integers(0, 99),
)
def test_gates(way: str, dtype: torch.dtype, kind: str, rows: int, size: int, seed: int) -> None:
    both = 4 * random(seed, dtype, rows, 2 * size)
    first, second = both.to(torch.float64).chunk(2, dim=-1)
    formulas: dict[str, Callable[[Tensor], Tensor]] = {
        "silu": functional.silu,
        "gelu": functional.gelu,
        "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
        "relu": torch.relu,
    }
    if kind == "swiglu_oai":
        first, second = first.clamp(max=7), second.clamp(-7, 7) + 1
        formulas[kind] = lambda x: x * torch.sigmoid(1.702 * x)
    close(act_and_mul(kind, both), formulas[kind](first) * second)


PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    kind: partial(apply_activation, kind) for kind in ACTIVATIONS
} | {"sigmoid": sigmoid, "softplus": softplus}


@settings(max_examples=num_examples(30, 1000), deadline=None)
@given(
    TYPES,
    st.sampled_from([*PLAIN]),
    st.integers(1, 5),
    st.integers(1, 70),
    st.integers(0, 99),
)
def test_activations(
    way: str, dtype: torch.dtype, kind: str, rows: int, size: int, seed: int
) -> None:
    x = 4 * random(seed, dtype, rows, size)
    formulas = ACTIVATIONS | {"sigmoid": torch.sigmoid, "softplus": functional.softplus}
    actual = PLAIN[kind](x)
    close(actual, formulas[kind](x.to(torch.float64)))
    if way != "torch":
        assert torch.equal(torch.cat([PLAIN[kind](row[None]) for row in x]), actual)


def test_activations_at_the_ends_of_their_range(way: str) -> None:
    x = torch.tensor([[-1e4, -200.0, -88.5, -20.0, -6.0, -0.0, 0.0, 6.0, 20.0, 88.5, 200.0, 1e4]])
    formulas = ACTIVATIONS | {"sigmoid": torch.sigmoid, "softplus": functional.softplus}
    for kind, activate in PLAIN.items():
        wanted = formulas[kind](x.double()).float()
        torch.testing.assert_close(activate(x), wanted, rtol=2e-6, atol=2e-6)


@settings(max_examples=num_examples(40, 1000), deadline=None)
@given(
    TYPES,
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.sampled_from([2, 10, 32, 48])),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.booleans(),
    st.sampled_from([None, "same", "float32"]),
    st.integers(0, 99),
)
def test_from_projections_to_the_cache(
    way: str,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    share: float,
    interleaved: bool,
    norm: str | None,
    seed: int,
) -> None:
    kv_heads, group, head_dim = shape
    heads, tokens = kv_heads * group, 5
    dim = int(head_dim * share) // 2 * 2
    fused = random(seed, dtype, tokens, heads + 2 * kv_heads, head_dim)
    turns = 3 * random(seed + 1, torch.float32, tokens, 1, dim // 2)
    angles = (turns.cos(), turns.sin()) if dim else None
    scales: list[Tensor | None] = [None, None]
    if norm is not None:
        kind = dtype if norm == "same" else torch.float32
        scales = [random(seed + i, kind, head_dim) for i in (2, 3)]
    empty = torch.zeros(4, 2, kv_heads, head_dim, dtype=dtype)
    cache = (empty, empty.clone())
    slots = torch.tensor([6, 0, 3, 1, 4])
    parts = fused.to(torch.float64).split((heads, kv_heads, kv_heads), dim=1)
    wanted = []
    for part, scale in zip(parts[:2], scales, strict=True):
        if scale is not None:
            part = part * (part.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * scale
        if angles is not None:
            # The rotation has a test of its own; it computes in float32.
            part = apply_rotary(part.to(torch.float32), angles, interleaved)
        wanted.append(part)
    how = QKVLayout(heads, kv_heads, interleaved, scales[0], scales[1], 1e-5)
    query = rotate_and_store(fused.clone(), how, angles, cache, slots)
    close(query, wanted[0])
    close(cache[0].flatten(0, 1)[slots], wanted[1])
    assert torch.equal(cache[1].flatten(0, 1)[slots], fused[:, heads + kv_heads :])
    others = torch.ones(8, dtype=torch.bool).index_fill_(0, slots, False)
    assert not cache[0].flatten(0, 1)[others].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_that_are_none_stay_so(way: str, dtype: torch.dtype) -> None:
    bad = torch.full((1, 32), torch.nan, dtype=dtype)
    assert all(activate(bad).isnan().all() for activate in PLAIN.values())
    assert rms_norm(bad, torch.ones(32, dtype=dtype), 1e-5).isnan().all()
    assert act_and_mul("silu", bad).isnan().all()


def test_every_float16_is_read_as_it_is(way: str) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.float16)
    weight = torch.stack((every, torch.zeros_like(every)), dim=1)
    x = torch.tensor([[1.0, 0.0]], dtype=torch.float16)
    read = linear(x, prepare(weight), None)[0]
    torch.testing.assert_close(read, every, rtol=0, atol=0, equal_nan=True)


def test_sums_are_rounded_to_the_nearest_float16(way: str) -> None:
    """Ties to even; subnormal numbers and those beyond the largest too."""
    sizes = 2.0 ** torch.arange(-25, 17).repeat_interleave(200)
    generator = torch.Generator().manual_seed(3)
    first = (torch.randn(len(sizes), generator=generator) * sizes).to(torch.float16)
    second = (torch.randn(len(sizes), generator=generator) * sizes / 2048).to(torch.float16)
    weight = torch.stack((first, second), dim=1)
    result = linear(torch.ones(1, 2, dtype=torch.float16), prepare(weight), None)[0]
    wanted = (first.to(torch.float32) + second.to(torch.float32)).to(torch.float16)
    assert torch.equal(result, wanted)
