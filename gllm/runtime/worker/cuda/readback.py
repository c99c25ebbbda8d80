"""Sampled tokens of a device: copies to the host, and a table of last tokens on the device."""

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

from gllm.kernels.logprobs import LogprobTensors, packed_logprobs_width, unpack_logprobs
from gllm.options.limits import MAX_LOGPROBS
from gllm.transport.device_streams import DeviceEvent, DeviceRuntime, DeviceStream

MAX_SCORE_WIDTH = packed_logprobs_width(MAX_LOGPROBS)
"""Largest number of float64 of a packed row of scores."""


class PendingTokens:
    """Outputs of a step while they are copied from the GPU; `read` waits for the copy."""

    def __init__(
        self, tokens: Tensor, scores: Tensor, embeddings: Tensor | None, copied: DeviceEvent
    ) -> None:
        self._tokens, self._scores, self._copied = tokens, scores, copied
        self._embeddings = embeddings

    def read(self) -> tuple[list[int], LogprobTensors, Tensor | None]:
        """Wait for the copies.

        Returns:
            The token of each sampling row, the scores, and embeddings [rows, hidden] float32 or
            None.
        """
        self._copied.synchronize()
        return self._tokens.tolist(), unpack_logprobs(self._scores), self._embeddings


class OutputReadback:
    """Copies sampled tokens, log-probabilities and embeddings from the GPU to pinned host memory.

    The copies run on a stream of their own. There is memory for `max_steps` steps: the tokens of a
    step have been read before the step that reuses its memory is planned.
    """

    def __init__(
        self,
        runtime: DeviceRuntime,
        max_rows: int,
        max_scores: int,
        hidden_size: int,
        max_steps: int,
    ) -> None:
        """Allocate the memory.

        Args:
            runtime: device and its streams.
            max_rows: sampling rows of a step.
            max_scores: scored tokens of a step, of prompts and of outputs.
            hidden_size: elements of an embedding.
            max_steps: steps in flight.
        """
        self._tokens = _ReadbackBuffer(runtime, max_rows, torch.int64, max_steps)
        num_scores = max_scores * MAX_SCORE_WIDTH
        self._scores = _ReadbackBuffer(runtime, num_scores, torch.float64, max_steps)
        num_elements = max_rows * hidden_size
        self._embeddings = _ReadbackBuffer(runtime, num_elements, torch.float32, max_steps)
        self._copied = [runtime.event() for _ in range(max_steps)]
        self._is_gathered: DeviceEvent = runtime.event()
        self._copy_stream: DeviceStream = runtime.stream()
        self._num_steps = 0

    def start_copy(
        self,
        tokens: Tensor,
        scores: list[Tensor],
        stream: DeviceStream,
        embeddings: Tensor | None = None,
    ) -> PendingTokens:
        """Start copying the outputs of a step. Has to be called within `stream`.

        Args:
            tokens: [rows] int64, computed in `stream`, as the other tensors.
            scores: packed, [rows, width] float64 each.
            stream: the compute stream.
            embeddings: [rows, hidden] float32.
        """
        index = self._num_steps % len(self._copied)
        self._num_steps += 1
        if self._num_steps > 1:
            # The device memory is free once the outputs of the previous step are copied.
            stream.wait(self._copied[index - 1])
        width = scores[0].shape[1] if scores else packed_logprobs_width(0)
        num_tokens = self._tokens.gather([tokens])
        num_scores = self._scores.gather([part.flatten() for part in scores])
        num_elements = 0
        if embeddings is not None:
            num_elements = self._embeddings.gather([embeddings.flatten()])
        stream.record(self._is_gathered)
        self._copy_stream.wait(self._is_gathered)
        host_embeddings = None
        with self._copy_stream.current():
            host_tokens = self._tokens.copy_to_host(num_tokens, index)
            host_scores = self._scores.copy_to_host(num_scores, index)
            if embeddings is not None:
                flat = self._embeddings.copy_to_host(num_elements, index)
                host_embeddings = flat.view(embeddings.shape)
        copied = self._copied[index]
        self._copy_stream.record(copied)
        return PendingTokens(host_tokens, host_scores.view(-1, width), host_embeddings, copied)


class _ReadbackBuffer:
    """Memory for one kind of output: once on the device and `max_steps` times on the host.

    The outputs are gathered in memory of their own, because the memory of an operation's result is
    reused by the next operation.
    """

    def __init__(
        self, runtime: DeviceRuntime, max_elements: int, dtype: torch.dtype, max_steps: int
    ) -> None:
        self._pinned = [runtime.allocate_pinned((max_elements,), dtype) for _ in range(max_steps)]
        self._device = runtime.zeros((max_elements,), dtype)

    def gather(self, parts: list[Tensor]) -> int:
        """Concatenate parts [n] of the device; return the number of elements."""
        end = 0
        for part in parts:
            begin, end = end, end + len(part)
            self._device[begin:end].copy_(part)
        return end

    def copy_to_host(self, count: int, index: int) -> Tensor:
        """Start copying `count` elements to the host; return the pinned memory [count]."""
        target = self._pinned[index][:count]
        if count:
            target.copy_(self._device[:count], non_blocking=True)
        return target


class LastTokenTable:
    """GPU table of each sequence's last sampled token, from which the next step reads its input.

    So the next step can start before the host knows the token. The host assigns an entry (slot) of
    the table to each sequence.
    """

    def __init__(self, runtime: DeviceRuntime, num_slots: int) -> None:
        self.tokens = runtime.zeros((num_slots,), torch.int64)
        """[slots], on the device."""
        self._slots: OrderedDict[int, int] = OrderedDict()
        """Slot by sequence, the one that sampled longest ago first."""
        self._free = list(range(num_slots))

    def assign(self, seqs: Sequence[int]) -> Tensor:
        """Return slots [seqs] int64 for the next tokens of sequences.

        A full table takes the slot of the sequence that sampled longest ago.
        """
        slots = []
        for seq in seqs:
            slot = self._slots.pop(seq, None)
            if slot is None:
                slot = self._free.pop() if self._free else self._slots.popitem(last=False)[1]
            self._slots[seq] = slot
            slots.append(slot)
        return torch.tensor(slots, dtype=torch.int64)

    def find(self, seqs: Sequence[int]) -> Tensor:
        """Return the slots [seqs] int64 of sequences.

        A sequence whose step failed may have none: it has ended, and its row is discarded.
        """
        return torch.tensor([self._slots.get(seq, 0) for seq in seqs], dtype=torch.int64)

    def release(self, seqs: Sequence[int]) -> None:
        """Free the slots of sequences."""
        for seq in seqs:
            slot = self._slots.pop(seq, None)
            if slot is not None:
                self._free.append(slot)
