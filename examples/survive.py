"""A text that goes on although a worker process dies while it is generated.

The engine starts the dead worker again and recomputes the tokens that were emitted. The stream
notices a pause, nothing else: the text is that of an undisturbed engine.
"""

import asyncio
import os
import signal
from pathlib import Path

from gllm import Engine, EngineConfig, SamplingParams

PROMPT = "Once upon a time there was a fox"
VICTIM = "gllm-stage-1"


def kill_worker(title: str) -> None:
    """Kill this process's worker of a title, as a fault or the kernel's out-of-memory killer does.

    Raises:
        ProcessLookupError: No worker has the title.
    """
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    for pid in map(int, children):
        if Path(f"/proc/{pid}/cmdline").read_text().startswith(title):
            os.kill(pid, signal.SIGKILL)
            return
    raise ProcessLookupError(title)


async def stream(engine: Engine, kill_after: int | None) -> str:
    """Print a text as it arrives; kill a worker after so many deltas. Return the text."""
    text, num_deltas = "", 0
    async for delta in engine.generate(PROMPT, SamplingParams(seed=7, max_tokens=120)):
        print(delta.text, end="", flush=True)
        text += delta.text
        num_deltas += 1
        if num_deltas == kill_after:
            print(f" [{VICTIM} is killed] ", end="", flush=True)
            kill_worker(VICTIM)
    print("\n")
    return text


async def main() -> None:
    """Generate a text undisturbed, then again with a kill in the middle; compare both."""
    async with Engine(EngineConfig.from_options("demo", pipeline_parallel_size=2)) as engine:
        undisturbed = await stream(engine, kill_after=None)
        survived = await stream(engine, kill_after=40)
    print("same text" if survived == undisturbed else "the texts differ")


if __name__ == "__main__":
    asyncio.run(main())
