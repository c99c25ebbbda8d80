"""Tiny checkpoints with a multi-token prediction head, and what transformers' layers compute of it.

transformers computes no heads. The reference is put together from its embedding, decoder layer and
norms: a model of one layer more than the checkpoint says, the last of which is the head's.
"""

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.models.tiny_models import FAMILIES, randomize, sizes

NUM_LAYERS = 3
"""Layers of the model without the head."""
ALL_KEYS = 1024
"""Selected keys of sparse attention: more than any text has."""
DEEPSEEK = {
    "embedding_norm": "enorm",
    "hidden_norm": "hnorm",
    "projection": "eh_proj",
    "norm": "shared_head.norm",
}
MIMO = {
    "embedding_norm": "token_layernorm",
    "hidden_norm": "hidden_layernorm",
    "projection": "input_proj",
    "norm": "final_layernorm",
}
HEADS = {
    "deepseek-v3": DEEPSEEK,
    "deepseek-v3.2": DEEPSEEK,
    "glm4-moe": DEEPSEEK,
    "glm4-moe-lite": DEEPSEEK,
    "glm-dsa": DEEPSEEK,
    "mimo": MIMO,
}
"""Names of a head's own tensors by family."""


@dataclass
class HeadReference:
    """A model and its prediction head, computed by transformers' modules in float32."""

    model: Any
    """Of NUM_LAYERS + 1 layers."""
    tensors: dict[str, Any]
    """Own tensors of the head, by the keys of DEEPSEEK."""
    is_hidden_first: bool

    def guess(self, token_ids: list[int], count: int) -> list[int]:
        """Return the head's guesses of the tokens behind a text."""
        import torch

        with torch.no_grad():
            states = self._hidden_states(token_ids)[:-1]
            guesses: list[int] = []
            for _ in range(count):
                inputs = self._project(token_ids[1:] + guesses, states)
                output = self._run_layer(inputs)
                normed = self._norm("norm", output[-1:])
                guesses.append(int(self.model.lm_head(normed)[0].argmax()))
                states = torch.cat((states, output[-1:]))
        return guesses

    def next_token(self, token_ids: list[int]) -> int:
        """Return the token that the model itself prefers behind a text."""
        import torch

        with torch.no_grad():
            return int(self.model.lm_head(self._hidden_states(token_ids)[-1]).argmax())

    def _hidden_states(self, token_ids: list[int]) -> Any:
        """Return the states [tokens, hidden] of the model behind its final norm."""
        return self._run(range(NUM_LAYERS), self.model.model.norm, token_ids=token_ids)

    def _run_layer(self, inputs: Any) -> Any:
        """Return the output [tokens, hidden] of the head's layer."""
        import torch

        layers = range(NUM_LAYERS, NUM_LAYERS + 1)
        return self._run(layers, torch.nn.Identity(), inputs=inputs)

    def _run(self, layers: range, norm: Any, token_ids: Any = None, inputs: Any = None) -> Any:
        import torch

        part = copy.copy(self.model.model)
        part._modules = dict(part._modules)
        part.layers = torch.nn.ModuleList([self.model.model.layers[i] for i in layers])
        part.norm = norm
        part.config = copy.copy(part.config)
        part.config.num_hidden_layers = len(layers)
        if inputs is None:
            inputs = self.model.model.embed_tokens(torch.tensor(token_ids))
        return part(inputs_embeds=inputs[None], use_cache=False).last_hidden_state[0]

    def _project(self, token_ids: list[int], states: Any) -> Any:
        import torch

        embedded = self.model.model.embed_tokens(torch.tensor(token_ids))
        parts = [self._norm("embedding_norm", embedded), self._norm("hidden_norm", states)]
        if self.is_hidden_first:
            parts.reverse()
        return torch.cat(parts, dim=-1) @ self.tensors["projection"].T

    def _norm(self, name: str, x: Any) -> Any:
        eps = self.model.config.rms_norm_eps
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * self.tensors[name]


def save_with_head(family: str, folder: Path, seed: int = 0) -> HeadReference:
    """Write a checkpoint with a prediction head; return the reference.

    family: a key of HEADS.
    """
    import torch
    import transformers
    from safetensors.torch import load_file, save_file

    row, names = FAMILIES[family], HEADS[family]
    torch.manual_seed(seed)
    options = sizes(row) | {"num_hidden_layers": NUM_LAYERS + 1}
    if "index_topk" in options:
        # A head attends to all keys.
        options["index_topk"] = ALL_KEYS
    config = getattr(transformers, row.name + "Config")(**options)
    model = randomize(getattr(transformers, row.name + "ForCausalLM")(config).eval())
    size = config.hidden_size
    own = {key: 1 + 0.2 * torch.randn(size) for key in names}
    own["projection"] = 0.2 * torch.randn(size, 2 * size)
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    prefix = f"model.layers.{NUM_LAYERS}."
    tensors |= {f"{prefix}{names[key]}.weight": tensor for key, tensor in own.items()}
    written = json.loads((folder / "config.json").read_text())
    if row.rewrite is not None:
        written, _ = row.rewrite(written, tensors)
    if family == "mimo":
        tensors = {
            name.replace(prefix, "model.mtp_layers.0."): tensor for name, tensor in tensors.items()
        }
    else:
        # Published checkpoints have copies of both.
        for copied, name in (
            ("embed_tokens", "model.embed_tokens"),
            ("shared_head.head", "lm_head"),
        ):
            tensors[f"{prefix}{copied}.weight"] = tensors[f"{name}.weight"].clone()
    written |= {"num_hidden_layers": NUM_LAYERS, "num_nextn_predict_layers": 1}
    for key in ("layer_types", "mlp_layer_types", "indexer_types"):
        if isinstance(written.get(key), list):
            written[key] = written[key][:NUM_LAYERS]
    (folder / "config.json").write_text(json.dumps(written))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return HeadReference(model, own, is_hidden_first=family == "mimo")
