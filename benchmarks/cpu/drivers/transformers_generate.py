"""transformers' `generate` in process."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.cpu.drivers.timing import Prompts, measure, task


def main() -> None:
    given = task()
    torch.set_num_threads(given.threads)
    model: Any = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.bfloat16)

    def generate(prompts: Prompts, new: int) -> None:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=new,
                max_new_tokens=new,
            )

    measure(given, generate)


if __name__ == "__main__":
    main()
