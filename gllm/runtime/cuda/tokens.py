"""Sampled tokens and their scores: to the host, and to the next step without a way over the host.

Owns the memory of both ways and their order. Knows nothing of how tokens are drawn.
"""

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

from gllm.config.limits import MAX_LOGPROBS
from gllm.kernels.logprobs import LogprobTensors, packed_logprobs_width, unpack_logprobs
from gllm.transport.device_streams import DeviceEvent, DeviceRuntime, DeviceStream

WIDEST = packed_logprobs_width(MAX_LOGPROBS)
"""Numbers of a scored row at most."""


class PendingTokens:
    """A step's tokens and scores on their way to the host."""

    def __init__(
        self, tokens: Tensor, scores: Tensor, embeddings: Tensor | None, arrived: DeviceEvent
    ) -> None:
        self._tokens, self._scores, self._arrived = tokens, scores, arrived
        self._embeddings = embeddings

    def read(self) -> tuple[list[int], LogprobTensors, Tensor | None]:
        """The token of each sampling row, what was scored, and embeddings [rows, hidden] float32
        where there are some; the host waits for them."""
        self._arrived.synchronize()
        return self._tokens.tolist(), unpack_logprobs(self._scores), self._embeddings


class TokenReturn:
    """Takes every step's tokens and scores to the host, beside what the device computes
    meanwhile."""

    def __init__(
        self, queues: DeviceRuntime, rows: int, scored: int, hidden: int, steps: int
    ) -> None:
        """`rows`, `scored`: most sampling and scored rows of a step; `hidden`: numbers of an
        embedding; `steps`: most in flight. A step's tokens have been read before the one `steps`
        behind it is planned."""
        self._tokens = _Way(queues, rows, torch.int64, steps)
        self._scores = _Way(queues, scored * WIDEST, torch.float64, steps)
        self._embeddings = _Way(queues, rows * hidden, torch.float32, steps)
        self._arrived = [queues.event() for _ in range(steps)]
        self._sampled: DeviceEvent = queues.event()
        self._returns: DeviceStream = queues.stream()
        self._steps = 0

    def put(
        self,
        tokens: Tensor,
        scores: list[Tensor],
        stream: DeviceStream,
        embeddings: Tensor | None = None,
    ) -> PendingTokens:
        """Send tokens [rows] int64, scores [rows, width] float64, packed, and embeddings [rows,
        hidden] float32, which `stream` makes, on their way. To be called within it."""
        index = self._steps % len(self._arrived)
        self._steps += 1
        if self._steps > 1:
            # The tokens of the step before have left.
            stream.wait(self._arrived[index - 1])
        width = scores[0].shape[1] if scores else packed_logprobs_width(0)
        parts = [part.flatten() for part in scores]
        ways = [(self._tokens, [tokens]), (self._scores, parts)]
        if embeddings is not None:
            ways.append((self._embeddings, [embeddings.flatten()]))
        sent = [(way, way.gather(pieces)) for way, pieces in ways]
        stream.record(self._sampled)
        self._returns.wait(self._sampled)
        with self._returns.current():
            targets = [way.leave(count, index) for way, count in sent]
        self._returns.record(self._arrived[index])
        sent_rows = None if embeddings is None else targets[2].view(embeddings.shape)
        return PendingTokens(
            targets[0], targets[1].view(-1, width), sent_rows, self._arrived[index]
        )


class _Way:
    """Memory on the device that one kind of numbers leaves from, and on the host where it arrives.

    Memory of its own, for that of an operation's result is the next operation's at once.
    """

    def __init__(self, queues: DeviceRuntime, most: int, dtype: torch.dtype, steps: int) -> None:
        self._pinned = [queues.pinned((most,), dtype) for _ in range(steps)]
        self._device = queues.zeros((most,), dtype)

    def gather(self, parts: list[Tensor]) -> int:
        """Put parts [n], made on the device, one behind the other; how many numbers they are."""
        end = 0
        for part in parts:
            begin, end = end, end + len(part)
            self._device[begin:end].copy_(part)
        return end

    def leave(self, count: int, index: int) -> Tensor:
        """Copy so many numbers to the host: memory [count] where they will be."""
        target = self._pinned[index][:count]
        if count:
            target.copy_(self._device[:count], non_blocking=True)
        return target


class LastTokens:
    """The last token of sequences, on the device: places for as many as steps in flight can name.

    The host knows who has which place; what is in it only the device knows.
    """

    def __init__(self, queues: DeviceRuntime, places: int) -> None:
        self.table = queues.zeros((places,), torch.int64)
        """[places]"""
        self._places: OrderedDict[int, int] = OrderedDict()
        """By sequence, the one that sampled longest ago first."""
        self._free = list(range(places))

    def give(self, seqs: Sequence[int]) -> Tensor:
        """[seqs] int64: the places that the tokens of sequences will be put to; whoever sampled
        longest ago loses his."""
        places = []
        for seq in seqs:
            place = self._places.pop(seq, None)
            if place is None:
                place = self._free.pop() if self._free else self._places.popitem(last=False)[1]
            self._places[seq] = place
            places.append(place)
        return torch.tensor(places, dtype=torch.int64)

    def find(self, seqs: Sequence[int]) -> Tensor:
        """[seqs] int64: their places. A sequence whose step failed may have none: it has ended, and
        what is computed for it is discarded."""
        return torch.tensor([self._places.get(seq, 0) for seq in seqs], dtype=torch.int64)

    def release(self, seqs: Sequence[int]) -> None:
        """Forget sequences."""
        for seq in seqs:
            place = self._places.pop(seq, None)
            if place is not None:
                self._free.append(place)
