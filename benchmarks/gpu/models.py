"""Models in published shapes with random weights, made where they are computed with.

Owns the shapes, the weights and how gllm's executor takes them without a file: only config.json is
written. Does not know what is measured.

Weights are normal numbers by which every map keeps the size of what goes through it, so that
activations stay sane over all layers; queries are twice as large, so that attention prefers some
tokens. The LM head's rows are too, until `mark` replaces some.
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
from gllm.models.stage import ModelStage
from gllm.runtime.batch import Batch
from gllm.runtime.cuda.backend import MAX_GRAPH_ROWS
from gllm.runtime.cuda.executor import CudaExecutor
from gllm.scheduler.config import SchedulerConfig

SHARED = {
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "rms_norm_eps": 1e-6,
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
    # Nothing ends a text.
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
"""Logit of a marked row for the hidden state that it was made from, about."""
BLOCK_SIZE = 16
BATCHED = 2048
"""Most tokens of a step."""


def config_of(name: str, is_dry: bool) -> dict[str, Any]:
    """config.json of a model, in a dry run of a tiny one of its kind."""
    return CONFIGS[name] | (TINY if is_dry else {})


def write_config(config: Mapping[str, Any], folder: Path) -> None:
    """Make the folder one that gllm and transformers read the model's shape from."""
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def random_weights(place: Place, config: Mapping[str, Any]) -> dict[str, Tensor]:
    """All tensors of a dense Llama or Qwen2 by their names in checkpoints, on the device."""
    place.seed(config["model_type"])
    hidden, inner, vocabulary = (
        config[key] for key in ("hidden_size", "intermediate_size", "vocab_size")
    )
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim = hidden // heads

    def normal(*shape: int, std: float, mean: float = 0.0) -> Tensor:
        return torch.empty(shape, dtype=place.dtype, device=place.device).normal_(mean, std)

    made = {
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
            made[f"{layer}.{name}.weight"] = normal(outputs, inputs, std=scale * inputs**-0.5)
            if config["model_type"] == "qwen2" and name[-6:] in ("q_proj", "k_proj", "v_proj"):
                made[f"{layer}.{name}.bias"] = normal(outputs, std=0.1)
        for name in ("input_layernorm", "post_attention_layernorm"):
            made[f"{layer}.{name}.weight"] = normal(hidden, std=0.1, mean=1.0)
    return made


def mark(weights: dict[str, Tensor], hidden: Tensor, tokens: Sequence[int]) -> None:
    """Make row tokens[i] of the LM head point to hidden[i] [hidden], beyond what all of them have
    in common.

    Among random rows the two largest logits of a position are so close that bfloat16 alone decides
    which is the larger one. With these rows the largest is the position's own, by far, and only
    where all layers computed its hidden state; a wrong one would point elsewhere.
    """
    wide = hidden.to(torch.float32)
    own = wide - wide.mean(dim=0)
    length = wide.norm(dim=1).mean() * own.norm(dim=1, keepdim=True)
    share = (own.norm(dim=1) / wide.norm(dim=1)).mean()
    head = weights["lm_head.weight"]
    head[torch.tensor(tokens, device=head.device)] = (own * (MARK / share) / length).to(head.dtype)


class InMemory(Checkpoint):
    """Tensors that are there already in the place of a folder's."""

    def __init__(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        self._tensors = tensors
        self.dtype = dtype
        self.weight_bytes = 0

    def read_parts(
        self,
        names: Sequence[str],
        shapes: Sequence[tuple[int, ...]],
        dtype: torch.dtype | None = None,
    ) -> list[Tensor]:
        """As in Checkpoint."""
        found = [self._tensors[name] for name in names]
        assert [tuple(each.shape) for each in found] == [*shapes], f"shapes of {names}"
        return [each.to(dtype or self.dtype) for each in found]

    def read_matrices(
        self, names: Sequence[str], shapes: Sequence[tuple[int, ...]]
    ) -> list[Tensor]:
        """As in Checkpoint; none is in 8-bit floats."""
        return self.read_parts(names, shapes)


class Executor(CudaExecutor):
    """gllm's executor of one stage that takes weights from memory and shows all logits."""

    graph_fault = ""
    """Why decodes are no graphs; empty where they are."""
    scheduler: SchedulerConfig
    """Resolved: what the executor has room for."""

    @property
    def num_graphs(self) -> int:
        """That decodes can be replayed by."""
        return len(self._graph_sizes)

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """In place of `load`."""
        with self.device:
            weights = Weights(InMemory(tensors, self.dtype))
            self._stage = ModelStage(self.model, weights, self.layers, self._max_model_len)

    @torch.inference_mode()
    def all_logits(self, batch: Batch) -> Tensor:
        """[tokens, vocabulary] float32 of a batch that `prepare` made, in place of `compute`."""
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
        self._queues.synchronize()
        return logits


def executor_of(
    place: Place, folder: Path, tensors: Mapping[str, Tensor], blocks: int, longest: int,
    options: Mapping[str, str], graphs: bool,
) -> Executor:  # fmt: skip
    """The model in the folder, ready for steps; options: more fields of EngineConfig; graphs: of
    decodes are to be recorded."""
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
    executor = Executor(described, config, 0, 1, layers, place.queues(), planner)
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
        # All else can be measured without.
        executor.graph_fault = f"no graphs: {type(error).__name__}: {str(error).strip()[:200]}"
    return executor
