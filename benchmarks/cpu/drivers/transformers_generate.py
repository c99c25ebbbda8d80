"""Driver of transformers' `generate`."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.cpu.drivers.timing import Prompts, measure, task


def main() -> None:
    """Run the task on the command line."""
    spec = task()
    torch.set_num_threads(spec.threads)
    model: Any = AutoModelForCausalLM.from_pretrained(spec.model, dtype=torch.bfloat16)

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

    measure(spec, generate)


if __name__ == "__main__":
    main()
