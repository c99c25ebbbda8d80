"""Finished texts for a list of prompts, by an engine of two stages."""

from gllm import LLM, SamplingParams


def main() -> None:
    """Ask the demo model for two continuations of each prompt."""
    params = SamplingParams(temperature=0.7, max_tokens=60, n=2, seed=1)
    with LLM("demo", pipeline_parallel_size=2) as llm:
        for result in llm.generate(["Once upon a time", "There was once a fox"], params):
            for output in result.outputs:
                print(f"{result.prompt}{output.text}\n")
        answer = llm.chat([{"role": "user", "content": "What does a fox like to eat?"}])
        print(answer.outputs[0].text)


if __name__ == "__main__":
    main()
