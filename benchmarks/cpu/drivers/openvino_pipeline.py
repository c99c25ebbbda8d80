"""OpenVINO GenAI's continuous batching in process."""

import numpy as np
import openvino as ov
import openvino_genai as genai

from benchmarks.cpu.drivers.timing import Prompts, Task, measure, task

BATCHED_TOKENS = 2048
"""In a step at most, as vLLM and gllm have it."""


def properties(given: Task) -> dict[str, object]:
    """Arithmetic and cache of the CPU plugin: as wide as the weights."""
    cache = {"bf16": ov.Type.bf16, "int8": ov.Type.u8}[given.weights]
    return {
        "INFERENCE_NUM_THREADS": given.threads,
        "INFERENCE_PRECISION_HINT": ov.Type.bf16,
        "KV_CACHE_PRECISION": cache,
    }


def main() -> None:
    given = task()
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = given.kv_bytes // 2**30
    scheduler.enable_prefix_caching = False
    scheduler.max_num_batched_tokens = BATCHED_TOKENS
    pipeline = genai.ContinuousBatchingPipeline(given.model, scheduler, "CPU", properties(given))

    def generate(prompts: Prompts, new: int) -> None:
        config = genai.GenerationConfig(max_new_tokens=new, ignore_eos=True, do_sample=False)
        inputs = [ov.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        pipeline.generate(inputs, [config] * len(inputs))

    measure(given, generate)


if __name__ == "__main__":
    main()
