"""Driver of vLLM's LLM class."""

from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt

from benchmarks.cpu.drivers.timing import Prompts, measure, task


def main() -> None:
    """Run the task on the command line."""
    spec = task()
    llm = LLM(
        spec.model,
        dtype="bfloat16",
        max_model_len=spec.longest,
        kv_cache_memory_bytes=spec.kv_bytes,
        enable_prefix_caching=False,
    )

    def generate(prompts: Prompts, new: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
        inputs = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        llm.generate(inputs, params, use_tqdm=False)

    measure(spec, generate)


if __name__ == "__main__":
    main()
