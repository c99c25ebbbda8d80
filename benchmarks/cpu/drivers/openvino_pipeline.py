"""Driver of OpenVINO GenAI's continuous batching."""

import numpy as np
import openvino as ov
import openvino_genai as genai

from benchmarks.cpu.drivers.timing import Prompts, Task, measure, task

BATCHED_TOKENS = 2048
"""Maximum tokens per step, as in vLLM and gllm."""


def properties(spec: Task) -> dict[str, object]:
    """Return properties of the CPU plugin: bfloat16 arithmetic, a cache as wide as the weights."""
    cache = ov.Type.bf16 if spec.weights == "bf16" else ov.Type.u8
    return {
        "INFERENCE_NUM_THREADS": spec.threads,
        "INFERENCE_PRECISION_HINT": ov.Type.bf16,
        "KV_CACHE_PRECISION": cache,
    }


def main() -> None:
    """Run the task on the command line."""
    spec = task()
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = spec.kv_bytes // 2**30
    scheduler.enable_prefix_caching = False
    scheduler.max_num_batched_tokens = BATCHED_TOKENS
    pipeline = genai.ContinuousBatchingPipeline(spec.model, scheduler, "CPU", properties(spec))

    def generate(prompts: Prompts, new: int) -> None:
        config = genai.GenerationConfig(max_new_tokens=new, ignore_eos=True, do_sample=False)
        inputs = [ov.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        pipeline.generate(inputs, [config] * len(inputs))

    measure(spec, generate)


if __name__ == "__main__":
    main()
