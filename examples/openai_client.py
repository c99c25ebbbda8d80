"""A streamed chat with a running server, by OpenAI's own client (`make serve` first)."""

import openai


def main() -> None:
    """Ask for a story and print it as it comes."""
    with openai.OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none") as client:
        stream = client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": "Tell me a story about Otto the fox."}],
            stream=True,
        )
        for chunk in stream:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main()
