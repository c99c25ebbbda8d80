"""Rows of the operations of a layer and of sampling, against fp64 references and torch.

Attention is in attention.py.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu import attention
from benchmarks.gpu.operations import TOLERANCES, Operation, Rival, measure, relative_error
from benchmarks.gpu.place import Place
from benchmarks.gpu.rows import Measured, PendingRow
from gllm.kernels.activation import act_and_mul
from gllm.kernels.experts import StackedExperts, run_stacked
from gllm.kernels.fp8_weights import Fp8Matrix
from gllm.kernels.grouped_weight import quantize_to_4_bits
from gllm.kernels.grouped_words import GroupedWords, pack_for_gpu
from gllm.kernels.linear_fp8 import linear_fp8
from gllm.kernels.linear_grouped import GroupedMatrix, linear_grouped
from gllm.kernels.qkv import rotate_and_store
from gllm.kernels.qkv_layout import QKVLayout
from gllm.kernels.rms_norm import add_rms_norm, rms_norm
from gllm.kernels.rotary import compute_inverse_frequencies, compute_rotary_angles
from gllm.kernels.sampling import sample
from gllm.kernels.sampling_plan import plan_sampling
from gllm.runtime.worker.cuda.staging import map_tensors

EPS = 1e-6
FP8_TOLERANCE = 2.0**-4
"""Tolerance for operations that quantize activations to FP8 (three mantissa bits)."""
NUM_CHECKED_TOKENS = 8
"""Number of tokens on which a mixture of experts is compared."""


class Sizes(NamedTuple):
    """Sizes of a model that operations depend on."""

    model: str
    hidden: int
    inner: int
    vocabulary: int
    heads: attention.Heads


class Mixture(NamedTuple):
    """Sizes of a model's mixture of experts."""

    model: str
    experts: int
    active: int
    hidden: int
    inner: int


QWEN = Sizes("Qwen2.5-7B", 3584, 18944, 152064, attention.QWEN)
LLAMA = Sizes("Llama-3.1-8B", 4096, 14336, 128256, attention.LLAMA)
TINY = Sizes("tiny", 128, 256, 131, attention.TINY)
MIXTURE, TINY_MIXTURE = Mixture("Qwen3-30B-A3B", 128, 8, 2048, 768), Mixture("tiny", 4, 2, 64, 32)

Make = Callable[[Place, Sizes, int], Operation]


def rows(place: Place) -> Iterator[PendingRow]:
    """Yield the rows of attention, then of all other operations for some numbers of tokens."""
    yield from attention.rows(place)
    models, tokens = ((TINY,), (3,)) if place.is_dry else ((QWEN, LLAMA), (64, 2048, 1))
    for count in tokens:
        for sizes in models:
            for name, make in OPERATIONS.items():
                yield _row(place, name, make, sizes, count)
        mixture = TINY_MIXTURE if place.is_dry else MIXTURE
        name = f"experts, {mixture.model}, {count} tokens"
        yield PendingRow(
            name, partial(_measured, place, name, partial(experts, place, mixture, count))
        )
    for kind in SAMPLING_KINDS:
        name = f"sampling, {kind}, 64 rows"
        make_sampling = partial(sampling, place, models[0].vocabulary, kind)
        yield PendingRow(name, partial(_measured, place, name, make_sampling))


def _row(place: Place, name: str, make: Make, sizes: Sizes, tokens: int) -> PendingRow:
    full = f"{name}, {sizes.model}, {tokens} tokens"
    return PendingRow(full, partial(_measured, place, full, partial(make, place, sizes, tokens)))


def _measured(place: Place, name: str, make: Callable[[], Operation]) -> Measured:
    place.seed(name)
    return measure(place, make())


def _normal(place: Place, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=place.dtype, device=place.device)


def norm(place: Place, sizes: Sizes, tokens: int) -> Operation:
    """Return the RMSNorm operation."""
    weight = _normal(place, sizes.hidden)

    def error(x: Tensor) -> float:
        return relative_error(rms_norm(x, weight, EPS), _norm(x, weight))

    return Operation(
        make=lambda: _normal(place, tokens, sizes.hidden),
        run=lambda x: rms_norm(x, weight, EPS),
        error=error,
        tolerance=TOLERANCES[place.dtype],
        num_bytes=2 * 2 * tokens * sizes.hidden,
        rivals={
            "torch_ms": Rival(
                lambda: _normal(place, tokens, sizes.hidden),
                lambda x: functional.rms_norm(x, weight.shape, weight, EPS),
            )
        },
    )


def residual_norm(place: Place, sizes: Sizes, tokens: int) -> Operation:
    """Return the fused residual addition and RMSNorm, which also writes the sum."""
    weight = _normal(place, sizes.hidden)

    def make() -> tuple[Tensor, Tensor]:
        return _normal(place, tokens, sizes.hidden), _normal(place, tokens, sizes.hidden)

    def error(inputs: tuple[Tensor, Tensor]) -> float:
        hidden, delta = inputs
        total = hidden.to(torch.float64) + delta.to(torch.float64)
        got = add_rms_norm(hidden, delta, weight, EPS)
        return max(relative_error(hidden, total), relative_error(got, _norm(total, weight)))

    return Operation(
        make=make,
        run=lambda inputs: add_rms_norm(inputs[0], inputs[1], weight, EPS),
        error=error,
        tolerance=TOLERANCES[place.dtype],
        num_bytes=2 * 4 * tokens * sizes.hidden,
    )


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    """Return the RMSNorm in float64."""
    wide = x.to(torch.float64)
    return wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.to(torch.float64)


def rotation(place: Place, sizes: Sizes, tokens: int) -> Operation:
    """Return the operation from the fused QKV projection to rotated queries and the stored KV."""
    _, heads, kv_heads, dim = sizes.heads
    layout = QKVLayout(heads, kv_heads)
    frequencies, factor = compute_inverse_frequencies("default", dim, 1e6, {})
    positions = torch.arange(tokens, device=place.device)
    angles = compute_rotary_angles(positions, frequencies.to(place.device), factor)
    blocks = -(-tokens // attention.BLOCK_SIZE) + 1
    slots = torch.randperm((blocks - 1) * attention.BLOCK_SIZE)[:tokens].to(place.device)

    def make() -> tuple[Tensor, tuple[Tensor, Tensor]]:
        shape = blocks, attention.BLOCK_SIZE, kv_heads, dim
        cache = _normal(place, *shape), _normal(place, *shape)
        return _normal(place, tokens, heads + 2 * kv_heads, dim), cache

    def run(inputs: tuple[Tensor, tuple[Tensor, Tensor]]) -> Tensor:
        fused, cache = inputs
        return rotate_and_store(fused, layout, angles, cache, slots)

    def error(inputs: tuple[Tensor, tuple[Tensor, Tensor]]) -> float:
        fused, (keys, values) = inputs
        first, second = fused[:, : heads + kv_heads].to(torch.float64).chunk(2, dim=-1)
        cosine, sine = (part.to(torch.float64) for part in angles)
        pairs = first * cosine - second * sine, second * cosine + first * sine
        turned, value = torch.cat(pairs, dim=-1), fused[:, heads + kv_heads :].clone()
        query = run(inputs)
        return max(
            relative_error(query, turned[:, :heads]),
            relative_error(keys.flatten(0, 1)[slots], turned[:, heads:]),
            relative_error(values.flatten(0, 1)[slots], value),
        )

    return Operation(
        make=make,
        run=run,
        error=error,
        tolerance=TOLERANCES[place.dtype],
        num_bytes=2 * 2 * tokens * (heads + 2 * kv_heads) * dim,
    )


def gating(place: Place, sizes: Sizes, tokens: int) -> Operation:
    """Return the operation silu(gate) * up."""

    def make() -> Tensor:
        return _normal(place, tokens, 2 * sizes.inner)

    def error(x: Tensor) -> float:
        first, second = x.to(torch.float64).chunk(2, dim=-1)
        return relative_error(act_and_mul("silu", x), functional.silu(first) * second)

    def by_torch(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return functional.silu(first) * second

    return Operation(
        make=make,
        run=partial(act_and_mul, "silu"),
        error=error,
        tolerance=TOLERANCES[place.dtype],
        num_bytes=2 * 3 * tokens * sizes.inner,
        rivals={"torch_ms": Rival(make, by_torch)},
    )


def fp8_linear(place: Place, sizes: Sizes, tokens: int) -> Operation:
    """Return the down projection with FP8 weights and scales of blocks of 128 x 128.

    torch multiplies by the weight in bfloat16.
    """
    outputs, inputs = sizes.hidden, sizes.inner
    scales = -(-outputs // 128), -(-inputs // 128)

    def make() -> tuple[Tensor, Fp8Matrix]:
        codes = _normal(place, outputs, inputs).to(torch.float8_e4m3fn)
        factors = torch.rand(scales, device=place.device) + 0.5
        return _normal(place, tokens, inputs), Fp8Matrix(codes, factors, 128, 128, place.dtype)

    def error(operands: tuple[Tensor, Fp8Matrix]) -> float:
        x, matrix = operands
        spread = matrix.scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
        weight = matrix.codes.to(torch.float64) * spread[:outputs, :inputs]
        return relative_error(linear_fp8(x, matrix, None), x.to(torch.float64) @ weight.t())

    return Operation(
        make=make,
        run=lambda operands: linear_fp8(operands[0], operands[1], None),
        error=error,
        tolerance=FP8_TOLERANCE,
        num_bytes=outputs * inputs + 2 * tokens * (outputs + inputs),
        flops=2 * tokens * outputs * inputs,
        rivals={
            "torch_ms": Rival(
                lambda: (_normal(place, tokens, inputs), _normal(place, outputs, inputs)),
                lambda operands: functional.linear(*operands),
            )
        },
    )


def int4_linear(place: Place, sizes: Sizes, tokens: int) -> Operation:
    """Return the down projection with weights of 4 bits in groups of 32 (`--quantization int4`).

    torch multiplies by the weight in bfloat16.
    """
    outputs, inputs = sizes.hidden, sizes.inner

    def make() -> tuple[Tensor, GroupedWords]:
        (words,) = pack_for_gpu([quantize_to_4_bits(_normal(place, outputs, inputs))])
        return _normal(place, tokens, inputs), words

    def run(operands: tuple[Tensor, GroupedWords]) -> Tensor:
        return linear_grouped(operands[0], GroupedMatrix((operands[1],), place.dtype), None)

    def error(operands: tuple[Tensor, GroupedWords]) -> float:
        x, words = operands
        return relative_error(run(operands), x.to(torch.float64) @ words.floats().double().t())

    return Operation(
        make=make,
        run=run,
        error=error,
        tolerance=2 * TOLERANCES[place.dtype],
        num_bytes=outputs * inputs * 9 // 16 + 2 * tokens * (outputs + inputs),
        flops=2 * tokens * outputs * inputs,
        rivals={
            "torch_ms": Rival(
                lambda: (_normal(place, tokens, inputs), _normal(place, outputs, inputs)),
                lambda operands: functional.linear(*operands),
            )
        },
    )


OPERATIONS: dict[str, Make] = {
    "rms_norm": norm,
    "rms_norm behind the residual sum": residual_norm,
    "rotation and store": rotation,
    "silu gate": gating,
    "fp8 linear": fp8_linear,
    "int4 linear": int4_linear,
}


def experts(place: Place, mixture: Mixture, tokens: int) -> Operation:
    """Return the mixture of experts after its router; bytes are those of the selected experts."""
    _, count, active, hidden, inner = mixture
    up = _normal(place, count, 2 * inner, hidden) * hidden**-0.5
    down = _normal(place, count, hidden, inner) * inner**-0.5
    stacked = StackedExperts(up, down, "silu")

    def make() -> tuple[Tensor, Tensor, Tensor]:
        scores = torch.rand(tokens, count, device=place.device)
        chosen = scores.topk(active, dim=-1)
        weights = chosen.values / chosen.values.sum(-1, keepdim=True)
        return _normal(place, tokens, hidden), chosen.indices, weights

    def error(inputs: tuple[Tensor, Tensor, Tensor]) -> float:
        x, chosen, weights = inputs
        got = run_stacked(x, chosen, weights, stacked)
        expected = [_by_experts(x[at], chosen[at], weights[at], up, down) for at in checked]
        return relative_error(got[checked], torch.stack(expected))

    checked = list(range(0, tokens, max(tokens // NUM_CHECKED_TOKENS, 1)))
    touched = count * (1 - (1 - active / count) ** tokens)
    return Operation(
        make=make,
        run=lambda inputs: run_stacked(inputs[0], inputs[1], inputs[2], stacked),
        error=error,
        tolerance=TOLERANCES[place.dtype],
        num_bytes=2 * (3 * touched * hidden * inner + 2 * tokens * hidden),
        flops=6 * tokens * active * hidden * inner,
        input_bytes=2 * tokens * hidden,
    )


def _by_experts(x: Tensor, chosen: Tensor, weights: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Return one token's sum over its experts, of shape [hidden] and type float64.

    Args:
        x: Hidden state, of shape [hidden].
        chosen: Selected experts.
        weights: Their weights.
        up: As in StackedExperts.
        down: As in StackedExperts.
    """
    total = torch.zeros(len(x), dtype=torch.float64, device=x.device)
    for expert, weight in zip(chosen.tolist(), weights.tolist(), strict=True):
        first, second = (up[expert].to(torch.float64) @ x.to(torch.float64)).chunk(2)
        total += weight * (down[expert].to(torch.float64) @ (functional.silu(first) * second))
    return total


SAMPLING_KINDS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top-p 0.9": {"temperature": 0.8, "top_p": 0.9},
    "top-k 50": {"temperature": 0.8, "top_k": 50},
}
"""Enabled sampling fields of each kind."""


def sampling(place: Place, vocabulary: int, kind: str) -> Operation:
    """Return the sampling operation.

    The error is the share of rows that sample another token than the reference on the host. Both
    use the same random numbers; the reference sums in float64, so only values at a boundary should
    differ.
    """
    rows, fields = 64, {"top_p": 1.0, "top_k": 0, "min_p": 0.0, **SAMPLING_KINDS[kind]}
    floats = {name: np.full(rows, fields[name], np.float32) for name in ("top_p", "min_p")}
    on_host = plan_sampling(
        temperature=np.full(rows, fields["temperature"], np.float32),
        top_k=np.full(rows, fields["top_k"], np.int64),
        seed=np.arange(rows),
        choice=np.zeros(rows, np.int64),
        index=np.arange(rows),
        **floats,
    )
    plan = map_tensors(on_host, lambda column: column.to(place.device))

    def make() -> Tensor:
        return 3 * torch.randn(rows, vocabulary, device=place.device)

    def error(logits: Tensor) -> float:
        expected = sample(logits.cpu().clone(), on_host)
        return float((sample(logits, plan).cpu() != expected).double().mean())

    rivals: dict[str, Rival] = {}
    if kind == "greedy":
        rivals["torch_ms"] = Rival(make, lambda logits: logits.argmax(dim=-1))
    if kind == "temperature":
        rivals["torch_ms"] = Rival(make, _by_torch)
    return Operation(
        make=make,
        run=lambda logits: sample(logits, plan),
        error=error,
        tolerance=0.0 if kind == "greedy" else 1 / rows,
        num_bytes=4 * rows * vocabulary,
        rivals=rivals,
    )


def _by_torch(logits: Tensor) -> Any:
    return torch.multinomial((logits / 0.8).softmax(dim=-1), 1)
