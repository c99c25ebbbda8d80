"""Programs that embed the engine survive the death of a worker."""

import asyncio
import os
import signal
import threading
from pathlib import Path

import pytest

from benchmarks.cpu.watch import tree
from examples import survive
from gllm.config.sampling import SamplingParams
from gllm.engine.llm import LLM
from gllm.kernels.native.builds import select_build
from tests.support.servers.server import wait_until

PROMPTS = ["Once upon a time", "There was once a fox", "Not far from here", "The old man said"]
STAGES = (0, 1)
"""The driver and the last stage, which die one after the other."""
NUM_TOKENS = 150
HAS_EXACT_TEXTS = select_build().path is not None
"""False if a BLAS decides the order of sums, so that recomputed texts may differ."""
KILL_AFTER = 40
"""Decoded tokens of all prompts after which the worker dies, of PROMPTS * NUM_TOKENS."""


def worker(stage: int) -> int:
    """Process id of this process's worker of a stage."""
    title = f"gllm-stage-{stage}".encode()
    own = [pid for pid in tree(os.getpid()) if pid != os.getpid()]
    (found,) = (pid for pid in own if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(title))
    return found


def test_llm_generate_survives_kills() -> None:
    """All prompts end with the tokens and log-probabilities of an undisturbed run."""
    params = SamplingParams(
        temperature=1, seed=3, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=1
    )
    with LLM("demo", progress=False, pipeline_parallel_size=2, recovery_timeout=300.0) as llm:
        undisturbed = llm.generate(PROMPTS, params)
        engine = llm._engine

        def kill(stage: int, after: int) -> None:
            wait_until(lambda: engine.status().stats.decode_tokens >= after)
            os.kill(worker(stage), signal.SIGKILL)

        for number, victim in enumerate(STAGES, start=1):
            after = engine.status().stats.decode_tokens + KILL_AFTER
            killer = threading.Thread(target=kill, args=(victim, after))
            killer.start()
            survived = llm.generate(PROMPTS, params)
            killer.join()
            status = engine.status()
            if HAS_EXACT_TEXTS:
                assert survived == undisturbed, victim
            lengths = [len(each.outputs[0].token_ids) for each in survived]
            assert lengths == [NUM_TOKENS] * len(PROMPTS)
            assert dict(status.recoveries) == {"killed": number}
            assert status.num_resumed_requests == number * len(PROMPTS)


def test_the_example_streams_on(capfd: pytest.CaptureFixture[str]) -> None:
    asyncio.run(survive.main())
    printed = capfd.readouterr().out
    assert f"[{survive.VICTIM} is killed]" in printed
    assert printed.endswith("same text\n") or not HAS_EXACT_TEXTS
