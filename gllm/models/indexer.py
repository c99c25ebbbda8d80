"""Lightning indexer: scores by which each token of sparse attention selects its keys.

The arithmetic is in gllm/kernels/token_selection.py.
"""

import torch
from torch import Tensor

from gllm.kernels.attention import store
from gllm.kernels.linear import linear, prepare
from gllm.kernels.rotary import RotaryAngles, apply_rotary
from gllm.kernels.token_selection import TokenSelection
from gllm.models.basic_layers import Linear, Norm
from gllm.models.loader import Weights
from gllm.models.spec.attention import IndexerSpec


class Indexer:
    """Indexer of one layer, with its weights. Every tensor parallel rank has all of it.

    A key of `head_dim` elements per token is stored behind the layer's entry in the KV cache.
    """

    def __init__(
        self, spec: IndexerSpec, weights: Weights, hidden_size: int, query_size: int
    ) -> None:
        """Read the weights.

        Args:
            spec: spec of the indexer.
            weights: tensors of the layer.
            hidden_size: elements of a hidden state.
            query_size: elements of the compressed hidden state for queries.
        """
        self.spec = spec
        size = spec.num_heads * spec.head_dim
        # Exempt from --quantization: a key that is not selected is lost.
        self.q_proj = Linear(spec.q_proj, weights, [size], query_size, is_exact=True)
        self.k_proj = Linear(spec.k_proj, weights, [spec.head_dim], hidden_size, is_exact=True)
        self.k_norm = Norm(spec.k_norm, weights, spec.head_dim)
        self.weights_proj = prepare(
            weights.read_float32(f"{spec.weights_proj}.weight", spec.num_heads, hidden_size)
        )
        self.factor = spec.head_dim**-0.5 * spec.num_heads**-0.5

    def __call__(
        self,
        x: Tensor,
        compressed: Tensor,
        angles: RotaryAngles,
        index_keys: Tensor,
        selection: TokenSelection,
    ) -> Tensor:
        """Store the index keys of a step's tokens, and select the keys that the tokens see.

        Args:
            x: [tokens, hidden], which is returned.
            compressed: [tokens, query size].
            angles: rotary angles of the tokens' positions.
            index_keys: [blocks, block_size, 1, head_dim]: KV cache of the layer.
            selection: selection of the step.
        """
        keys = self.k_norm(self.k_proj(x))[:, None]
        keys = apply_rotary(keys, angles, self.spec.is_interleaved)
        store(keys, index_keys, selection.plan.slots)
        if selection.sparse_rows:
            tokens = selection.sparse_tokens
            queries = self.q_proj(compressed.index_select(0, tokens))
            queries = queries.view(len(tokens), self.spec.num_heads, self.spec.head_dim)
            own = angles[0].index_select(0, tokens), angles[1].index_select(0, tokens)
            queries = apply_rotary(queries, own, self.spec.is_interleaved)
            rows = x.index_select(0, tokens).to(torch.float32)
            weights = linear(rows, self.weights_proj, None) * self.factor
            selection.select(queries, weights, index_keys)
        return x
