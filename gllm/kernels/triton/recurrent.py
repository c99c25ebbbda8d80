"""Convolution and linear recurrences of recurrent layers for GPUs.

Each program updates a part of a state by the tokens of one sequence, one after the other, as the
references do (gllm/kernels/causal_conv.py, gllm/kernels/linear_recurrence.py). Part of the state
are some channels, or some columns of one head, which are independent of the others.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from gllm.kernels.recurrence_inputs import (
    LENGTH_EPSILON,
    RecurrenceInputs,
    RecurrenceParameters,
    ScanInputs,
    ScanParameters,
)
from gllm.kernels.state_plan import StatePlan
from gllm.kernels.triton.activation import activate
from gllm.kernels.triton.kernel_specs import KernelSpec

CHANNELS = 128
"""Channels of a convolution per program."""
COLUMNS = 32
"""Most columns of a head's state per program."""
EPSILON = tl.constexpr(LENGTH_EPSILON)


@triton.jit
def _softplus(x):
    """Return log(1 + exp(x)) of float32 x, also exact where exp(x) is small."""
    power = tl.exp(-tl.abs(x))
    total = 1.0 + power
    # Corrects the rounding of the sum.
    rest = tl.where(total == 1.0, power, tl.log(total) * (power / tl.maximum(total - 1.0, 1e-30)))
    return tl.maximum(x, 0.0) + rest


@triton.jit
def _convolve(
    x, weight, bias, states, output, segments, groups, channels, x_row,
    SIZE: tl.constexpr, BIAS: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Convolve BLOCK channels of one sequence.

    Grid: (sequences, blocks of channels). x [tokens, channels], x_row elements between tokens;
    weight [SIZE, channels]; bias [channels]; states [slots, SIZE - 1, channels]; output [tokens,
    channels]; segments [segments, 4] and groups [sequences + 1] as in StatePlan. KIND: activation.
    """
    group = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = channel < channels
    begin, end = tl.load(groups + group), tl.load(groups + group + 1)
    for index in range(begin, end):
        first = tl.load(segments + 4 * index).to(tl.int64)
        rows = tl.load(segments + 4 * index + 1)
        source = tl.load(segments + 4 * index + 2).to(tl.int64)
        target = tl.load(segments + 4 * index + 3).to(tl.int64)
        old = states + source * (SIZE - 1) * channels + channel
        new = states + target * (SIZE - 1) * channels + channel
        for token in range(rows):
            total = tl.zeros((BLOCK,), tl.float32)
            if BIAS:
                total += tl.load(bias + channel, there, 0.0)
            for k in tl.static_range(SIZE):
                at = token + k - (SIZE - 1)
                now = tl.load(x + (first + at) * x_row + channel, there & (at >= 0), 0.0)
                is_old = there & (at < 0) & (source >= 0)
                before = tl.load(old + (SIZE - 1 + at) * channels, is_old, 0.0)
                filters = tl.load(weight + k * channels + channel, there, 0.0)
                total += filters * (now.to(tl.float32) + before)
            if KIND != "none":
                total = activate(total, KIND)
            to = output + (first + token) * channels + channel
            tl.store(to, total.to(output.dtype.element_ty), there)
        # From the oldest on: where both slots are the same, no row is read afterwards.
        for i in tl.static_range(SIZE - 1):
            at = rows - (SIZE - 1) + i
            now = tl.load(x + (first + at) * x_row + channel, there & (at >= 0), 0.0)
            is_old = there & (at < 0) & (source >= 0)
            before = tl.load(old + (SIZE - 1 + at) * channels, is_old, 0.0)
            tl.store(new + i * channels, now.to(tl.float32) + before, there)
        tl.debug_barrier()


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    state: Tensor,
    plan: StatePlan,
) -> Tensor:
    """Convolve on a GPU; arguments and result as in gllm.kernels.causal_conv."""
    x = x if x.stride(1) == 1 else x.contiguous()
    output = x.new_empty(x.shape)
    channels = x.shape[1]
    grid = len(plan.groups) - 1, triton.cdiv(channels, CHANNELS)
    _convolve[grid](
        *(x, weight, weight if bias is None else bias, state, output),
        *(plan.segments, plan.groups, channels, x.stride(0)),
        SIZE=len(weight),
        BIAS=bias is not None,
        KIND=activation or "none",
        BLOCK=CHANNELS,
    )
    return output


@triton.jit
def _recur(
    query, key, value, step, beta, rate, bias, skip, states, output, segments, groups,
    heads, repeats, key_dim, value_dim, query_row, key_row, value_row, step_row, beta_row,
    min_step, max_step, query_scale, decay_bound,
    NORMALIZED: tl.constexpr, DELTA: tl.constexpr, PER_KEY: tl.constexpr, SKIP: tl.constexpr,
    KEYS: tl.constexpr, COLUMNS: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """Update COLUMNS columns of the state of one head by the tokens of one sequence.

    Grid: (sequences, heads, blocks of columns). query and key [tokens, heads / repeats, key_dim],
    value and output [tokens, heads, value_dim], step [tokens, heads] or, with PER_KEY, [tokens,
    heads, key_dim], beta [tokens, heads], with the given elements between tokens; rate and skip
    [heads]; bias as step, without tokens; states [slots, heads, key_dim, value_dim]; segments
    [segments, 4] and groups [sequences + 1] as in StatePlan. KEYS: next power of two of key_dim.
    """
    group, head = tl.program_id(0), tl.program_id(1)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    i = tl.arange(0, KEYS)
    is_key, is_column = i < key_dim, column < value_dim
    there = is_key[:, None] & is_column[None, :]
    within = i[:, None] * value_dim + column[None, :]
    speed = tl.load(rate + head)
    shared = (head // repeats) * key_dim + i
    begin, end = tl.load(groups + group), tl.load(groups + group + 1)
    for index in range(begin, end):
        first = tl.load(segments + 4 * index).to(tl.int64)
        rows = tl.load(segments + 4 * index + 1)
        source = tl.load(segments + 4 * index + 2).to(tl.int64)
        target = tl.load(segments + 4 * index + 3).to(tl.int64)
        old = states + (source * heads + head) * key_dim * value_dim + within
        state = tl.load(old, there & (source >= 0), 0.0)
        for row in range(rows):
            token = first + row
            q = tl.load(query + token * query_row + shared, is_key, 0.0).to(tl.float32)
            k = tl.load(key + token * key_row + shared, is_key, 0.0).to(tl.float32)
            at = head * value_dim + column
            v = tl.load(value + token * value_row + at, is_column, 0.0).to(tl.float32)
            if NORMALIZED:
                q *= 1.0 / tl.sqrt(tl.sum(q * q, axis=0) + EPSILON)
                k *= 1.0 / tl.sqrt(tl.sum(k * k, axis=0) + EPSILON)
            q *= query_scale
            if PER_KEY:
                spot = head * key_dim + i
                dt = tl.load(step + token * step_row + spot, is_key, 0.0).to(tl.float32)
                dt += tl.load(bias + spot, is_key, 0.0)
                if BOUNDED:
                    log_decay = decay_bound * tl.sigmoid(-speed * dt)
                else:
                    dt = tl.minimum(tl.maximum(_softplus(dt), min_step), max_step)
                    log_decay = speed * dt
                state *= tl.exp(log_decay)[:, None]
            else:
                dt = tl.load(step + token * step_row + head).to(tl.float32)
                dt = _softplus(dt + tl.load(bias + head))
                dt = tl.minimum(tl.maximum(dt, min_step), max_step)
                state *= tl.exp(speed * dt)
            if DELTA:
                share = tl.sigmoid(tl.load(beta + token * beta_row + head).to(tl.float32))
                change = (v - tl.sum(state * k[:, None], axis=0)) * share
            else:
                change = v * dt
            state += k[:, None] * change[None, :]
            result = tl.sum(state * q[:, None], axis=0)
            if SKIP:
                result += tl.load(skip + head) * v
            to = output + token * heads * value_dim + at
            tl.store(to, result.to(output.dtype.element_ty), is_column)
        new = states + (target * heads + head) * key_dim * value_dim + within
        tl.store(new, state, there)
        # The next segment may read what other threads wrote.
        tl.debug_barrier()


def linear_recurrence(
    inputs: RecurrenceInputs, parameters: RecurrenceParameters, states: Tensor, plan: StatePlan
) -> Tensor:
    """Update states on a GPU; arguments and result as in gllm.kernels.linear_recurrence."""
    query, key, value, step = inputs.query, inputs.key, inputs.value, inputs.step
    beta = step if inputs.beta is None else inputs.beta
    skip = parameters.rate if parameters.skip is None else parameters.skip
    output = value.new_empty(value.shape)
    heads, value_dim = value.shape[1:]
    constants = _constants(
        key.shape[2], value_dim, parameters.is_normalized, inputs.beta is not None, step.dim() == 3
    )
    grid = len(plan.groups) - 1, heads, triton.cdiv(value_dim, constants["COLUMNS"])
    _recur[grid](
        *(query, key, value, step, beta, parameters.rate, parameters.bias, skip, states, output),
        *(plan.segments, plan.groups, heads, heads // key.shape[1], key.shape[2], value_dim),
        *(each.stride(0) for each in (query, key, value, step, beta)),
        *(parameters.min_step, parameters.max_step),
        *(parameters.query_scale, parameters.decay_bound),
        BOUNDED=parameters.decay_bound != 0,
        SKIP=parameters.skip is not None,
        **constants,
    )
    return output


@triton.jit
def _scan(
    value, step, key, query, rate, bias, skip, states, output, segments, groups,
    channels, size, value_row, step_row, key_row, query_row,
    SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update BLOCK channels of the state of one sequence.

    Grid: (sequences, blocks of channels). value, step and output [tokens, channels], key and query
    [tokens, size], with the given elements between tokens; rate [size, channels]; bias and skip
    [channels]; states [slots, size, channels]; segments [segments, 4] and groups [sequences + 1]
    as in StatePlan. SIZE: next power of two of size.
    """
    group = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    i = tl.arange(0, SIZE)
    is_channel, is_element = channel < channels, i < size
    there = is_element[:, None] & is_channel[None, :]
    within = i[:, None] * channels + channel[None, :]
    speed = tl.load(rate + within, there, 0.0)
    shift, share = (
        tl.load(bias + channel, is_channel, 0.0),
        tl.load(skip + channel, is_channel, 0.0),
    )
    begin, end = tl.load(groups + group), tl.load(groups + group + 1)
    for index in range(begin, end):
        first = tl.load(segments + 4 * index).to(tl.int64)
        rows = tl.load(segments + 4 * index + 1)
        source = tl.load(segments + 4 * index + 2).to(tl.int64)
        target = tl.load(segments + 4 * index + 3).to(tl.int64)
        old = states + source * size * channels + within
        state = tl.load(old, there & (source >= 0), 0.0)
        for row in range(rows):
            token = first + row
            v = tl.load(value + token * value_row + channel, is_channel, 0.0).to(tl.float32)
            dt = tl.load(step + token * step_row + channel, is_channel, 0.0).to(tl.float32)
            k = tl.load(key + token * key_row + i, is_element, 0.0).to(tl.float32)
            q = tl.load(query + token * query_row + i, is_element, 0.0).to(tl.float32)
            dt = _softplus(dt + shift)
            state = state * tl.exp(speed * dt[None, :]) + k[:, None] * (v * dt)[None, :]
            result = tl.sum(state * q[:, None], axis=0) + share * v
            to = output + token * channels + channel
            tl.store(to, result.to(output.dtype.element_ty), is_channel)
        tl.store(states + target * size * channels + within, state, there)
        # The next segment may read what other threads wrote.
        tl.debug_barrier()


def selective_scan(
    inputs: ScanInputs, parameters: ScanParameters, states: Tensor, plan: StatePlan
) -> Tensor:
    """Update states on a GPU; arguments and result as in gllm.kernels.selective_scan."""
    value, step, key, query = inputs.value, inputs.step, inputs.key, inputs.query
    output = value.new_empty(value.shape)
    channels, size = value.shape[1], key.shape[1]
    _scan[len(plan.groups) - 1, triton.cdiv(channels, CHANNELS)](
        *(value, step, key, query, parameters.rate, parameters.bias, parameters.skip),
        *(states, output, plan.segments, plan.groups, channels, size),
        *(each.stride(0) for each in (value, step, key, query)),
        SIZE=triton.next_power_of_2(size),
        BLOCK=CHANNELS,
    )
    return output


def _constants(
    key_dim: int, value_dim: int, is_normalized: bool, has_delta: bool, is_per_key: bool
) -> dict[str, Any]:
    return {
        "NORMALIZED": is_normalized,
        "DELTA": has_delta,
        "PER_KEY": is_per_key,
        "KEYS": triton.next_power_of_2(key_dim),
        "COLUMNS": min(triton.next_power_of_2(value_dim), COLUMNS),
    }


def _compiled_recurrence(
    label: str, kind: str, has_skip: bool, *sizes: Any, is_bounded: bool = False
) -> KernelSpec:
    tensors = "query", "key", "value", "step", "beta", "output"
    signature = {
        **dict.fromkeys(tensors, f"*{kind}"),
        **dict.fromkeys(("rate", "bias", "skip", "states"), "*fp32"),
        **dict.fromkeys(("segments", "groups"), "*i32"),
        **dict.fromkeys(("heads", "repeats", "key_dim", "value_dim"), "i32"),
        **dict.fromkeys(("query_row", "key_row", "value_row", "step_row", "beta_row"), "i32"),
        **dict.fromkeys(("min_step", "max_step", "query_scale", "decay_bound"), "fp32"),
    }
    constants = _constants(*sizes) | {"SKIP": has_skip, "BOUNDED": is_bounded}
    return KernelSpec(label, _recur, signature, constants)


def _compiled_scan(label: str, kind: str, size: int) -> KernelSpec:
    signature = {
        **dict.fromkeys(("value", "step", "key", "query", "output"), f"*{kind}"),
        **dict.fromkeys(("rate", "bias", "skip", "states"), "*fp32"),
        **dict.fromkeys(("segments", "groups"), "*i32"),
        **dict.fromkeys(("channels", "size"), "i32"),
        **dict.fromkeys(("value_row", "step_row", "key_row", "query_row"), "i32"),
    }
    constants = {"SIZE": triton.next_power_of_2(size), "BLOCK": CHANNELS}
    return KernelSpec(label, _scan, signature, constants)


def _compiled_convolution(label: str, kind: str, size: int, activation: str) -> KernelSpec:
    signature = {
        **dict.fromkeys(("x", "output"), f"*{kind}"),
        **dict.fromkeys(("weight", "bias", "states"), "*fp32"),
        **dict.fromkeys(("segments", "groups"), "*i32"),
        **dict.fromkeys(("channels", "x_row"), "i32"),
    }
    constants = {"SIZE": size, "BIAS": False, "KIND": activation, "BLOCK": CHANNELS}
    return KernelSpec(label, _convolve, signature, constants)


KERNEL_SPECS = [
    _compiled_recurrence("delta rule, 128 x 128, bf16", "bf16", False, 128, 128, True, True, False),
    _compiled_recurrence("decay per key, fp16", "fp16", False, 128, 128, True, True, True),
    _compiled_recurrence(
        *("bounded decay per key, bf16", "bf16", False, 128, 128, True, True, True),
        is_bounded=True,
    ),
    _compiled_recurrence("Mamba 2, 128 x 64, bf16", "bf16", True, 128, 64, False, False, False),
    _compiled_scan("Mamba 1, 16, bf16", "bf16", 16),
    _compiled_convolution("4 tokens, silu, bf16", "bf16", 4, "silu"),
    _compiled_convolution("3 tokens, fp16", "fp16", 3, "none"),
]
