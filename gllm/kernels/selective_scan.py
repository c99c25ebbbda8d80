"""Selective scan of Mamba 1: a state of some elements per channel, each with a decay of its own.

The state S [size, channels] is updated by each token with key k, query q, value v and step a per
channel: S = exp(rate * a) * S + k (a * v)^T; the output is S^T q + skip * v. Source: Gu and Dao,
"Mamba" (2023), section 3; the key is its B, the query its C, the value its x.

Every token is computed like this in float32, one after the other, also in prefill chunks: results
do not depend on chunks, and equal those of decodes.
"""

import torch
from torch import Tensor
from torch.nn import functional

from gllm.kernels.native.library import ScanArguments, library_for, plan_arguments
from gllm.kernels.recurrence_inputs import ScanInputs, ScanParameters
from gllm.kernels.state_plan import StatePlan, read_state


def selective_scan(
    inputs: ScanInputs, parameters: ScanParameters, states: Tensor, plan: StatePlan
) -> Tensor:
    """Update the states by the tokens of a step and return the outputs.

    Args:
        inputs: projected inputs of the tokens.
        parameters: weights.
        states: [slots, size, channels] float32; updated in place.
        plan: states of the step.

    Returns:
        [tokens, channels] of the value's dtype.
    """
    value, step, key, query = inputs.value, inputs.step, inputs.key, inputs.query
    if value.is_cuda:
        from gllm.kernels.triton import recurrent as gpu

        return gpu.selective_scan(inputs, parameters, states, plan)
    library = library_for(value, "recurrence")
    if library is not None:
        output = library.empty(value.shape, value.dtype)
        library(
            ScanArguments(
                plan_arguments(plan),
                *(value, step, key, query),
                *(parameters.rate, parameters.bias, parameters.skip, states, output),
                *(value.shape[1], key.shape[1]),
                *(one.stride(0) for one in (value, step, key, query)),
                value.dtype,
            )
        )
        return output
    steps = functional.softplus(step.to(torch.float32) + parameters.bias)
    values, keys, queries = (one.to(torch.float32) for one in (value, key, query))
    output = torch.empty_like(value, memory_format=torch.contiguous_format)
    for first, rows, source, destination in plan.segments.tolist():
        state = read_state(states, source).clone()
        for t in range(first, first + rows):
            state *= (parameters.rate * steps[t]).exp()
            state += keys[t][:, None] * (values[t] * steps[t])
            output[t] = (state * queries[t][:, None]).sum(dim=0) + parameters.skip * values[t]
        states[destination] = state
    return output
