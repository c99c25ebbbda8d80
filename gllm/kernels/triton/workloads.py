"""Workloads that time kernels for tuning: operations with the tensor sizes of served models.

Results are checked against the same operation on the CPU in float32, which is the reference.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache, partial
from itertools import product
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from gllm.kernels import (
    activation,
    attention,
    experts,
    grouped_weight,
    linear_fp8,
    linear_grouped,
    qkv,
    rms_norm,
)
from gllm.kernels.attention_plan import (
    AttentionPlan,
    PagedBatch,
    build_device_tables,
    plan_attention,
)
from gllm.kernels.attention_scaling import AttentionScaling
from gllm.kernels.fp8_weights import Fp8Matrix, Fp8Stack
from gllm.kernels.grouped_words import GroupedStack
from gllm.kernels.qkv_layout import QKVLayout
from gllm.kernels.triton import attention_shapes
from gllm.kernels.triton import experts as gpu_experts
from gllm.kernels.triton import linear_fp8 as gpu_linear
from gllm.kernels.triton import linear_grouped as gpu_grouped
from gllm.kernels.triton import qkv as gpu_qkv
from gllm.kernels.triton import rms_norm as gpu_norm
from gllm.kernels.triton.activation import act_and_mul
from gllm.kernels.triton.attention import paged_attention
from gllm.kernels.triton.attention_shapes import AttentionShape

Stack = Tensor | Fp8Stack | GroupedStack
S = TypeVar("S", Tensor, Fp8Stack, GroupedStack, Stack)
BLOCK = 128
"""Outputs and inputs of a block of weights in 8-bit floats."""
ROUNDED = {torch.float32: 2e-3, torch.bfloat16: 2e-2}
"""Largest error, in norms, where tensor cores multiply; they round float32 to 10 bits."""
ROUNDED_TO_8_BITS = 8e-2
"""The same where activations become 8-bit floats, once or twice in a row."""


@dataclass(frozen=True)
class PreparedTuningCase:
    """GPU kernel call with allocated tensors, and the result it should have, for tuning."""

    run: Callable[[], Tensor]
    """Runs the kernel once and returns its result."""
    expected: Tensor
    """float32, of the result's shape."""
    limit: float
    """Largest relative error of a correct result: norm of the difference / norm of `expected`."""

    def error(self) -> float:
        """Run the kernel once and return the relative error of its result; NaN if it has NaN."""
        wanted = self.expected
        return float((self.run().to(torch.float32) - wanted).norm() / wanted.norm())


@dataclass(frozen=True)
class TuningCase:
    """Tuning case of a GPU kernel: the table row that it times, and how to prepare it."""

    table: str
    """Name of the table of launch parameters."""
    sizes: Mapping[str, int]
    """Problem sizes, which select the row of the table."""
    label: str
    """Description of the tuning case."""
    prepare: Callable[[torch.device], PreparedTuningCase]
    """Allocates the tensors on a device."""


def _random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def prepare_attention(
    shape: AttentionShape, rows: int, new: int, context: int, device: torch.device
) -> PreparedTuningCase:
    """Prepare the tuning case of attention over `context` tokens for `rows` sequences.

    Each sequence has `new` query tokens at the end of its context: 1 for a decode.
    """
    dtype = torch.float32 if shape.wide else torch.bfloat16
    blocks = -(-context // shape.block_size)
    table = np.random.default_rng(0).permutation(rows * blocks).reshape(rows, blocks)
    decodes = rows if new == 1 else 0
    lengths = np.full(rows, context)
    paged = PagedBatch(
        table, np.arange(rows + 1) * new, lengths, decodes, shape.block_size, rows * blocks
    )
    query = _random(1, rows * new, shape.heads, shape.key_dim).to(dtype)
    keys = _random(2, rows * blocks + 1, shape.block_size, shape.kv_heads, shape.key_dim).to(dtype)
    values = keys[..., : shape.value_dim]
    if not shape.shared:
        values = _random(3, *keys.shape[:3], shape.value_dim).to(dtype)
    scaling = AttentionScaling(shape.key_dim**-0.5)
    plan = plan_attention(paged, torch.float32)
    expected = attention.paged_attention(
        query.to(torch.float32),
        keys.to(torch.float32),
        values.to(torch.float32),
        plan,
        scaling,
    )
    tables = build_device_tables(paged, device)
    plan = AttentionPlan(paged, plan.slots, None, "triton", tables=tables)
    query, keys, values = query.to(device), keys.to(device), values.to(device)
    if shape.shared:
        values = keys[..., : shape.value_dim]
    run = partial(paged_attention, query, keys, values, plan, scaling)
    return PreparedTuningCase(run, expected.to(device), ROUNDED[dtype])


def prepare_linear_fp8(
    tokens: int, outputs: int, inputs: int, device: torch.device
) -> PreparedTuningCase:
    """Prepare the tuning case of a linear layer with an FP8 weight [outputs, inputs]."""
    matrix = _stack(1, outputs, inputs)[0]
    x = _random(4, tokens, inputs).to(torch.bfloat16)
    expected = linear_fp8.linear_fp8(x.to(torch.float32), matrix, None)
    fp8 = device.type == "cuda" and gpu_linear.multiplies_fp8(device)
    codes, scales = matrix.codes.to(device), matrix.scales.to(device)
    matrix = Fp8Matrix(codes, scales, matrix.rows, matrix.columns, matrix.dtype)
    run = partial(gpu_linear.linear_fp8, x.to(device), matrix, None, None, fp8)
    limit = ROUNDED_TO_8_BITS if fp8 else ROUNDED[torch.bfloat16]
    return PreparedTuningCase(run, expected.to(device), limit)


def prepare_linear_grouped(
    tokens: int, outputs: int, inputs: int, device: torch.device
) -> PreparedTuningCase:
    """Prepare the tuning case of a linear layer with a weight [outputs, inputs] of 4 bits."""
    x, words = _random(4, tokens, inputs).to(device, torch.bfloat16), _four_bits(1, outputs, inputs)
    (weight,) = _floats(words)
    expected = functional.linear(x.to(torch.float32), weight.to(device))
    run = partial(gpu_grouped.linear_grouped, x, _moved(words, device)[0], None)
    return PreparedTuningCase(run, expected, ROUNDED[torch.bfloat16])


def prepare_experts(
    tokens: int,
    sizes: tuple[int, int, int, int],
    element: int,
    table: str,
    device: torch.device,
) -> PreparedTuningCase:
    """Prepare the tuning case of a mixture-of-experts layer.

    Args:
        tokens: rows of the batch.
        sizes: number of experts, of selected experts, hidden size, intermediate size.
        element: bytes per element of the activations in the products.
        table: "experts", or "experts_fp8" and "experts_grouped" with weights in FP8 or of 4 bits.
        device: device of the tensors.
    """
    count, top_k, hidden, inner = sizes
    dtype = torch.float32 if element == 4 else torch.bfloat16
    x = _random(5, tokens, hidden).to(dtype)
    shares, chosen = _random(6, tokens, count).softmax(-1).topk(top_k)
    make = _four_bits if table == "experts_grouped" else _stack
    up: Stack = make(count, 2 * inner, hidden)
    down: Stack = make(count, hidden, inner)
    if table == "experts":
        up, down = _floats(up).to(dtype), _floats(down).to(dtype)
    reference = experts.StackedExperts(_floats(up), _floats(down), "silu")
    expected = experts.run_stacked(x.to(torch.float32), chosen, shares, reference)
    x, chosen, shares = x.to(device), chosen.to(device), shares.to(device)
    up, down = _moved(up, device), _moved(down, device)
    run = partial(gpu_experts.run_experts, x, chosen, shares, up, down, "silu", element == 1)
    limit = ROUNDED_TO_8_BITS if element == 1 else ROUNDED[dtype]
    return PreparedTuningCase(run, expected.to(device), limit)


@lru_cache(maxsize=2)
def _stack(count: int, outputs: int, inputs: int) -> Fp8Stack:
    """Return random weights that keep the magnitude of the inputs; cached, as they take seconds."""
    codes = (_random(7, count, outputs, inputs) * 64).clamp(-448, 448).to(torch.float8_e4m3fn)
    blocks = (count, -(-outputs // BLOCK), -(-inputs // BLOCK))
    scales = (_random(8, *blocks).abs() + 0.5) / (64 * inputs**0.5)
    return Fp8Stack(codes, scales, BLOCK, BLOCK, torch.float32)


@lru_cache(maxsize=2)
def _four_bits(count: int, outputs: int, inputs: int) -> GroupedStack:
    """Return random weights of 4 bits that keep the magnitude of the inputs; cached likewise."""
    layout = grouped_weight.GroupLayout(4, 32, zero=8)

    def weight(seed: int) -> grouped_weight.GroupedWeight:
        codes = (_random(seed, outputs, inputs) * 3 + 8).clamp(0, 15).to(torch.uint8)
        scales = (_random(8, outputs, -(-inputs // 32)).abs() + 0.5) / (3 * inputs**0.5)
        rows = grouped_weight.GroupedRows(codes, grouped_weight.GroupScales(scales.half()))
        stored = partial(grouped_weight.slice_rows, rows)
        return grouped_weight.GroupedWeight(layout, (outputs, inputs), 0, stored)

    return linear_grouped.GroupedFormat().stack(count, ([weight(n)] for n in range(count)))


def _floats(weights: Stack) -> Tensor:
    if isinstance(weights, Tensor):
        return weights.to(torch.float32)
    if isinstance(weights, GroupedStack):
        return torch.stack([weights[n].floats() for n in range(weights.shape[0])])
    return torch.stack([linear_fp8.dequantize(weights[n]) for n in range(weights.shape[0])])


def _moved(weights: S, device: torch.device) -> S:
    if isinstance(weights, Tensor):
        return weights.to(device)
    values: dict[str, Any] = {one.name: getattr(weights, one.name) for one in fields(weights)}
    moved = {name: each.to(device) for name, each in values.items() if isinstance(each, Tensor)}
    return type(weights)(**values | moved)


def prepare_experts_sum(
    tokens: int, top_k: int, hidden: int, device: torch.device
) -> PreparedTuningCase:
    """Prepare the tuning case of the weighted sum of the selected experts' outputs."""
    parts = _random(9, tokens, top_k, hidden).to(torch.bfloat16)
    shares, chosen = _random(6, tokens, 2 * top_k).softmax(-1).topk(top_k)
    expected = (parts.to(torch.float32) * shares[:, :, None]).sum(1)
    tensors = [one.to(device) for one in (parts.flatten(0, 1), chosen, shares)]
    run = partial(gpu_experts.sum_expert_outputs, *tensors)
    return PreparedTuningCase(run, expected.to(device), ROUNDED[torch.bfloat16])


def prepare_quantize(tokens: int, inputs: int, device: torch.device) -> PreparedTuningCase:
    """Prepare the tuning case of quantizing activations to FP8; only the scales are checked."""
    x = _random(10, tokens, inputs).to(torch.bfloat16)
    groups = x.to(torch.float32).unflatten(1, (-1, gpu_linear.GROUP))
    expected = groups.abs().amax(-1) / 448
    moved = x.to(device)
    return PreparedTuningCase(lambda: gpu_linear.quantize(moved)[1], expected.to(device), 1e-5)


def prepare_rms_norm(tokens: int, size: int, device: torch.device) -> PreparedTuningCase:
    """Prepare the tuning case of RMSNorm with a residual addition.

    It adds zeros, so that repeated runs give the same result.
    """
    x, weight = _random(11, tokens, size).to(torch.bfloat16), _random(12, size).to(torch.bfloat16)
    expected = rms_norm.rms_norm(x.to(torch.float32), weight.to(torch.float32), 1e-6)
    tensors = x.to(device), torch.zeros_like(x, device=device), weight.to(device)
    run = partial(gpu_norm.add_rms_norm, *tensors, 1e-6)
    return PreparedTuningCase(run, expected.to(device), ROUNDED[torch.bfloat16])


def prepare_activation(tokens: int, size: int, device: torch.device) -> PreparedTuningCase:
    """Prepare the tuning case of the gated activation act(gate) * up."""
    both = _random(13, tokens, 2 * size).to(torch.bfloat16)
    expected = activation.act_and_mul("silu", both.to(torch.float32))
    run = partial(act_and_mul, "silu", both.to(device))
    return PreparedTuningCase(run, expected.to(device), ROUNDED[torch.bfloat16])


def prepare_qkv(
    tokens: int, heads: int, kv_heads: int, dim: int, device: torch.device
) -> PreparedTuningCase:
    """Prepare the tuning case of rotary embedding and KV cache write; only queries are checked."""
    fused = _random(14, tokens, heads + 2 * kv_heads, dim).to(torch.bfloat16)
    turns = _random(15, tokens, 1, dim // 2)
    angles, slots = (turns.cos(), turns.sin()), torch.randperm(tokens)
    cache = torch.zeros(2, -(-tokens // 16), 16, kv_heads, dim)
    how = QKVLayout(heads, kv_heads)
    expected = qkv.rotate_and_store(
        fused.to(torch.float32), how, angles, (cache[0], cache[1]), slots
    )
    expected = expected.clone().to(device)
    moved = cache.to(device, torch.bfloat16)
    angles = angles[0].to(device), angles[1].to(device)
    operands = (fused.to(device), how, angles, (moved[0], moved[1]), slots.to(device))
    run = partial(gpu_qkv.rotate_and_store, *operands)
    return PreparedTuningCase(run, expected, ROUNDED[torch.bfloat16])


EXPERT_SHAPES = [(128, 8, 2048, 768), (64, 6, 2048, 1408)]
"""Experts, selected experts, hidden and inner size of Qwen3-30B-A3B and DeepSeek-V2-Lite."""
LINEAR_SHAPES = [
    (4608, 3584),
    (3584, 3584),
    (37_888, 3584),
    (3584, 18_944),
    (28_672, 4096),
    (4096, 14_336),
]
"""Outputs and inputs of the linear maps of Qwen2.5-7B and of a feed-forward of Llama-3.1-8B."""


def list_tuning_cases() -> list[TuningCase]:
    """List the tuning cases of all GPU kernels; each allocates its tensors when it is prepared."""
    return [*_attention(), *_mixtures(), *_others()]


def _attention() -> Iterator[TuningCase]:
    narrow = attention_shapes.HEAD_CONFIGS.items()
    wide = [
        (f"{name}, fp32", attention_shapes.with_float32_queries(shape)) for name, shape in narrow
    ]
    for (label, shape), (table, rows, new, context) in product(
        [*narrow, *wide],
        [
            ("decode", 32, 1, 2048),
            ("decode", 2, 1, 16_384),
            ("prefill", 1, 1024, 1024),
            ("prefill", 1, 256, 8192),
        ],
    ):
        make = partial(prepare_attention, shape, rows, new, context)
        named = f"{label}, {rows} rows of {context}"
        yield TuningCase(table, attention_shapes.tile_lookup_sizes(shape), named, make)


def _mixtures() -> Iterator[TuningCase]:
    elements = {"experts": (2, 4), "experts_fp8": (1, 2, 4), "experts_grouped": (2, 4)}
    kinds = [(table, element) for table, each in elements.items() for element in each]
    for (table, element), maps, sizes, tokens in product(kinds, (1, 2), EXPERT_SHAPES, (32, 1024)):
        named = f"{tokens} tokens, {sizes[0]} experts"
        make = partial(prepare_experts, tokens, sizes, element, table)
        yield TuningCase(table, {"maps": maps, "bytes": element}, named, make)


def _others() -> Iterator[TuningCase]:
    for tokens, (outputs, inputs) in product((1, 16, 32, 64, 1024), LINEAR_SHAPES):
        named = f"{tokens} tokens, {inputs} to {outputs}"
        for table, prepare in (
            ("linear_fp8", prepare_linear_fp8),
            ("linear_grouped", prepare_linear_grouped),
        ):
            make = partial(prepare, tokens, outputs, inputs)
            yield TuningCase(table, {"tokens": tokens}, named, make)
    for tokens, size in product((32, 1024), (2048, 3584, 4096, 8192, 16_384)):
        make = partial(prepare_rms_norm, tokens, size)
        yield TuningCase("rms_norm", {"size": size}, f"{tokens} tokens of {size}", make)
    for tokens in (32, 1024):
        made = {
            "experts_sum": partial(prepare_experts_sum, tokens, 8, 2048),
            "quantize": partial(prepare_quantize, tokens, 18_944),
            "activation": partial(prepare_activation, tokens, 18_944),
            "qkv": partial(prepare_qkv, tokens, 28, 4, 128),
        }
        for table, make_other in made.items():
            yield TuningCase(table, {}, f"{tokens} tokens", make_other)
