"""Driver of gllm's embedded engine."""

from typing import Any

from benchmarks.cpu.drivers.timing import Prompts, measure, task
from gllm import LLM, SamplingParams


def main() -> None:
    """Run the task on the command line."""
    spec = task()
    options: dict[str, Any] = {"dtype": "bfloat16", "prefix_cache": False}
    options |= {"threads": spec.threads, "kv_cache_memory": spec.kv_bytes}
    if spec.weights in ("int8", "int4"):
        options["quantization"] = spec.weights
    with LLM(spec.model, progress=False, **options) as llm:

        def generate(prompts: Prompts, new: int) -> None:
            params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
            llm.generate(prompts, params)

        measure(spec, generate)


if __name__ == "__main__":
    main()
