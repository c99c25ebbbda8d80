"""Sampled tokens: to the host, and to the next step without a way over the host.

Owns the memory of both ways and their order. Knows nothing of how tokens are drawn.
"""

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

from gllm.streams import Event, Queues, Stream


class Told:
    """A step's tokens on their way to the host."""

    def __init__(self, tokens: Tensor, arrived: Event) -> None:
        self._tokens, self._arrived = tokens, arrived

    def read(self) -> list[int]:
        """The token of each sampling row; the host waits for them."""
        self._arrived.synchronize()
        return self._tokens.tolist()


class TokenReturn:
    """Takes every step's tokens to the host, beside what the device computes meanwhile."""

    def __init__(self, queues: Queues, rows: int, steps: int) -> None:
        """`rows`: most of a step; `steps`: most in flight. A step's tokens have been read before
        the one `steps` behind it is planned."""
        self._pinned = [queues.pinned((rows,), torch.int64) for _ in range(steps)]
        self._arrived = [queues.event() for _ in range(steps)]
        self._tokens = queues.zeros((rows,), torch.int64)
        """On the device."""
        self._sampled: Event = queues.event()
        self._returns: Stream = queues.stream()
        self._steps = 0

    def put(self, tokens: Tensor, stream: Stream) -> Told:
        """Send tokens [rows] int64, which `stream` makes, on their way. To be called within it."""
        rows, index = len(tokens), self._steps % len(self._pinned)
        self._steps += 1
        if self._steps > 1:
            # The tokens of the step before have left.
            stream.wait(self._arrived[index - 1])
        self._tokens[:rows].copy_(tokens)
        stream.record(self._sampled)
        self._returns.wait(self._sampled)
        target = self._pinned[index][:rows]
        with self._returns.current():
            target.copy_(self._tokens[:rows], non_blocking=True)
        self._returns.record(self._arrived[index])
        return Told(target, self._arrived[index])


class LastTokens:
    """The last token of sequences, on the device: places for as many as steps in flight can name.

    The host knows who has which place; what is in it only the device knows.
    """

    def __init__(self, queues: Queues, places: int) -> None:
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
