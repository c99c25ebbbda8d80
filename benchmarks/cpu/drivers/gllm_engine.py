"""gllm's embeddable engine in process."""

from typing import Any

from benchmarks.cpu.drivers.timing import Prompts, measure, task
from gllm import LLM, SamplingParams


def main() -> None:
    given = task()
    options: dict[str, Any] = {"dtype": "bfloat16", "prefix_cache": False}
    options |= {"threads": given.threads, "kv_cache_memory": given.kv_bytes}
    if given.weights != "bf16":
        options["quantization"] = given.weights
    with LLM(given.model, progress=False, **options) as llm:

        def generate(prompts: Prompts, new: int) -> None:
            params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
            llm.generate(prompts, params)

        measure(given, generate)


if __name__ == "__main__":
    main()
