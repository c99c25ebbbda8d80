"""Gated activations for GPUs.

Formulas and sources: gllm/kernels/activation.py. Here the product is rounded once, after the
multiplication.
"""

import triton
import triton.language as tl
from torch import Tensor

from gllm.kernels.triton.kernel_specs import KernelSpec, TunedConstants
from gllm.kernels.triton.tiles import choose_tiles

KINDS = ("silu", "relu", "relu2", "gelu", "gelu_tanh", "swiglu_oai")
"""Supported activations."""


@triton.jit
def activate(x, KIND: tl.constexpr):
    """Apply the activation KIND, such as "silu", to each element of float32 x.

    Triton device function.
    """
    if KIND == "silu":
        made = x * tl.sigmoid(x)
    elif KIND == "relu":
        made = tl.where(x < 0.0, 0.0, x)
    elif KIND == "relu2":
        made = tl.where(x < 0.0, 0.0, x * x)
    elif KIND == "gelu":
        made = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        tl.static_assert(KIND == "gelu_tanh")
        # (1 + tanh(a)) / 2 is the sigmoid of 2 a; a's factor is the square root of 2 / pi.
        made = x * tl.sigmoid(2.0 * 0.7978845608028654 * (x + 0.044715 * x * x * x))
    return made


@triton.jit
def gate(x, up, KIND: tl.constexpr):
    """Return act(x) * up of float32 x and up, with the activation KIND. Triton device function."""
    if KIND == "swiglu_oai":
        # As in gllm/kernels/activation.py.
        x = tl.where(x > 7.0, 7.0, x)
        up = tl.where(up > 7.0, 7.0, up)
        up = tl.where(up < -7.0, -7.0, up)
        made = x * tl.sigmoid(1.702 * x) * (up + 1.0)
    else:
        made = activate(x, KIND) * up
    return made


@triton.jit
def _gate(both, output, size, row, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """Compute act(gate) * up.

    Grid: (tokens, blocks of BLOCK outputs). both [tokens, 2 * size]: gate, then up, `row` elements
    between tokens; output [tokens, size], contiguous.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = column < size
    gates = tl.load(both + token * row + column, there, 0.0).to(tl.float32)
    others = tl.load(both + token * row + size + column, there, 0.0).to(tl.float32)
    made = gate(gates, others, KIND)
    tl.store(output + token * size + column, made.to(output.dtype.element_ty), there)


def act_and_mul(kind: str, gate_up: Tensor) -> Tensor:
    """Return act(gate) * up, [tokens, n], with a Triton kernel.

    kind is the name of the activation. gate_up [tokens, 2 * n] has the gate in the first n columns
    and the up projection in the others.
    """
    if kind not in KINDS:
        raise ValueError(f"no kernel for the activation {kind!r}")
    gate_up = gate_up if gate_up.stride(1) == 1 else gate_up.contiguous()
    tokens, size = len(gate_up), gate_up.shape[1] // 2
    output = gate_up.new_empty(tokens, size)
    if output.numel():
        use = choose_tiles("activation")
        grid = (tokens, triton.cdiv(size, use["elements"]))
        arguments = (gate_up, output, size, gate_up.stride(0))
        _gate[grid](*arguments, KIND=kind, BLOCK=use["elements"], num_warps=use["warps"])
    return output


def _compiled(kind: str, activation: str) -> KernelSpec:
    signature = {"both": f"*{kind}", "output": f"*{kind}", "size": "i32", "row": "i32"}
    return KernelSpec(
        f"{activation}, {kind}",
        _gate,
        signature,
        {"KIND": activation},
        stages=3,
        aligned=tuple(signature),
        tuned=TunedConstants("activation", {}, lambda use: {"BLOCK": use["elements"]}),
    )


KERNEL_SPECS = [_compiled(kind, activation) for activation in KINDS for kind in ("bf16", "fp16")]
