"""Times of single operators of a model's layers, as one rank of a stage computes them.

Norms include the residual that they add, the rotary embedding includes the write of keys and
values, and the up projection of a gated MLP includes the activation, because gllm's kernels do.
"""

import time
from collections.abc import Callable, Sequence
from statistics import median, pstdev
from typing import NamedTuple

import torch
from torch import Tensor

from gllm.commands.profile.span import StepRows, TimedSpan
from gllm.kernels.activation import apply_activation
from gllm.kernels.attention import paged_attention
from gllm.kernels.gated_linear import GatedMatrix, gated_linear
from gllm.kernels.qkv import rotate_and_store
from gllm.models.attention import Attention
from gllm.models.feed_forward import MLP
from gllm.models.layers import DecoderLayer
from gllm.runtime.worker.batch import Batch

WARM_UPS = 2
"""Calls that are not timed, as in Vidur."""
MS_PER_SECOND = 1e3


class OperatorTime(NamedTuple):
    """Measured time of an operator: median and standard deviation over repeats, in milliseconds."""

    median: float
    deviation: float
    """Standard deviation of the repeats."""


def time_operator(run: Callable[[], object], repeats: int, device: torch.device) -> OperatorTime:
    """Call an operator repeatedly and return its measured time, after calls that are not timed.

    Args:
        run: calls the operator once.
        repeats: number of timed calls.
        device: a CPU, for CPU time of this thread, or a GPU, for time between CUDA events.
    """
    for _ in range(WARM_UPS):
        run()
    times = _time_on_device(run, repeats) if device.type == "cuda" else _time_on_cpu(run, repeats)
    return OperatorTime(median(times), pstdev(times))


def _time_on_cpu(run: Callable[[], object], repeats: int) -> list[float]:
    times = []
    for _ in range(repeats):
        begin = time.thread_time()
        run()
        times.append(MS_PER_SECOND * (time.thread_time() - begin))
    return times


def _time_on_device(run: Callable[[], object], repeats: int) -> list[float]:
    pairs = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in pairs]


class LayerOperators:
    """Times the operators of one transformer layer, the first one of a loaded range of layers.

    Args:
        span: the loaded layers.
        repeats: number of timed calls of each operator.

    Raises:
        ValueError: the layer is not grouped-query attention followed by an MLP.
    """

    def __init__(self, span: TimedSpan, repeats: int) -> None:
        layer = span.executor.stage.layers.layers[0]
        is_plain = isinstance(layer.attention, Attention) and isinstance(layer.mlp, MLP)
        norms = layer.attention_norm, layer.mlp_norm
        if not is_plain or layer.is_parallel or any(norm is None for norm in norms):
            raise ValueError(
                "operators are timed of layers with attention of grouped queries and an MLP; use "
                "`gllm profile` without --operators for this model"
            )
        self._span, self._layer, self._repeats = span, layer, repeats

    def time_tokens(self, num_tokens: int) -> dict[str, float]:
        """Return the milliseconds of all operators but attention, by Vidur's names for them."""
        batch = self._prepare([(0, num_tokens)])
        with torch.inference_mode():
            calls = _list_calls(self._span, self._layer, batch, num_tokens)
            return {name: self._time(run).median for name, run in calls.items()}

    def time_attention(self, rows: StepRows) -> OperatorTime:
        """Return the time of paged attention for sequences with given cached and new tokens."""
        batch = self._prepare(rows)
        layer, executor = self._layer, self._span.executor
        assert isinstance(layer.attention, Attention), "checked above"
        spec = layer.attention.spec
        shape = batch.num_tokens, spec.num_heads, spec.head_dim
        query = torch.ones(shape, dtype=executor.dtype, device=executor.device)
        plan = batch.inputs.attention[spec.window]
        keys, values = executor.layer_caches[0]
        scaling = layer.attention.scaling
        with torch.inference_mode():
            return self._time(lambda: paged_attention(query, keys, values, plan, scaling))

    def _prepare(self, rows: StepRows) -> Batch:
        return self._span.prepare(rows, should_sample=False)[0]

    def _time(self, run: Callable[[], object]) -> OperatorTime:
        return time_operator(run, self._repeats, self._span.executor.device)


def _list_calls(
    span: TimedSpan, layer: DecoderLayer, batch: Batch, num_tokens: int
) -> dict[str, Callable[[], object]]:
    """Return calls of the token-level operators of a layer, on inputs of their shapes."""
    attention, mlp = layer.attention, layer.mlp
    attention_norm, mlp_norm = layer.attention_norm, layer.mlp_norm
    assert isinstance(attention, Attention), "checked above"
    assert isinstance(mlp, MLP), "checked above"
    assert attention_norm is not None, "checked above"
    assert mlp_norm is not None, "checked above"
    executor, spec, up_proj = span.executor, attention.spec, mlp.up_proj
    hidden, delta = span.make_hidden(num_tokens), span.make_hidden(num_tokens)
    num_heads = spec.num_heads + 2 * spec.num_kv_heads
    qkv = attention.qkv_proj(hidden).view(num_tokens, num_heads, spec.head_dim)
    attended = qkv[:, : spec.num_heads].flatten(1).contiguous()
    angles = None
    if spec.rope is not None:
        angles = executor.stage.compute_angles(batch.inputs.positions)[spec.rope]
    slots = batch.inputs.attention[spec.window].slots
    keys, values = executor.layer_caches[0]
    cache, layout = (keys, values), attention.qkv_layout
    calls: dict[str, Callable[[], object]] = {
        "input_layernorm": lambda: attention_norm.add_and_normalize(hidden, delta),
        "attn_pre_proj": lambda: attention.qkv_proj(hidden),
        "attn_rope": lambda: rotate_and_store(qkv, layout, angles, cache, slots),
        "attn_post_proj": lambda: attention.out_proj(attended),
        "post_attention_layernorm": lambda: mlp_norm.add_and_normalize(hidden, delta),
    }
    inner: Tensor
    if isinstance(up_proj, GatedMatrix):
        inner = gated_linear(hidden, up_proj)
        calls["mlp_up_proj"] = lambda: gated_linear(hidden, up_proj)
    else:
        inner = apply_activation(mlp.activation, up_proj(hidden))
        calls["mlp_up_proj"] = lambda: up_proj(hidden)
        calls["mlp_act"] = lambda: apply_activation(mlp.activation, inner)
    calls["mlp_down_proj"] = lambda: mlp.down_proj(inner)
    return calls


def time_embedding(span: TimedSpan, num_tokens: int, repeats: int) -> float:
    """Return the median milliseconds of the token embedding, of a span with the first layer."""
    embedding = span.executor.stage.embedding
    assert embedding is not None, "the span has the first layer"
    inputs = span.prepare([(0, num_tokens)], should_sample=False)[0].inputs
    with torch.inference_mode():
        return time_operator(lambda: embedding(inputs), repeats, span.executor.device).median


def time_lm_head(span: TimedSpan, num_rows: int, repeats: int) -> float:
    """Return the median milliseconds of final norm and LM head, of a span with the last layer."""
    hidden, stage = span.make_hidden(num_rows), span.executor.stage
    with torch.inference_mode():
        compute = stage.compute_logits
        return time_operator(lambda: compute(hidden), repeats, span.executor.device).median


def time_sampler(span: TimedSpan, num_rows: int, repeats: int) -> float:
    """Return the median CPU milliseconds of sampling a token for each of `num_rows` sequences."""
    times: list[float] = []
    rows: Sequence[tuple[int, int]] = [(1, 1)] * num_rows
    for _ in range(WARM_UPS + repeats):
        batch, work = span.prepare(rows)
        output = span.executor.compute(batch, span.make_hidden(work.num_tokens))
        if span.executor.is_asynchronous:
            span.executor.wait(batch)
        begin = time.thread_time()
        span.executor.sample(batch, output)
        times.append(MS_PER_SECOND * (time.thread_time() - begin))
    return median(times[WARM_UPS:])
