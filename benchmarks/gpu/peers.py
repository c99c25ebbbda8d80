"""transformers on the very same weights: generate, continuous batching, logits.

Owns how its model is made of tensors that are there, and how its steps are timed. transformers is
imported where it is used: rows without it go on without it.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.place import Place
from benchmarks.gpu.rows import Measured, Skip

REPEATS = 2
"""Of which the quicker one counts: the first sets things up."""


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
        import transformers

        self.place, self.folder = place, folder
        config: Any = transformers.AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            model: Any = transformers.AutoModelForCausalLM.from_config(
                config, dtype=dtype or place.dtype, attn_implementation="sdpa"
            )
        model.load_state_dict(dict(tensors), assign=True)
        with place.device:
            # No part of a checkpoint: on the meta device it has no numbers.
            model.model.rotary_emb = type(model.model.rotary_emb)(config)
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
        """A decode step of a static batch: a run with `new` more tokens less one without."""
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

        return self._step(run, len(prompts), new)

    def continuous(self, prompts: Sequence[Sequence[int]], new: int) -> Measured:
        """The same with transformers' continuous batching, as far as this version has it."""
        if not hasattr(self._model, "generate_batch"):
            raise Skip("this version of transformers has no generate_batch")

        def run(tokens: int) -> None:
            with torch.inference_mode():
                made = self._model.generate_batch(
                    inputs=[list(prompt) for prompt in prompts], generation_config=_settings(tokens)
                )
            lengths = {len(output.generated_tokens) for output in made.values()}
            if len(made) != len(prompts) or lengths != {tokens}:
                raise ValueError(f"{len(made)} texts of {sorted(lengths)} tokens, not {tokens}")

        return self._step(run, len(prompts), new)

    def _step(self, run: Any, batch: int, new: int) -> Measured:
        run(2)
        short, long = (
            min(self.place.wall(lambda count=count: run(count)) for _ in range(REPEATS))
            for count in (1, 1 + new)
        )
        step = (long - short) / new
        if step <= 0:
            fault = f"{1 + new} tokens took {long:.3f} s, one {short:.3f} s: no step can be told"
            return Measured({}, fault=fault)
        note = "" if self.place.is_dry else f"1 token {short * 1000:.0f} ms"
        return Measured({"wall_ms": step * 1000, "tokens_per_s": batch / step}, note=note)

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
