"""Streams from an engine inside one's own asyncio program."""

import asyncio

from gllm import Engine, EngineConfig, SamplingParams


async def tell(engine: Engine, prompt: str) -> None:
    """Print a text as it comes."""
    async for delta in engine.generate(prompt, SamplingParams(temperature=0, max_tokens=60)):
        print(delta.text, end="", flush=True)
    print()


async def main() -> None:
    """One story after the other, then two at the same time."""
    async with Engine(EngineConfig.from_options("demo", pipeline_parallel_size=2)) as engine:
        await tell(engine, "Once upon a time")
        await asyncio.gather(tell(engine, "There was once a"), tell(engine, "Not far from here"))


if __name__ == "__main__":
    asyncio.run(main())
