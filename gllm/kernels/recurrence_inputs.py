"""Inputs and parameters of a linear recurrence.

`linear_recurrence.py` and `triton/recurrent.py` read them.
"""

from dataclasses import dataclass

from torch import Tensor

LENGTH_EPSILON = 1e-6
"""Added to the squared length of queries and keys that are normalized."""


@dataclass(frozen=True, slots=True)
class RecurrenceInputs:
    """Inputs of a linear recurrence for the tokens of a step; rows may be apart in memory."""

    query: Tensor
    """[tokens, key_heads, key_dim]; Mamba's C. Each serves heads / key_heads neighbouring heads."""
    key: Tensor
    """[tokens, key_heads, key_dim]; Mamba's B."""
    value: Tensor
    """[tokens, heads, value_dim]; Mamba's x."""
    step: Tensor
    """[tokens, heads], or [tokens, heads, key_dim] for a decay per key element; Mamba's dt before
    the bias and softplus."""
    beta: Tensor | None
    """[tokens, heads]: update rate of the delta rule, before the sigmoid; None for the selective
    state update."""


@dataclass(frozen=True, slots=True)
class RecurrenceParameters:
    """Weights and constants of a linear recurrence."""

    rate: Tensor
    """[heads] float32: logarithm of the decay for a step of 1, negative; Mamba's A."""
    bias: Tensor
    """Bias of the step, float32: [heads], or [heads, key_dim]."""
    skip: Tensor | None = None
    """[heads] float32: factor of the value added to the output, Mamba's D; None for none."""
    min_step: float = 0.0
    max_step: float = float("inf")
    """Limits of the step after softplus."""
    query_scale: float = 1.0
    """Factor of the queries."""
    is_normalized: bool = False
    """True if queries and keys are scaled to length 1."""
    decay_bound: float = 0.0
    """If negative, the logarithm of the decay is decay_bound * sigmoid(-rate * (step + bias)), so
    that it has this bound; 0: it is rate * softplus(step + bias)."""


@dataclass(frozen=True, slots=True)
class ScanInputs:
    """Inputs of a selective scan for the tokens of a step; rows may be apart in memory."""

    value: Tensor
    """[tokens, channels]; Mamba's x."""
    step: Tensor
    """[tokens, channels]; Mamba's dt before the bias and softplus."""
    key: Tensor
    """[tokens, size]; Mamba's B."""
    query: Tensor
    """[tokens, size]; Mamba's C."""


@dataclass(frozen=True, slots=True)
class ScanParameters:
    """Weights of a selective scan, in float32."""

    rate: Tensor
    """[size, channels]: logarithm of the decay for a step of 1, negative; Mamba's A."""
    bias: Tensor
    """[channels]: bias of the step."""
    skip: Tensor
    """[channels]: factor of the value that is added to the output; Mamba's D."""
