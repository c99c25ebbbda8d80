"""KV cache in a file: the tensors that kernels use are the bytes that a KV mover reads."""

import os
from dataclasses import replace

import pytest
import torch

from gllm.models.spec.entries import KVEntrySpec
from gllm.models.spec.layer import LayerSpec
from gllm.runtime.worker.kv_cache import KVCache, describe_layout, map_zeros
from gllm.transport.kv.pages import KvPages


class _Attention:
    """Attention of which only the cache entry matters."""

    def __init__(self, entry: KVEntrySpec) -> None:
        self.kv_entry, self.state_entry = entry, None


class _Layer:
    def __init__(self, entry: KVEntrySpec) -> None:
        self.attention = _Attention(entry)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("is_shared", [False, True])
def test_tensors_and_pages_are_the_same_memory(dtype: torch.dtype, is_shared: bool) -> None:
    entry = KVEntrySpec(1, 24, 16, True) if is_shared else KVEntrySpec(4, 16, 16)
    own = entry if is_shared else replace(entry, num_heads=2)
    layers: list[LayerSpec] = [_Layer(own), _Layer(own)]  # type: ignore[list-item]
    all_layers: list[LayerSpec] = [_Layer(entry)] * 5  # type: ignore[list-item]
    descriptor = os.memfd_create("cache")
    cache = KVCache(layers, 7, 4, dtype, map_zeros(descriptor))
    rank = 0 if is_shared else 1
    layout = describe_layout("model", range(2, 4), all_layers, rank, 2, cache)
    assert layout.num_bytes == os.fstat(descriptor).st_size
    assert [list(each.heads) for each in layout.layers] == [[0] if is_shared else [2, 3]] * 2
    pages = KvPages(layout, descriptor)
    # Nothing was written yet, so no page takes memory.
    assert os.fstat(descriptor).st_blocks == 0
    os.close(descriptor)
    codes = torch.Generator().manual_seed(1)
    for keys, values in cache.layers:
        for tensor in (keys,) if is_shared else (keys, values):
            memory = tensor.view(torch.uint8)
            memory.copy_(torch.randint(0, 256, memory.shape, generator=codes, dtype=torch.uint8))
    slots = pages.find_slots([6, 0, 3], 2, 7)
    for index, (keys, values) in zip(range(2, 4), cache.layers, strict=True):
        expected = [
            tensor.view(torch.uint8).flatten(0, 1)[torch.from_numpy(slots)].flatten()
            for tensor in ((keys,) if is_shared else (keys, values))
        ]
        heads = layout.layers[0].heads
        assert pages.read(index, heads, slots).tolist() == torch.cat(expected).tolist()
    pages.write(
        3, layout.layers[0].heads, slots[:1], 0 * pages.read(3, layout.layers[0].heads, slots[:1])
    )
    assert not cache.layers[1][0].view(torch.uint8).flatten(0, 1)[slots[0]].any()
