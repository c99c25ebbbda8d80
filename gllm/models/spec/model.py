"""A whole model: embeddings, layers, LM head and the format of its weights."""

from dataclasses import dataclass, replace

from gllm.kernels.attention_window import SymmetricWindow
from gllm.models.spec.attention import AttentionSpec, LatentAttentionSpec
from gllm.models.spec.layer import LayerSpec
from gllm.models.spec.parts import DimensionShard, LinearSpec, NormSpec


@dataclass(frozen=True)
class PositionEmbeddingSpec:
    """Specification of a learned position embedding: position p uses table row `offset` + p."""

    name: str
    num_rows: int
    offset: int = 0


@dataclass(frozen=True)
class EmbeddingSpec:
    """Specification of the token embedding, with optional learned positions and a norm after it."""

    name: str
    scale: float = 1.0
    """Factor of the embedding."""
    positions: PositionEmbeddingSpec | None = None
    norm: NormSpec | None = None
    rows: DimensionShard | None = None
    """Tokens of the vocabulary whose embeddings this rank holds; None for all."""


@dataclass(frozen=True)
class PerLayerEmbeddingSpec:
    """Specification of a second token embedding, of which each layer gets a part of its own.

    A layer's part is (norm(projection(embedding)) + scale * per-layer embedding) / sqrt(2), where
    `embedding` is that of the model. Source: Google, "Gemma 3n" (2025), per-layer embeddings.
    """

    name: str
    """Tensor [num_rows, layers * size]."""
    num_rows: int
    size: int
    """Elements per layer."""
    projection: str
    """Tensor [layers * size, hidden]."""
    norm: NormSpec

    @property
    def scale(self) -> float:
        """Factor of the per-layer embedding."""
        return self.size**0.5


@dataclass(frozen=True)
class HeadSpec:
    """Specification of the LM head, which projects the normalized hidden state to logits."""

    name: str
    """Tensor name; equal to the embedding's if the weights are tied."""
    untied_name: str = "lm_head"
    """Name of the tensor of a head that is not tied; checkpoints may have one although config.json
    ties the weights."""
    has_bias: bool = False
    scale: float = 1.0
    """Factor of the logits."""
    softcap: float | None = None
    """Cap c of the logits: l becomes c * tanh(l / c)."""
    has_normalized_rows: bool = False
    """True if the rows of the weight are scaled to length 1."""
    rows: DimensionShard | None = None
    """Tokens of the vocabulary whose logits this rank computes; None for all."""


@dataclass(frozen=True)
class PredictionHeadSpec:
    """Specification of a multi-token prediction head: a layer that guesses the token after next.

    Its input is projection([norm(embedding of the next token); norm(hidden state)]). Its tensors
    have the names of a layer after the model's last one.
    """

    hidden_size: int
    layer: LayerSpec
    embedding_norm: NormSpec
    """Norm of the embedding of the next token."""
    hidden_norm: NormSpec
    """Norm of the model's hidden state, behind its final norm."""
    projection: LinearSpec
    """[hidden, 2 * hidden]."""
    norm: NormSpec
    """Norm before the LM head, which is the model's."""
    is_hidden_first: bool = False
    """True if the hidden state comes before the embedding in the projection's input."""
    copied_tensors: tuple[str, ...] = ()
    """Copies of the model's embedding and LM head among the tensors of the layer, not read."""


@dataclass(frozen=True)
class QuantizationSpec:
    """Format in which a checkpoint stores quantized weights, and the blocks that share a scale."""

    format: str
    """A key of gllm.models.formats.stored_format.STORED_FORMATS."""
    block: tuple[int, int] | None
    """Outputs and inputs that share a scale; None for one scale per tensor or per output."""
    width: int = 8
    """Bits of a code."""
    has_act_order: bool = False
    """True if the inputs of a group are not neighbours (GPTQ's desc_act)."""


@dataclass(frozen=True)
class DenseSpec:
    """Specification of a dense layer between the pooled hidden state and the embedding."""

    folder: str
    """Subfolder of the model's folder with its config.json and model.safetensors."""
    inputs: int
    outputs: int
    has_bias: bool
    has_tanh: bool
    """True if the hyperbolic tangent is applied to the outputs."""


@dataclass(frozen=True)
class PoolingSpec:
    """Specification of a text's embedding: the mean of its hidden states, then dense layers."""

    dense_layers: tuple[DenseSpec, ...] = ()


@dataclass(frozen=True)
class ModelSpec:
    """Specification of a decoder-only model, or of one tensor parallel rank's part of it.

    For one rank, the sizes within layers, such as numbers of heads, are those of the rank;
    vocab_size and hidden_size are those of the whole model.
    """

    vocab_size: int
    hidden_size: int
    embedding: EmbeddingSpec
    layers: tuple[LayerSpec, ...]
    norm: NormSpec
    """Norm after the last layer."""
    head: HeadSpec
    context_length: int
    """Longest sequence in tokens that the position embedding supports."""
    layer_name_format: str = "model.layers.{}"
    """Prefix of a layer's tensors, with {} in place of its index."""
    ignored_tensors: tuple[str, ...] = ()
    """Patterns of tensors that this family does not read, besides those of all families."""
    renamed_tensors: tuple[tuple[str, str], ...] = ()
    """Parts of tensor names that files may have, and those that the layers' specs have in their
    place."""
    per_layer_embedding: PerLayerEmbeddingSpec | None = None
    """Embedding of which each layer gets a part; every stage reads token ids then."""
    multimodal_class: str | None = None
    """Class of the checkpoint, if this is only its language model: tensor names have prefixes."""
    num_prediction_layers: int = 0
    """Multi-token prediction layers after the model's own in a checkpoint; read for speculation
    alone."""
    prediction_head: PredictionHeadSpec | None = None
    """The first of these layers, if it is implemented."""
    notes: tuple[str, ...] = ()
    """Differences from the results of transformers, for the log."""
    quantization: QuantizationSpec | None = None
    """Format of the checkpoint's quantized weights, if it has any."""
    pooling: PoolingSpec | None = None
    """Pooling of the hidden states of a text to its embedding; None for that of its last token."""
    rank: int = 0
    """Tensor parallel rank, from 0."""
    ranks: int = 1
    """Number of tensor parallel ranks."""

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.layers)

    @property
    def has_state(self) -> bool:
        """True if a layer is recurrent, so that a sequence has states besides its KV cache."""
        return any(layer.attention.state_entry is not None for layer in self.layers)

    @property
    def is_bidirectional(self) -> bool:
        """True if tokens see those behind them: the model embeds whole texts, and writes none."""
        return any(isinstance(layer.attention.window, SymmetricWindow) for layer in self.layers)

    @property
    def embedding_size(self) -> int:
        """Elements of the embedding of a text."""
        layers = self.pooling.dense_layers if self.pooling is not None else ()
        return layers[-1].outputs if layers else self.hidden_size

    @property
    def optional_prefix(self) -> str:
        """Beginning of tensor names that checkpoints saved without the LM head omit."""
        return self.layer_name_format.partition(".")[0] + "."

    @property
    def is_head_tied(self) -> bool:
        """True if the LM head and the embedding share their weights."""
        return self.head.name == self.embedding.name

    @property
    def num_joint_layers(self) -> int:
        """Number of last layers that one stage has to hold: those that share keys and values."""
        sources = [
            index - layer.attention.kv_layers_back
            for index, layer in enumerate(self.layers)
            if isinstance(layer.attention, AttentionSpec) and layer.attention.kv_layers_back
        ]
        return self.num_layers - min(sources) if sources else 1

    @property
    def joined_layers(self) -> frozenset[int]:
        """Layers that one stage holds together with the layer before, whose selection they use."""
        return frozenset(
            index
            for index, layer in enumerate(self.layers)
            if isinstance(layer.attention, LatentAttentionSpec)
            and layer.attention.follows_selection
        )

    @property
    def num_selected(self) -> int | None:
        """Keys that a token attends to at most, if an indexer selects them; None otherwise."""
        return next(
            (
                layer.attention.num_selected
                for layer in self.layers
                if isinstance(layer.attention, LatentAttentionSpec)
            ),
            None,
        )

    def limit_length(self, max_model_len: int) -> "ModelSpec":
        """Return the model for texts of a length: without indexers that would select all keys."""
        if self.num_selected is None or max_model_len > self.num_selected:
            return self
        layers = [
            replace(layer, attention=replace(layer.attention, num_selected=None, indexer=None))
            if isinstance(layer.attention, LatentAttentionSpec)
            else layer
            for layer in self.layers
        ]
        ignored = (*self.ignored_tensors, r".*\.self_attn\.indexer\..*")
        return replace(self, layers=tuple(layers), ignored_tensors=ignored)

    def reads_token_ids(self, layers: range) -> bool:
        """Return whether a stage has the token embedding."""
        return layers.start == 0 or self.per_layer_embedding is not None

    def names_outside_layers(self, layers: range) -> list[str]:
        """Return the names of a stage's tensors outside of its layers, such as the embedding."""
        names = []
        if (per_layer := self.per_layer_embedding) is not None:
            names += [per_layer.name, per_layer.projection, per_layer.norm.name]
        if self.reads_token_ids(layers):
            optional = self.embedding.positions, self.embedding.norm
            names += [self.embedding.name, *(part.name for part in optional if part is not None)]
        if layers.stop == self.num_layers:
            names += [self.norm.name, self.head.name]
        return names
