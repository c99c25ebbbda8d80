"""Runner of experts that the host computes beside a GPU.

For each layer the device routes the tokens and copies hidden states and choices to pinned memory.
The host waits for that copy, while the device goes on with the shared expert, computes the experts
and copies the sum back. The host thus waits within a step, which no CUDA graph can contain.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from gllm.models.host_experts import HostExperts
from gllm.models.spec.feed_forward import ExpertsSpec
from gllm.transport.device_streams import DeviceRuntime, DeviceStream


class HostExpertRunner:
    """Runs routed experts of a stage on the host; implements ExpertRunner for a GPU's executor.

    Every layer of a step uses the same pinned memory, in the order of the compute stream.
    """

    def __init__(
        self,
        runtime: DeviceRuntime,
        stream: DeviceStream,
        specs: Iterable[ExpertsSpec],
        hidden_size: int,
        dtype: torch.dtype,
        max_tokens: int,
    ) -> None:
        """Allocate pinned memory for the largest step.

        Args:
            runtime: device and its streams.
            stream: compute stream of the stage.
            specs: experts of the stage that are on the host.
            hidden_size: elements of a token's hidden state.
            dtype: dtype of hidden states.
            max_tokens: most tokens of a step.
        """
        self._runtime, self._stream = runtime, stream
        num_choices = max_tokens * max(spec.top_k for spec in specs)
        self._hidden = runtime.allocate_pinned((max_tokens, hidden_size), dtype)
        self._output = runtime.allocate_pinned((max_tokens, hidden_size), dtype)
        self._ids = runtime.allocate_pinned((num_choices,), torch.int64)
        self._weights = runtime.allocate_pinned((num_choices,), torch.float32)
        self._copied = runtime.event()
        """Hidden states and choices of a layer are in pinned memory."""

    def run(
        self,
        experts: HostExperts,
        x: Tensor,
        expert_ids: Tensor,
        expert_weights: Tensor,
        run_shared: Callable[[], Tensor | None],
    ) -> Tensor:
        """Return the sum of a layer's experts; see `ExpertRunner`. Has to be called in the stream.

        The result is that of `run_experts`: the shared expert is added to the rounded sum.
        """
        num_tokens, num_choices = len(x), expert_ids.numel()
        hidden, output = self._hidden[:num_tokens], self._output[:num_tokens]
        ids = self._ids[:num_choices].view(expert_ids.shape)
        weights = self._weights[:num_choices].view(expert_weights.shape)
        for pinned, tensor in ((hidden, x), (ids, expert_ids), (weights, expert_weights)):
            pinned.copy_(tensor, non_blocking=True)
        self._stream.record(self._copied)
        # Queued behind the copies, so that the device has work while the host computes.
        shared = run_shared()
        self._copied.synchronize()
        with self._runtime.host_work():
            experts.compute(hidden, ids, weights, output)
        result = torch.empty_like(x).copy_(output, non_blocking=True)
        return result if shared is None else result + shared
