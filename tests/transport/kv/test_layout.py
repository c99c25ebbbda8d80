"""Moves between two engines: each layer and head of each worker is moved exactly once."""

from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gllm.messages.kv_layout import KvLayoutError, find_moves
from tests.support.engines.kv_layouts import cut_layouts

CUTS = [(1, 1), (2, 1), (1, 2), (2, 2)]


@given(
    st.integers(1, 6).flatmap(
        lambda layers: st.tuples(st.just(layers), st.integers(1, layers), st.integers(1, layers))
    ),
    st.sampled_from([(8, 1), (8, 8), (4, 2), (2, 8), (1, 4), (6, 3)]),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 40),
    st.integers(1, 40),
)
def test_each_layer_and_head_is_moved_exactly_once(
    depths: tuple[int, int, int],
    heads_and_rank: tuple[int, int],
    other_tp: int,
    my_block_size: int,
    their_block_size: int,
) -> None:
    num_layers, my_pp, their_pp = depths
    num_heads, my_tp = heads_and_rank
    if max(num_heads, other_tp) % min(num_heads, other_tp):
        other_tp = 1
    mine = cut_layouts(my_pp, my_tp, my_block_size, num_layers=num_layers, num_heads=num_heads)
    theirs = cut_layouts(
        their_pp, other_tp, their_block_size, num_layers=num_layers, num_heads=num_heads
    )
    for position, layout in enumerate(mine):
        moves = find_moves(layout, theirs, position)
        moved = Counter((move.layer, head) for move in moves for head in move.heads)
        assert moved == Counter((each.layer, head) for each in layout.layers for head in each.heads)
        for move in moves:
            owned = {each.layer: each.heads for each in theirs[move.peer].layers}
            assert set(move.heads) <= set(owned[move.layer])
        sizes = {each.layer: each.bytes_per_head for each in layout.layers}
        num_bytes = sum(len(move.heads) * sizes[move.layer] for move in moves)
        assert num_bytes == layout.bytes_per_token


@pytest.mark.parametrize("prefill", CUTS)
@pytest.mark.parametrize("decode", CUTS)
def test_all_pairs_of_cuts_have_moves(prefill: tuple[int, int], decode: tuple[int, int]) -> None:
    mine, theirs = cut_layouts(*decode, 4), cut_layouts(*prefill, 6)
    num_moved = sum(len(move.heads) for layout in mine for move in find_moves(layout, theirs))
    assert num_moved == 4 * 2


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
    peers = {find_moves(mine[position], theirs, position)[0].peer for position in range(4)}
    assert peers == {0, 1, 2, 3}


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
        find_moves(mine, [msgspec.structs.replace(mine, **changes)])


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
