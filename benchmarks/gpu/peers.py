"""transformers on the same weights: generate, continuous batching, logits.

transformers is imported on use, so that rows without it run if it is missing.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.place import Place
from benchmarks.gpu.rows import Measured, SkipRowError
from benchmarks.gpu.stand_ins import missing


class Peer:
    """transformers' model with the configuration in a folder, with SDPA."""

    def __init__(
        self,
        place: Place,
        folder: Path,
        tensors: Mapping[str, Tensor],
        dtype: torch.dtype | None = None,
    ) -> None:
        """Build the model from tensors in memory.

        Args:
            place: The device.
            folder: Folder of config.json.
            tensors: Weights by their names in checkpoints; shared, not copied.
            dtype: Type of the weights, if not that of the place.
        """
        if missing("transformers"):
            raise SkipRowError("no transformers")
        import transformers

        self.place, self.folder = place, folder
        config: Any = transformers.AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            model: Any = transformers.AutoModelForCausalLM.from_config(
                config, dtype=dtype or place.dtype, attn_implementation="sdpa"
            )
        model.load_state_dict(dict(tensors), assign=True)
        for name, module in list(model.named_modules()):
            if name.endswith("rotary_emb"):
                # Not in the checkpoint, so on the meta device the module has no values.
                with place.device:
                    model.set_submodule(name, type(module)(config))
        left = [name for name, each in model.named_buffers() if each.is_meta]
        if left:
            raise ValueError(f"transformers' model has buffers without numbers: {left[0]}")
        self._model = model.eval().requires_grad_(False)

    @torch.inference_mode()
    def hidden(self, prompt: Sequence[int]) -> Tensor:
        """Return the input of the LM head, of shape [tokens, hidden]."""
        return self._model.model(self._ids([prompt])).last_hidden_state[0]

    @torch.inference_mode()
    def logits(self, prompt: Sequence[int]) -> Tensor:
        """Return the logits, of shape [tokens, vocabulary] and type float32."""
        return self._model(self._ids([prompt])).logits[0].to(torch.float32)

    def generate(self, prompts: Sequence[Sequence[int]], new: int) -> Measured:
        """Measure a decode step of a static batch.

        The step is the difference between a run with `new` more tokens and one without, divided by
        `new`; each run is the faster of two.
        """
        ids = self._ids(prompts)

        def run(tokens: int) -> None:
            with torch.inference_mode():
                output = self._model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    generation_config=_settings(tokens),
                )
            if output.shape[1] != ids.shape[1] + tokens:
                raise ValueError(
                    f"{output.shape[1] - ids.shape[1]} tokens were generated, not {tokens}"
                )

        return self._step(run, len(prompts), new, repeats=2)

    def continuous(self, prompts: Sequence[Sequence[int]], new: int) -> Measured:
        """Measure a decode step with transformers' continuous batching.

        Raises:
            SkipRowError: This version of transformers does not have it.
        """
        if not hasattr(self._model, "generate_batch"):
            raise SkipRowError("this version of transformers has no generate_batch")

        more: dict[str, Any] = {}
        if self.place.is_dry:
            # The default size would use most of the machine's memory.
            epoch: Any = importlib.import_module("transformers.epoch")
            small = epoch.ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)
            more["continuous_batching_config"] = small
        self.place.free_bytes()

        def run(tokens: int) -> None:
            outputs = self._model.generate_batch(
                inputs=[list(prompt) for prompt in prompts],
                generation_config=_settings(tokens),
                **more,
            )
            lengths = {len(output.generated_tokens) for output in outputs.values()}
            if len(outputs) != len(prompts) or lengths != {tokens}:
                raise ValueError(f"{len(outputs)} texts of {sorted(lengths)} tokens, not {tokens}")

        # Once each: every call allocates its memory and records its graphs again.
        return self._step(run, len(prompts), new, repeats=1)

    def _step(self, run: Callable[[int], None], batch: int, new: int, repeats: int) -> Measured:
        """Return the difference of both runs per token, after a warm-up."""
        run(2)
        short, long = (
            min(self.place.wall(partial(run, count)) for _ in range(repeats))
            for count in (1, 1 + new)
        )
        step = (long - short) / new
        if step <= 0:
            raise SkipRowError(
                f"{1 + new} tokens took {long:.3f} s, one {short:.3f} s: "
                "the step cannot be measured"
            )
        return Measured({"ms": step * 1000, "tokens_per_s": batch / step})

    def _ids(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor([list(prompt) for prompt in prompts], device=self.place.device)


def _settings(tokens: int) -> Any:
    """Return settings for exactly `tokens` greedy tokens."""
    import transformers

    return transformers.GenerationConfig(
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        use_cache=True,
        pad_token_id=0,
        eos_token_id=None,
    )
