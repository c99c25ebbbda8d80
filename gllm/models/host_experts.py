"""Routed experts of a GPU's layer in the memory of the host, whose cores compute them.

The weights are laid out for the compiled CPU kernels. `ExpertRunner`, which the executor of the
device implements, moves hidden states between both and adds the results.
"""

from collections.abc import Callable, Container, Sequence
from typing import Protocol

from torch import Tensor

from gllm.kernels.experts import run_experts
from gllm.kernels.gated_linear import ActivatedMatrix, GatedMatrix
from gllm.kernels.weight_format import Matrix, weight_format


class ExpertRunner(Protocol):
    """Interface of a device that has routed experts computed by the host."""

    def run(
        self,
        experts: "HostExperts",
        x: Tensor,
        expert_ids: Tensor,
        expert_weights: Tensor,
        run_shared: Callable[[], Tensor | None],
    ) -> Tensor:
        """Return the sum of a layer's experts, [tokens, hidden] on the device.

        Args:
            experts: those of the layer.
            x: [tokens, hidden] on the device.
            expert_ids: [tokens, top_k] int64 on the device.
            expert_weights: [tokens, top_k] float32 on the device.
            run_shared: queues the work of the shared expert, and returns its output [tokens,
                hidden]; None without one.
        """


class HostExperts:
    """Routed experts of one layer in the memory of the host."""

    def __init__(
        self,
        gate_up: Sequence[GatedMatrix | ActivatedMatrix],
        down: Sequence[Matrix],
        down_bias: Tensor | None,
    ) -> None:
        """Keep the weights; the arguments are those of `run_experts`."""
        self.gate_up, self.down, self.down_bias = gate_up, down, down_bias
        self.runner: ExpertRunner | None = None
        """Device that the layer is on, once its memory for steps is allocated."""

    def run(
        self,
        x: Tensor,
        expert_ids: Tensor,
        expert_weights: Tensor,
        run_shared: Callable[[], Tensor | None],
    ) -> Tensor:
        """Return the sum of all experts, [tokens, hidden] on the device; see `ExpertRunner`."""
        assert self.runner is not None, "the executor sets the runner before the first step"
        return self.runner.run(self, x, expert_ids, expert_weights, run_shared)

    def compute(
        self,
        x: Tensor,
        expert_ids: Tensor,
        expert_weights: Tensor,
        out: Tensor,
        skipped: Container[int] = (),
    ) -> None:
        """Write the weighted sum of each token's experts to `out`, computed by the host.

        Args:
            x: [tokens, hidden], as all tensors in the memory of the host.
            expert_ids: [tokens, top_k] int64.
            expert_weights: [tokens, top_k] float32.
            out: [tokens, hidden] of x's dtype or float32.
            skipped: experts that the device computes.
        """
        weights = self.gate_up, self.down, self.down_bias
        out.copy_(run_experts(x, expert_ids, expert_weights, *weights, skipped=skipped))

    @property
    def has_exact_weights(self) -> bool:
        """True if `unpack` can return the weights: a device may compute with copies of them."""
        first = self.gate_up[0]
        if isinstance(first, ActivatedMatrix):
            return False
        return all(weight_format(each.format).has_lookup for each in (first.gate_up, self.down[0]))

    @property
    def activation(self) -> str:
        """Name of the gate's activation."""
        return self.gate_up[0].activation

    def unpack(self, expert: int) -> list[Tensor]:
        """Return the weights of an expert as `StackedExperts` has them, in the order of its fields.

        Biases that there are not are left out.
        """
        gated = self.gate_up[expert]
        assert isinstance(gated, GatedMatrix), "only gated experts are stacked"
        down = self.down[expert]
        tensors = [
            weight_format(gated.gate_up.format).unpack(gated.gate_up),
            weight_format(down.format).unpack(down),
        ]
        if gated.bias is not None:
            tensors.append(gated.bias)
        if self.down_bias is not None:
            tensors.append(self.down_bias[expert])
        return tensors
