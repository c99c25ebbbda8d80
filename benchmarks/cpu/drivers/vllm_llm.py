"""vLLM's LLM class in process."""

from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt

from benchmarks.cpu.drivers.timing import Prompts, measure, task


def main() -> None:
    given = task()
    llm = LLM(
        given.model,
        dtype="bfloat16",
        max_model_len=given.longest,
        kv_cache_memory_bytes=given.kv_bytes,
        enable_prefix_caching=False,
    )

    def generate(prompts: Prompts, new: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
        inputs = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        llm.generate(inputs, params, use_tqdm=False)

    measure(given, generate)


if __name__ == "__main__":
    main()
