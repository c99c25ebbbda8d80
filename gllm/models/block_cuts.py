"""Cuts of weights that are stored as codes with one scale per block, output or tensor.

Only whole blocks are read. A cut that ends within blocks is widened to their borders, and selected
from the floats.
"""

from gllm.models.spec import Cut

TensorCuts = tuple[Cut | None, ...]
"""Runs of each dimension of a tensor, None for all of it; empty for the whole tensor."""


def is_aligned(cut: Cut, length: int) -> bool:
    """Return whether a cut begins and ends at borders of blocks of `length` elements."""
    return widen(cut, length) == cut


def widen(cut: Cut, length: int) -> Cut:
    """Return the blocks of `length` elements that hold a cut."""
    runs: list[tuple[int, int]] = []
    for begin, end in cut.runs:
        begin, end = begin // length * length, min(-(-end // length) * length, cut.size)
        if runs and begin <= runs[-1][1]:
            begin = runs.pop()[0]
        runs.append((begin, end))
    return Cut(cut.size, tuple(runs))


def widen_cuts(cuts: TensorCuts, block: tuple[int, int] | None) -> TensorCuts:
    """Return the blocks that hold cuts of a weight [outputs, inputs]."""
    if block is None or not cuts:
        return cuts
    pairs = zip(cuts, block, strict=True)
    return tuple(None if cut is None else widen(cut, length) for cut, length in pairs)


def cut_scales(
    cuts: TensorCuts, shape: tuple[int, ...], block: tuple[int, int] | None
) -> TensorCuts:
    """Return the cuts of a tensor of scales.

    Args:
        cuts: of the codes [outputs, inputs], at borders of blocks.
        shape: of the stored scales.
        block: outputs and inputs that share a scale; None for one scale per tensor or output.

    Raises:
        ValueError: the scales do not fit the codes.
    """
    if not any(cuts) or all(length == 1 for length in shape):
        return ()
    rows, columns = cuts
    if block is None:
        if rows is None:
            return ()
        if shape[0] != rows.size:
            raise ValueError(f"has {shape[0]} scales, but 1 or {rows.size} are needed")
        return (rows,)
    if len(shape) != 2:
        raise ValueError(f"has scales of shape {shape}, but one for each block of {block} weights")
    return _cut_blocks(rows, shape[0], block[0]), _cut_blocks(columns, shape[1], block[1])


def _cut_blocks(cut: Cut | None, count: int, length: int) -> Cut | None:
    """Return the blocks of a dimension that a cut at their borders holds.

    Args:
        cut: of the dimension's elements.
        count: number of blocks that are stored.
        length: elements per block.

    Raises:
        ValueError: the dimension has another number of blocks.
    """
    if cut is None:
        return None
    if count != -(-cut.size // length):
        raise ValueError(
            f"has {count} scales along {cut.size} elements, but {length} elements share a scale"
        )
    return Cut(count, tuple((begin // length, -(-end // length)) for begin, end in cut.runs))
