"""Weights of few bits as GPU kernels read them: words whose neighbours are of neighbouring outputs.

Inputs are divided into spans. A word holds codes of one output and one span: code i of word j
belongs to input i * words + j of the span, so that all codes i of a tile of words are neighbouring
inputs. What the codes stand for is in `grouped_weight`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from gllm.kernels.grouped_weight import GroupedRows, GroupedWeight, GroupScales, slabs

LARGEST_SPAN = 128
"""Inputs per span, if that divides their number, rounded up to a multiple of SMALLEST_SPAN."""
SMALLEST_SPAN = 32
"""Fewest inputs per span; inputs are padded to whole spans."""


@dataclass(frozen=True, slots=True)
class WordTensors:
    """Codes and scales of few bits in the memory of a GPU; [...] is empty, or the experts."""

    format: ClassVar[str] = "grouped"
    width: int
    """Bits of a code: 4, 6 or 8."""
    group: int
    """Inputs that share a scale."""
    zero: int
    """Code of 0."""
    inputs: int
    """Number of inputs, without padding."""
    table: Tensor | None
    """[16] uint8: codes that the stored ones choose from; None: they are codes."""
    codes: Tensor
    """[..., spans, words, outputs] int32: codes of 8 bits, else of 4 bits: the lower ones of 6."""
    high: Tensor | None
    """[..., spans, words, outputs] int16: the upper two bits of codes of 6 bits."""
    scales: Tensor
    """[..., groups, outputs]."""
    scale_units: Tensor | None
    """[..., units, outputs] float16: factors of the scales, each of as many groups."""
    minimums: Tensor | None
    """[..., groups, outputs]."""
    minimum_units: Tensor | None
    """[..., units, outputs] float16: factors of the minimums."""
    order: Tensor | None = None
    """[inputs] int64: the input that each column multiplies; None if they are in order."""

    @property
    def nbytes(self) -> int:
        """Size in memory, in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    @property
    def outputs(self) -> int:
        """Number of outputs."""
        return self.codes.shape[-1]

    @property
    def span(self) -> int:
        """Number of inputs per span."""
        return self.codes.shape[-2] * 32 // self.code_bits

    @property
    def code_bits(self) -> int:
        """Bits of a code within a word: 4 or 8."""
        return 8 if self.width == 8 else 4

    @property
    def groups_per_unit(self) -> int:
        """Groups that share a unit; 0 without units."""
        units = self.scale_units
        return 0 if units is None else self.scales.shape[-2] // units.shape[-2]

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors whose last dimension is the outputs."""
        values = {name: getattr(self, name) for name in TENSORS}
        return {name: value for name, value in values.items() if value is not None}

    def fields_with(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return all fields, with some of the tensors replaced."""
        return {**{one.name: getattr(self, one.name) for one in fields(self)}, **tensors}


TENSORS = ("codes", "high", "scales", "scale_units", "minimums", "minimum_units")
"""Fields with a number or more for each output."""


@dataclass(frozen=True, slots=True)
class GroupedWords(WordTensors):
    """Weight [outputs, inputs] of few bits in the memory of a GPU."""

    def fits(self, other: "GroupedWords") -> bool:
        """Return True if the outputs of another weight can follow those of this one."""

        def kind(words: "GroupedWords") -> list[Any]:
            table = None if words.table is None else words.table.tolist()
            tensors = words.tensors().items()
            shapes = [(name, value.dtype, value.shape[:-1]) for name, value in tensors]
            order = None if words.order is None else words.order.tolist()
            return [words.width, words.group, words.zero, words.inputs, table, order, shapes]

        return kind(self) == kind(other)

    def floats(self, ids: Tensor | None = None) -> Tensor:
        """Return outputs by index, or all of them, as floats [n, inputs] float32."""

        def take(tensor: Tensor) -> Tensor:
            return tensor if ids is None else tensor.index_select(-1, ids)

        def spread(scales: Tensor, units: Tensor | None) -> Tensor:
            numbers = take(scales).float()
            if units is not None:
                numbers = numbers * take(units).float().repeat_interleave(self.groups_per_unit, 0)
            return numbers.repeat_interleave(self.group, 0)[: self.inputs].t()

        codes = _unfold(take(self.codes), self.code_bits)
        if self.high is not None:
            codes = codes | _unfold(take(self.high).int(), 2) << 4
        codes = codes.flatten(0, 2)[: self.inputs].t()
        if self.table is not None:
            codes = self.table[codes].int()
        numbers = (codes - self.zero).float() * spread(self.scales, self.scale_units)
        if self.minimums is not None:
            numbers = numbers - spread(self.minimums, self.minimum_units)
        return numbers if self.order is None else numbers[:, self.order.argsort()]


def _unfold(words: Tensor, bits: int) -> Tensor:
    """Return the codes [spans, i, words, outputs] int32 of words of 32 bits, or 16 for 2 bits."""
    shifts = torch.arange(0, 16 if bits == 2 else 32, bits, device=words.device)
    return (words[:, None] >> shifts[:, None, None].int()) & ((1 << bits) - 1)


def choose_span(inputs: int) -> int:
    """Return the number of inputs per span: as many as possible without more padding."""
    return math.gcd(-(-inputs // SMALLEST_SPAN) * SMALLEST_SPAN, LARGEST_SPAN)


def pack_for_gpu(weights: Iterable[GroupedWeight]) -> list[GroupedWords]:
    """Pack weights for GPU kernels, about SLAB_WEIGHTS at a time; neighbours of a kind as one."""
    return join_words(
        [
            _pack_words(weight, weight.read(begin, end))
            for weight in weights
            for begin, end in slabs(weight)
        ]
    )


def _pack_words(weight: GroupedWeight, rows: GroupedRows) -> GroupedWords:
    """Pack some outputs of a weight for GPU kernels."""
    layout, device = weight.layout, weight.device
    codes, high = pack_words(rows.codes.to(device), layout.width)
    groups = -(-len(codes) * choose_span(weight.shape[1]) // layout.group)

    def scales(of: GroupScales | None) -> tuple[Tensor | None, Tensor | None]:
        if of is None:
            return None, None
        numbers, per_unit = of.numbers, max(of.groups_per_unit, 1)
        # The last group may have no inputs.
        missing = groups - numbers.shape[1]
        of = of.map(
            lambda part: functional.pad(
                part.to(device), (0, missing if part is numbers else missing // per_unit)
            ).t()
        )
        return of.numbers.contiguous(), None if of.units is None else of.units.contiguous()

    numbers, units = scales(rows.scales)
    assert numbers is not None, "a weight has scales"
    table = None
    if layout.table is not None:
        table = torch.tensor(layout.table, dtype=torch.uint8, device=device)
    minimums, minimum_units = scales(rows.minimums)
    return GroupedWords(
        width=layout.width,
        group=layout.group,
        zero=layout.zero,
        inputs=weight.shape[1],
        table=table,
        codes=codes,
        high=high,
        scales=numbers,
        scale_units=units,
        minimums=minimums,
        minimum_units=minimum_units,
        order=None if weight.order is None else weight.order.to(device),
    )


def pack_words(codes: Tensor, width: int) -> tuple[Tensor, Tensor | None]:
    """Pack codes [outputs, inputs] uint8 to words.

    Returns:
        `codes` and `high` of a GroupedWords.
    """
    span = choose_span(codes.shape[1])
    padded = functional.pad(codes, (0, -codes.shape[1] % span)).int().t()
    bits = 8 if width == 8 else 4
    folded = padded.unflatten(0, (-1, 32 // bits, span * bits // 32))
    high = _fold(folded >> 4, 2).to(torch.int16) if width == 6 else None
    return _fold(folded & ((1 << bits) - 1), bits), high


def _fold(codes: Tensor, bits: int) -> Tensor:
    """Return words [spans, words, outputs] int32 of codes [spans, i, words, outputs] int32."""
    words = codes.new_zeros(len(codes), *codes.shape[2:])
    for index in range(codes.shape[1]):
        words |= codes[:, index] << bits * index
    return words


def join_words(parts: Sequence[GroupedWords]) -> list[GroupedWords]:
    """Concatenate neighbouring weights along the outputs, as far as their kinds are the same."""
    joined: list[list[GroupedWords]] = []
    for part in parts:
        if joined and joined[-1][0].fits(part):
            joined[-1].append(part)
        else:
            joined.append([part])
    return [_join(run) for run in joined]


def _join(run: Sequence[GroupedWords]) -> GroupedWords:
    first = run[0]
    if len(run) == 1:
        return first
    names = first.tensors()
    tensors = {name: torch.cat([getattr(part, name) for part in run], -1) for name in names}
    return GroupedWords(**first.fields_with(tensors))


@dataclass(frozen=True, slots=True)
class GroupedStack(WordTensors):
    """Weights [experts, outputs, inputs] of few bits of all experts in the memory of a GPU."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Number of experts, outputs and inputs."""
        return len(self.codes), self.outputs, self.inputs

    def __getitem__(self, expert: int) -> GroupedWords:
        """Return the weight of one expert; it shares the stack's memory."""
        tensors = {name: tensor[expert] for name, tensor in self.tensors().items()}
        return GroupedWords(**self.fields_with(tensors))


def stack_words(num_experts: int, experts: Iterable[Sequence[GroupedWords]]) -> GroupedStack:
    """Stack weights, read one at a time; each expert's parts follow each other along the outputs.

    Raises:
        ValueError: weights of two kinds, or whose inputs are in another order.
    """
    first: GroupedWords | None = None
    stacked: dict[str, Tensor] = {}
    for index, parts in enumerate(experts):
        joined = join_words(parts)
        if first is None:
            first = joined[0]
            if first.order is not None:
                raise ValueError(
                    "experts whose inputs are in another order (act-order of GPTQ) have no kernel "
                    "on GPUs: serve a checkpoint with desc_act false, or choose --device cpu"
                )
            for name, tensor in first.tensors().items():
                stacked[name] = tensor.new_empty(num_experts, *tensor.shape)
        if len(joined) > 1 or not first.fits(joined[0]) or joined[0].outputs != first.outputs:
            raise ValueError(
                "experts of one layer have weights of different types of few bits, or gate and up "
                "projections do, which has no kernel on GPUs: serve a file whose experts have one "
                "type, or choose --device cpu"
            )
        for name, tensor in joined[0].tensors().items():
            stacked[name][index] = tensor
    assert first is not None, "there is at least one expert"
    return GroupedStack(**first.fields_with(stacked))
