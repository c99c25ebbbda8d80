"""transformers on the very same weights: generate, continuous batching, logits.

Owns how its model is made of tensors that are there, and how its steps are timed. transformers is
imported where it is used: rows without it go on without it.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.place import Place
from benchmarks.gpu.rows import Measured, Skip
from benchmarks.gpu.stand_ins import missing


class Peer:
    """transformers' model of the configuration in a folder, with SDPA."""

    def __init__(
        self,
        place: Place,
        folder: Path,
        tensors: Mapping[str, Tensor],
        dtype: torch.dtype | None = None,
    ) -> None:
        """tensors: by their names in checkpoints, shared, not copied; dtype: theirs, where it is
        not the place's."""
        if missing("transformers"):
            raise Skip("no transformers")
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
                # No part of a checkpoint: on the meta device it has no numbers.
                with place.device:
                    model.set_submodule(name, type(module)(config))
        left = [name for name, each in model.named_buffers() if each.is_meta]
        if left:
            raise ValueError(f"transformers' model has buffers without numbers: {left[0]}")
        self._model = model.eval().requires_grad_(False)

    @torch.inference_mode()
    def hidden(self, prompt: Sequence[int]) -> Tensor:
        """[tokens, hidden]: what the LM head is given."""
        return self._model.model(self._ids([prompt])).last_hidden_state[0]

    @torch.inference_mode()
    def logits(self, prompt: Sequence[int]) -> Tensor:
        """[tokens, vocabulary] float32."""
        return self._model(self._ids([prompt])).logits[0].to(torch.float32)

    def generate(self, prompts: Sequence[Sequence[int]], new: int) -> Measured:
        """A decode step of a static batch: a run with `new` more tokens less one without, each the
        quicker one of two."""
        ids = self._ids(prompts)

        def run(tokens: int) -> None:
            with torch.inference_mode():
                made = self._model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    generation_config=_settings(tokens),
                )
            if made.shape[1] != ids.shape[1] + tokens:
                raise ValueError(f"{made.shape[1] - ids.shape[1]} tokens came, not {tokens}")

        return self._step(run, len(prompts), new, repeats=2)

    def continuous(self, prompts: Sequence[Sequence[int]], new: int) -> Measured:
        """The same with transformers' continuous batching, as far as this version has it."""
        if not hasattr(self._model, "generate_batch"):
            raise Skip("this version of transformers has no generate_batch")

        more: dict[str, Any] = {}
        if self.place.is_dry:
            # By itself it would take most of the machine's memory.
            generation: Any = importlib.import_module("transformers.generation")
            small = generation.ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)
            more["continuous_batching_config"] = small
        self.place.free_bytes()

        def run(tokens: int) -> None:
            made = self._model.generate_batch(
                inputs=[list(prompt) for prompt in prompts],
                generation_config=_settings(tokens),
                **more,
            )
            lengths = {len(output.generated_tokens) for output in made.values()}
            if len(made) != len(prompts) or lengths != {tokens}:
                raise ValueError(f"{len(made)} texts of {sorted(lengths)} tokens, not {tokens}")

        # Once each, for every call sets up its memory and graphs anew, which takes long.
        return self._step(run, len(prompts), new, repeats=1)

    def _step(self, run: Callable[[int], None], batch: int, new: int, repeats: int) -> Measured:
        """The difference of both runs behind a first one, which sets things up."""
        run(2)
        short, long = (
            min(self.place.wall(partial(run, count)) for _ in range(repeats))
            for count in (1, 1 + new)
        )
        step = (long - short) / new
        if step <= 0:
            raise Skip(
                f"{1 + new} tokens took {long:.3f} s, one {short:.3f} s: no step can be told"
            )
        return Measured({"ms": step * 1000, "tokens_per_s": batch / step})

    def _ids(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor([list(prompt) for prompt in prompts], device=self.place.device)


def _settings(tokens: int) -> Any:
    """Greedy, exactly so many tokens."""
    import transformers

    return transformers.GenerationConfig(
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        use_cache=True,
        pad_token_id=0,
        eos_token_id=None,
    )
