"""Models in published shapes with random weights, created on the device.

gllm's executor takes the weights without a file: only config.json is written.

Weights are normal numbers scaled such that every layer keeps the size of its input, so that
activations stay finite over all layers; queries are twice as large, so that attention prefers some
tokens. The rows of the LM head are random too, until `mark` replaces some.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.place import Place
from gllm.config.engine import EngineConfig
from gllm.models.config import read_config
from gllm.models.loader import Checkpoint, Weights
from gllm.models.spec.model import ModelSpec
from gllm.models.stage import ModelStage
from gllm.runtime.worker.batch import Batch
from gllm.runtime.worker.cuda.backend import MAX_GRAPH_ROWS
from gllm.runtime.worker.cuda.executor import CudaExecutor
from gllm.scheduler.config import SchedulerConfig

SHARED = {
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "rms_norm_eps": 1e-6,
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
    # No token ends a text.
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen2.5-7B": {
        **SHARED,
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "num_hidden_layers": 28,
        "hidden_size": 3584,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
        "vocab_size": 152064,
        "max_position_embeddings": 32768,
        "rope_theta": 1000000.0,
        "use_sliding_window": False,
    },
    "Llama-3.1-8B": {
        **SHARED,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": LLAMA3,
        "attention_bias": False,
        "mlp_bias": False,
    },
}
TINY = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 257,
}
QUERY_SCALE = 2.0
MARK = 20.0
"""Approximate logit of a marked row for the hidden state from which it was created."""
BLOCK_SIZE = 16
BATCHED = 2048
"""Maximum tokens per step."""


def config_of(name: str, is_dry: bool) -> dict[str, Any]:
    """Return config.json of a model; in a dry run, of a tiny model of its kind."""
    return CONFIGS[name] | (TINY if is_dry else {})


def write_config(config: Mapping[str, Any], folder: Path) -> None:
    """Write config.json, from which gllm and transformers read the model's shape."""
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def random_weights(place: Place, config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return all tensors of a dense Llama or Qwen2 by their names in checkpoints, on the device."""
    place.seed(config["model_type"])
    hidden, inner, vocabulary = (
        config[key] for key in ("hidden_size", "intermediate_size", "vocab_size")
    )
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim = hidden // heads

    def normal(*shape: int, std: float, mean: float = 0.0) -> Tensor:
        return torch.empty(shape, dtype=place.dtype, device=place.device).normal_(mean, std)

    weights = {
        "model.embed_tokens.weight": normal(vocabulary, hidden, std=1.0),
        "model.norm.weight": normal(hidden, std=0.1, mean=1.0),
        "lm_head.weight": normal(vocabulary, hidden, std=hidden**-0.5),
    }
    maps = {
        "self_attn.q_proj": (heads * dim, hidden, QUERY_SCALE),
        "self_attn.k_proj": (kv_heads * dim, hidden, 1.0),
        "self_attn.v_proj": (kv_heads * dim, hidden, 1.0),
        "self_attn.o_proj": (hidden, heads * dim, 1.0),
        "mlp.gate_proj": (inner, hidden, 1.0),
        "mlp.up_proj": (inner, hidden, 1.0),
        "mlp.down_proj": (hidden, inner, 1.0),
    }
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        for name, (outputs, inputs, scale) in maps.items():
            weights[f"{layer}.{name}.weight"] = normal(outputs, inputs, std=scale * inputs**-0.5)
            if config["model_type"] == "qwen2" and name[-6:] in ("q_proj", "k_proj", "v_proj"):
                weights[f"{layer}.{name}.bias"] = normal(outputs, std=0.1)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{layer}.{name}.weight"] = normal(hidden, std=0.1, mean=1.0)
    return weights


def mark(weights: dict[str, Tensor], hidden: Tensor, tokens: Sequence[int]) -> None:
    """Point row tokens[i] of the LM head to hidden[i], minus the mean of all positions.

    Among random rows the two largest logits of a position are so close that bfloat16 rounding
    decides which is larger. With the marked rows, the position's own row has the largest logit by
    far, if all layers computed its hidden state correctly; a wrong hidden state points elsewhere.

    Args:
        weights: Weights by name; updated.
        hidden: Input of the LM head, of shape [positions, hidden].
        tokens: Row for each position.
    """
    wide = hidden.to(torch.float32)
    own = wide - wide.mean(dim=0)
    length = wide.norm(dim=1).mean() * own.norm(dim=1, keepdim=True)
    share = (own.norm(dim=1) / wide.norm(dim=1)).mean()
    head = weights["lm_head.weight"]
    head[torch.tensor(tokens, device=head.device)] = (own * (MARK / share) / length).to(head.dtype)


class InMemory(Checkpoint):
    """Checkpoint whose tensors are in memory."""

    def __init__(self, tensors: Mapping[str, Tensor], model: ModelSpec, dtype: torch.dtype) -> None:
        self._tensors, self.model = tensors, model
        self.dtype = dtype
        self.weight_bytes = 0

    def read_parts(
        self,
        names: Sequence[str],
        shapes: Sequence[tuple[int, ...]],
        dtype: torch.dtype | None = None,
    ) -> list[Tensor]:
        """Return tensors of these names and shapes."""
        tensors = [self._tensors[name] for name in names]
        assert [tuple(each.shape) for each in tensors] == [*shapes], f"shapes of {names}"
        return [each.to(dtype or self.dtype) for each in tensors]

    def read_matrices(
        self, names: Sequence[str], shapes: Sequence[tuple[int, ...]]
    ) -> list[Tensor]:
        """Return weights of these names and shapes; none is in FP8."""
        return self.read_parts(names, shapes)


class Executor(CudaExecutor):
    """gllm's executor of one stage, with weights from memory and access to all logits."""

    graph_fault = ""
    """Reason why decodes are not recorded as graphs; empty if they are."""
    scheduler: SchedulerConfig
    """Resolved configuration with the executor's capacity."""

    @property
    def num_graphs(self) -> int:
        """Number of recorded decode graphs."""
        return len(self._graph_sizes)

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Load weights from memory, instead of `load`."""
        with self.device:
            weights = Weights(InMemory(tensors, self.model, self.dtype))
            self._stage = ModelStage(self.model, weights, self.layers, self._max_model_len)

    @torch.inference_mode()
    def all_logits(self, batch: Batch) -> Tensor:
        """Compute the logits of all tokens of a prepared batch, instead of `compute`.

        Returns:
            Shape [tokens, vocabulary], float32.
        """
        there, flat = self._staging.put(batch.device_state.inputs, self.stream)
        rows = len(batch.inputs.positions)
        with self.stream.current():
            if rows in self._graph_sizes and batch.inputs.attention[None].rows.num_decodes == rows:
                self._graphs.fill_inputs(rows, there.stage, flat, None)
                logits = self._graphs.replay(rows)[: batch.num_tokens].clone()
            else:
                hidden = self._stage.forward(there.stage, None, self._cache.layers)
                logits = self._stage.compute_logits(hidden[: batch.num_tokens])
        self._staging.release(self.stream)
        self._runtime.synchronize()
        return logits


def executor_of(
    place: Place, folder: Path, tensors: Mapping[str, Tensor], blocks: int, longest: int,
    options: Mapping[str, str], graphs: bool,
) -> Executor:  # fmt: skip
    """Create the executor of the model in the folder, ready for steps.

    Args:
        place: The device.
        folder: Folder of config.json.
        tensors: Weights by name.
        blocks: Number of KV blocks.
        longest: Maximum context.
        options: Additional fields of EngineConfig.
        graphs: Record CUDA graphs of decodes.
    """
    described = read_config(folder)
    config = EngineConfig.from_options(
        str(folder),
        dtype="bfloat16",
        max_model_len=longest,
        max_num_batched_tokens=BATCHED,
        block_size=BLOCK_SIZE,
        max_num_seqs=8 if place.is_dry else MAX_GRAPH_ROWS,
        prefix_cache=False,
        **options,
    )
    layers = range(described.model.num_layers)
    planner = place.attention_planner(longest)
    executor = Executor(described, config, 1, layers, place.queues(), planner)
    executor.take(tensors)
    executor.scheduler = config.scheduler.resolve(1, blocks, longest)
    executor.reserve(executor.scheduler)
    executor.allocate(blocks, BLOCK_SIZE)
    executor.warm_up()
    if not graphs:
        executor.graph_fault = "no graphs: recording them failed before"
        return executor
    try:
        executor.record_graphs(config.scheduler.max_num_seqs, lambda done, total: None)
    except Exception as error:
        # The other rows need no graphs.
        executor.graph_fault = f"no graphs: {type(error).__name__}: {str(error).strip()[:200]}"
    return executor
