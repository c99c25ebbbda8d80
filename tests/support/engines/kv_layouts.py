"""Layouts of engines that are cut into stages and ranks, as the models cut theirs."""

from gllm.messages.kv_layout import KvLayout, LayerLayout


def cut_layouts(
    pp: int,
    tp: int,
    block_size: int = 4,
    num_blocks: int = 16,
    num_layers: int = 4,
    num_heads: int = 2,
    key_bytes: int = 8,
    value_bytes: int = 8,
    dtype: str = "float32",
) -> list[KvLayout]:
    """Return the layouts of the workers of an engine; ranks beyond the heads replicate them."""
    layouts = []
    for stage in range(pp):
        owned = range(stage * num_layers // pp, (stage + 1) * num_layers // pp)
        for rank in range(tp):
            first, share = rank * num_heads // tp, max(num_heads // tp, 1)
            layers = [LayerLayout(layer, first, share, key_bytes, value_bytes) for layer in owned]
            layouts.append(KvLayout("model", dtype, block_size, num_blocks, layers))
    return layouts
