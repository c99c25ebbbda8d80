"""Causal depthwise convolution over the tokens of a sequence, with the last inputs as its state."""

import torch
from torch import Tensor

from gllm.kernels.activation import ACTIVATIONS
from gllm.kernels.native.library import ACTIVATIONS as COMPILED
from gllm.kernels.native.library import ConvolutionArguments, library_for, plan_arguments
from gllm.kernels.state_plan import StatePlan, read_state


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    state: Tensor,
    plan: StatePlan,
) -> Tensor:
    """Convolve each channel with its own filter over the current token and those before it.

    Output t is act(sum over k of weight[k] * x[t - size + 1 + k] + bias). Inputs before the tokens
    of a segment are those of its state.

    Args:
        x: [tokens, channels]; rows may be apart in memory.
        weight: [size, channels] float32.
        bias: [channels] float32; None for none.
        activation: a name of ACTIVATIONS; None for none.
        state: [slots, size - 1, channels] float32: last inputs, oldest first. Updated in place.
        plan: states of the step.

    Returns:
        [tokens, channels] of x's dtype.
    """
    if x.is_cuda:
        from gllm.kernels.triton import recurrent as gpu

        return gpu.causal_conv(x, weight, bias, activation, state, plan)
    library = library_for(x, "recurrence")
    if library is not None and x.stride(1) == 1 and (activation is None or activation in COMPILED):
        output = library.empty(x.shape, x.dtype)
        library(
            ConvolutionArguments(
                plan_arguments(plan),
                *(x, weight, bias, state, output),
                *(x.shape[1], len(weight), x.stride(0)),
                0 if activation is None else COMPILED[activation],
                x.dtype,
            )
        )
        return output
    output = torch.empty_like(x, memory_format=torch.contiguous_format)
    for first, rows, source, destination in plan.segments.tolist():
        inputs = torch.cat((read_state(state, source), x[first : first + rows].to(torch.float32)))
        windows = inputs.unfold(0, len(weight), 1)
        sums = (windows * weight.t()).sum(dim=-1)
        sums = sums if bias is None else sums + bias
        output[first : first + rows] = sums if activation is None else ACTIVATIONS[activation](sums)
        state[destination] = inputs[rows:]
    return output
