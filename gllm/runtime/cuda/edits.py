"""What requests do to their logits, as tensors that go over with a step's inputs.

Owns the way from a step's sampling rows to masks, places, phrases and penalties, and their order.
Knows nothing of how tokens are drawn; the arithmetic is in gllm/kernels. What looks back at an
output finds it on the device (gllm/kernels/history.py), for with async scheduling the
host does not know its last token yet.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from gllm.kernels.bad_words import BadWords
from gllm.kernels.history import TokenHistories
from gllm.kernels.masking import (
    add_to_logits,
    apply_bad_words,
    apply_token_bitmask,
    build_token_bitmask,
    num_bitmask_words,
)
from gllm.kernels.penalties import apply_history_penalties
from gllm.messages.sampling import SequenceSamplingParams
from gllm.runtime.sampler import SampledRows
from gllm.runtime.sampling_state import LogitEdits


@dataclass(frozen=True, slots=True)
class Edits:
    """Changes to a step's logits."""

    masked: Tensor
    """[masks] int64: rows that may bring what their masks allow."""
    masks: Tensor
    """[masks, words] int32"""
    places: Tensor
    """[n] int64: row * vocabulary + id of biases and bans."""
    values: Tensor
    """[n] float32"""
    histories: TokenHistories
    phrases: BadWords
    settings: Tensor
    """[3, histories] float64: repetition, frequency and presence penalty."""
    penalizes: bool
    """Whether one of them is on."""

    def apply(self, logits: Tensor, table: Tensor) -> None:
        """Change logits [rows, vocabulary] float32 in place, by the tokens in table [slots]
        int64. Nobody waits for the device."""
        if len(self.masked):
            apply_token_bitmask(logits, self.masked, self.masks)
        if len(self.places):
            add_to_logits(logits, self.places, self.values)
        if len(self.phrases.owners):
            apply_bad_words(logits, table, self.histories, self.phrases)
        if self.penalizes:
            apply_history_penalties(logits, table, self.histories, self.settings)


class _Columns:
    """A request's edits, made once. Ids outside of the vocabulary are left out."""

    def __init__(self, edits: LogitEdits, vocabulary: int) -> None:
        self.mask = build_token_bitmask(edits.allowed, vocabulary) if len(edits.allowed) else None
        """[words] int32, where not all tokens are allowed."""
        self.late = _inside(edits, edits.banned, vocabulary)
        """Ids [n] int64 and what is added to their logits [n] float32."""
        self.early = _inside(edits, torch.cat((edits.banned, edits.ending)), vocabulary)
        """The same where the output must not end yet."""
        words = [word for word in edits.phrases if word[-1] < vocabulary]
        self.lengths = _ints([len(word) - 1 for word in words])
        self.longest = max((len(word) - 1 for word in words), default=0)
        ahead = [[0] * (self.longest - len(word) + 1) + [*word[:-1]] for word in words]
        self.before = torch.tensor(ahead, dtype=torch.int64).reshape(len(words), self.longest)
        self.last = _ints([word[-1] for word in words])


def _inside(edits: LogitEdits, banned: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Ids [n] int64 and what is added to their logits [n] float32, where banned [ids] int64 are."""
    ids = torch.cat((banned, edits.bias_ids))
    values = torch.cat((torch.full(banned.shape, -torch.inf), edits.bias))
    inside = ids < vocabulary
    return ids[inside], values[inside]


class EditPlanner:
    """Makes the edits of steps, on the host."""

    def __init__(self, vocabulary: int, block_size: int) -> None:
        self._vocabulary, self._block_size = vocabulary, block_size
        self._made: WeakKeyDictionary[LogitEdits, _Columns] = WeakKeyDictionary()

    def plan(
        self, rows: SampledRows, lengths: Sequence[int], blocks: npt.NDArray[np.int64]
    ) -> Edits | None:
        """The edits of all sampling rows, None where there are none.

        lengths: tokens of each row's sequence, prompt and output; blocks: [rows, blocks], their
        block tables.
        """
        if not rows.edited:
            return None
        masked, masks, places, values, looking, phrases = [], [], [], [], [], []
        for row in rows.edited:
            state = rows.states[row]
            assert state.edits is not None, "a plain row is not changed"
            own = self._columns_of(state.edits)
            if own.mask is not None:
                masked.append(row)
                masks.append(own.mask)
            ids, added = own.early if state.edits.is_early(rows.indices[row]) else own.late
            places.append(row * self._vocabulary + ids)
            values.append(added)
            if own.longest or state.penalizes:
                looking.append(row)
                phrases.append(own)
        no_masks = torch.empty(0, num_bitmask_words(self._vocabulary), dtype=torch.int32)
        return Edits(
            _ints(masked),
            torch.stack(masks) if masks else no_masks,
            torch.cat(places),
            torch.cat(values),
            TokenHistories(
                _ints(looking),
                _ints([lengths[row] for row in looking]),
                _ints([lengths[row] - rows.indices[row] for row in looking]),
                torch.from_numpy(blocks[looking].astype(np.int32)),
                self._block_size,
            ),
            _phrases(phrases),
            _penalties([rows.states[row].spec for row in looking]),
            any(rows.states[row].penalizes for row in looking),
        )

    def _columns_of(self, edits: LogitEdits) -> _Columns:
        """A request's columns."""
        made = self._made.get(edits)
        if made is None:
            made = self._made[edits] = _Columns(edits, self._vocabulary)
        return made


def _penalties(specs: list[SequenceSamplingParams]) -> Tensor:
    """Repetition, frequency and presence penalty, [3, specs] float64."""
    columns = [
        [getattr(spec, f"{name}_penalty") for spec in specs]
        for name in ("repetition", "frequency", "presence")
    ]
    return torch.tensor(columns, dtype=torch.float64)


def _phrases(histories: list[_Columns]) -> BadWords:
    """The bad words of several tokens of all histories."""
    longest = max((own.longest for own in histories), default=0)
    before = [functional.pad(own.before, (longest - own.longest, 0)) for own in histories]
    none = torch.empty(0, dtype=torch.int64)
    return BadWords(
        torch.repeat_interleave(_ints([len(own.last) for own in histories])),
        torch.cat([none, *(own.lengths for own in histories)]),
        torch.cat([none.reshape(0, longest), *before]),
        torch.cat([none, *(own.last for own in histories)]),
    )


def _ints(values: list[int]) -> Tensor:
    """[n] int64"""
    return torch.tensor(values, dtype=torch.int64)
