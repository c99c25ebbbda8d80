"""Linear recurrences whose state is a matrix per head: gated delta rule and selective state update.

The state S [key_dim, value_dim] of a head is updated by each token with key k, value v, query q and
a step a that sets its decay exp(rate * a):

- gated delta rule: S = decay * S + k (beta * (v - k^T (decay * S)))^T. The value that the state has
  for the key is replaced in part. Source: Yang et al., "Gated Delta Networks" (2024), equation 10;
  with a decay for each element of the key: Kimi Team, "Kimi Linear" (2025), equation 1.
- selective state update: S = decay * S + k (a * v)^T. Source: Dao and Gu, "Transformers are SSMs"
  (2024), section 6; the key is its B, the query its C, the value its x.

The output is S^T q. Every token is computed like this in float32, one after the other, also in
prefill chunks: results do not depend on chunks, and equal those of decodes.
"""

import torch
from torch import Tensor
from torch.nn import functional

from gllm.kernels.native.library import (
    KernelLibrary,
    RecurrenceArguments,
    library_for,
    plan_arguments,
)
from gllm.kernels.recurrence_inputs import (
    LENGTH_EPSILON,
    RecurrenceInputs,
    RecurrenceParameters,
)
from gllm.kernels.state_plan import StatePlan, read_state


def linear_recurrence(
    inputs: RecurrenceInputs, parameters: RecurrenceParameters, states: Tensor, plan: StatePlan
) -> Tensor:
    """Update the states by the tokens of a step and return the outputs.

    Args:
        inputs: projected inputs of the tokens.
        parameters: weights and constants.
        states: [slots, heads, key_dim, value_dim] float32; updated in place.
        plan: states of the step.

    Returns:
        [tokens, heads, value_dim] of the value's dtype.
    """
    if inputs.value.is_cuda:
        from gllm.kernels.triton import recurrent as gpu

        return gpu.linear_recurrence(inputs, parameters, states, plan)
    library = library_for(inputs.value, "recurrence")
    if library is not None:
        return _native(library, inputs, parameters, states, plan)
    value = inputs.value
    repeats = value.shape[1] // inputs.key.shape[1]
    query, key = (_lengthen(one, parameters.is_normalized) for one in (inputs.query, inputs.key))
    query, key = (one.repeat_interleave(repeats, dim=1) for one in (query, key))
    query = query * parameters.query_scale
    biased = inputs.step.to(torch.float32) + parameters.bias
    if biased.dim() == 2:
        biased = biased[..., None]
    step = functional.softplus(biased).clamp(parameters.min_step, parameters.max_step)
    rate = parameters.rate[:, None]
    if parameters.decay_bound:
        decay = (parameters.decay_bound * (-rate * biased).sigmoid()).exp()
    else:
        decay = (rate * step).exp()
    beta = None if inputs.beta is None else inputs.beta.to(torch.float32).sigmoid()[..., None]
    output = torch.empty_like(value, memory_format=torch.contiguous_format)
    values = value.to(torch.float32)
    for first, rows, source, destination in plan.segments.tolist():
        state = read_state(states, source).clone()
        for t in range(first, first + rows):
            state *= decay[t][..., None]
            if beta is None:
                change = values[t] * step[t]
            else:
                change = (values[t] - (state * key[t][..., None]).sum(dim=1)) * beta[t]
            state += key[t][..., None] * change[:, None]
            result = (state * query[t][..., None]).sum(dim=1)
            skip = parameters.skip
            output[t] = result if skip is None else result + skip[:, None] * values[t]
        states[destination] = state
    return output


def _lengthen(x: Tensor, is_normalized: bool) -> Tensor:
    """Return x [..., n] in float32, scaled to length 1 if `is_normalized`."""
    x = x.to(torch.float32)
    if not is_normalized:
        return x
    return x * (x.square().sum(dim=-1, keepdim=True) + LENGTH_EPSILON).rsqrt()


def _native(
    library: KernelLibrary,
    inputs: RecurrenceInputs,
    parameters: RecurrenceParameters,
    states: Tensor,
    plan: StatePlan,
) -> Tensor:
    """Compute by the compiled kernel."""
    query, key, value, step, beta = (
        *(inputs.query, inputs.key, inputs.value, inputs.step),
        inputs.beta,
    )
    output = library.empty(value.shape, value.dtype)
    rows = [one.stride(0) for one in (query, key, value, step)]
    library(
        RecurrenceArguments(
            plan_arguments(plan),
            *(query, key, value, step, beta),
            *(parameters.rate, parameters.bias, parameters.skip, states, output),
            *(value.shape[1], key.shape[1], key.shape[2], value.shape[2]),
            *(*rows, 0 if beta is None else beta.stride(0)),
            *(parameters.min_step, parameters.max_step),
            *(parameters.query_scale, parameters.decay_bound),
            *(parameters.is_normalized, step.dim() == 3, value.dtype),
        )
    )
    return output
