"""Table of the last token of each sequence, on the device: the next step reads it from there."""

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

from gllm.transport.device_streams import DeviceRuntime


class LastTokenTable:
    """Slots with the last tokens of as many sequences as steps in flight can name.

    The host knows which sequence has which slot; only the device knows the tokens.
    """

    def __init__(self, queues: DeviceRuntime, num_slots: int) -> None:
        self.tokens = queues.zeros((num_slots,), torch.int64)
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
