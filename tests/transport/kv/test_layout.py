"""Parts of a hand-off: each layer and head of each worker is read exactly once."""

import itertools
from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gllm.messages.kv_layout import KvLayout, KvLayoutError, plan_parts
from tests.support.engines.kv_layouts import cut_layouts

CUTS = [(1, 1), (2, 1), (1, 2), (2, 2)]
DTYPE_BYTES = {"float32": (8, 8), "bfloat16": (4, 6), "int8": (5, 5), "mla": (9, 0)}
"""Bytes of a key and of a value per head."""


@st.composite
def engines(draw: st.DrawFn) -> tuple[list[list[KvLayout]], list[list[KvLayout]]]:
    """Two engines for one model: random layers per stage, ranks, heads, blocks and machines."""
    num_layers = draw(st.integers(1, 6))
    num_heads = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    dtype = draw(st.sampled_from(sorted(DTYPE_BYTES)))

    def draw_engine() -> list[list[KvLayout]]:
        bounds = draw(st.sets(st.integers(1, num_layers - 1))) if num_layers > 1 else set()
        cuts = [0, *sorted(bounds), num_layers]
        stages = []
        for begin, end in itertools.pairwise(cuts):
            tp = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
            if max(tp, num_heads) % min(tp, num_heads):
                tp = 1
            ranks = cut_layouts(
                1, tp, draw(st.integers(1, 40)), 16, end, num_heads, *DTYPE_BYTES[dtype], dtype
            )
            stages.append(
                [msgspec.structs.replace(rank, layers=rank.layers[begin:]) for rank in ranks]
            )
        # Stages next to each other may share a machine.
        machines: list[list[KvLayout]] = [[]]
        for number, ranks in enumerate(stages):
            if number and draw(st.booleans()):
                machines.append([])
            machines[-1] += ranks
        return machines

    return draw_engine(), draw_engine()


@given(engines())
def test_each_byte_is_read_exactly_once(
    both: tuple[list[list[KvLayout]], list[list[KvLayout]]],
) -> None:
    mine, theirs = both
    read: Counter[tuple[int, int, int, int]] = Counter()
    num_bytes: Counter[tuple[int, int]] = Counter()
    for part in plan_parts(mine, theirs):
        own = mine[part.machine][part.worker]
        owner = theirs[part.owner_machine][part.owner]
        for head in part.heads:
            read[part.machine, part.worker, part.layer, head] += 1
        # Both have the range, in the same bytes per token: else this raises an error.
        widths = [
            [width for _, _, width in layout.find_strides(part.layer, part.heads)]
            for layout in (own, owner)
        ]
        assert widths[0] == widths[1]
        num_bytes[part.machine, part.worker] += sum(widths[0])
    expected = {
        (machine, worker): layout
        for machine, workers in enumerate(mine)
        for worker, layout in enumerate(workers)
    }
    assert read == Counter(
        (*place, layer.layer, head)
        for place, layout in expected.items()
        for layer in layout.layers
        for head in layer.heads
    )
    assert num_bytes == {place: layout.bytes_per_token for place, layout in expected.items()}


@pytest.mark.parametrize("prefill", CUTS)
@pytest.mark.parametrize("decode", CUTS)
def test_all_pairs_of_cuts_have_parts(prefill: tuple[int, int], decode: tuple[int, int]) -> None:
    parts = plan_parts([cut_layouts(*decode, 4)], [cut_layouts(*prefill, 6)])
    assert sum(len(part.heads) for part in parts) == 4 * 2


def test_machines_read_from_the_machines_that_have_their_layers() -> None:
    """Two stages on two machines, read by three on three machines."""
    theirs = [[layout] for layout in cut_layouts(2, 1, num_layers=4)]
    mine = [[layout] for layout in cut_layouts(3, 1, num_layers=4)]
    parts = [(part.machine, part.owner_machine, part.layer) for part in plan_parts(mine, theirs)]
    assert parts == [(0, 0, 0), (1, 0, 1), (2, 1, 2), (2, 1, 3)]


def test_strides_are_those_of_the_layer_and_its_heads() -> None:
    (layout,) = cut_layouts(1, 1, num_layers=2, num_heads=2)
    strides = {
        (layer, head): layout.find_strides(layer, range(head, head + 1))
        for layer in (0, 1)
        for head in (0, 1)
    }
    begins = {each[0][0] for each in strides.values()}
    assert len(begins) == 4
    for layer in (0, 1):
        own = layout.layers[layer]
        ((begin, distance, size), *_) = layout.find_strides(layer, range(2))
        assert begin == layout.offsets[layer].keys
        assert (distance, size) == (2 * own.key_bytes, 2 * own.key_bytes)
    for layer, heads in ((2, range(2)), (0, range(1, 3))):
        with pytest.raises(KvLayoutError, match="elsewhere"):
            layout.find_strides(layer, heads)


def test_replicated_heads_are_read_from_different_ranks() -> None:
    mine, theirs = cut_layouts(1, 4, num_heads=1), cut_layouts(1, 4, num_heads=1)
    owners = {(part.worker, part.layer): part.owner for part in plan_parts([mine], [theirs])}
    assert {owners[worker, 0] for worker in range(4)} == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"dtype": "int8"}, "differ in dtype: 'int8' there, 'float32' here"),
        ({"model": "other"}, "differ in model: 'other' there, 'model' here"),
        ({"layers": cut_layouts(2, 1)[0].layers}, "heads 0 to 1 of layer 2"),
        ({"layers": cut_layouts(1, 1, key_bytes=4)[0].layers}, "4 and 8 bytes per head there"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(changes: dict[str, object], cause: str) -> None:
    (mine,) = cut_layouts(1, 1)
    with pytest.raises(KvLayoutError, match=cause):
        plan_parts([[mine]], [[msgspec.structs.replace(mine, **changes)]])


def test_layers_do_not_overlap_in_memory() -> None:
    (layout,) = cut_layouts(1, 1, block_size=3, num_blocks=5, key_bytes=5, value_bytes=0)
    end = 0
    for each, offsets in zip(layout.layers, layout.offsets, strict=True):
        assert offsets.keys == end
        assert offsets.values - offsets.keys >= 6 * 3 * each.num_heads * 5
        assert offsets.end == offsets.values
        end = offsets.end
    assert layout.num_bytes == end
    assert end % 4096 == 0
