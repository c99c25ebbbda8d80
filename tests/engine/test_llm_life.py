"""The life of LLM and Engine in a notebook: interrupts at any moment, garbage, use after the end.

The workers are scripted, except where only processes show the fault.
"""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest

from gllm.config.engine import EngineConfig
from gllm.config.sampling import SamplingParams
from gllm.engine.engine import Engine, EngineError
from gllm.engine.interface import EngineUnavailableError
from gllm.engine.llm import LLM
from gllm.engine.llm_outputs import RequestOutput
from gllm.options.field_types import FieldError
from tests.support.engines.scripted_engine import scripted_engine

LONG = SamplingParams(max_tokens=30, ignore_eos=True, temperature=0)


@pytest.fixture(autouse=True)
def interrupts_are_raised() -> Iterator[None]:
    """Commands that ran in this process before keep their handler until it ends."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def scripted_llm() -> LLM:
    """An LLM whose workers are scripted."""

    def create(config: EngineConfig, **options: Any) -> Engine:
        del options["nodes"]
        return scripted_engine(config, **options)[0]

    options: dict[str, Any] = {"pipeline_parallel_size": 2, "max_model_len": 256}
    return LLM("demo", progress=False, create_engine=create, **options)


def llm_with_workers() -> LLM:
    """An LLM with a worker process."""
    return LLM("demo", progress=False, threads=1, kv_cache_memory=2**24)


def press_ctrl_c() -> None:
    """Interrupt the main thread, in a blocking call too."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def children() -> set[int]:
    """Child processes of this one."""
    pids: set[int] = set()
    for task in Path("/proc/self/task").glob("*/children"):
        # Threads end meanwhile.
        with suppress(FileNotFoundError, ProcessLookupError):
            pids.update(map(int, task.read_text().split()))
    return pids


def until(condition: Callable[[], object]) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def live(create: Callable[[], LLM]) -> list[list[int]]:
    """Start, generate, close; return the tokens."""
    with create() as llm:
        outputs = llm.generate([[5, 6], [7]], LONG)
        return [output.outputs[0].token_ids for output in outputs]


def interrupt_lives(create: Callable[[], LLM], count: int, seed: int) -> None:
    """Interrupt lives at random moments; each leaves nothing, and the next one is undisturbed."""
    rng, before = Random(seed), children()
    expected = live(create)
    began = time.monotonic()
    live(create)
    duration = time.monotonic() - began
    gc.collect()
    num_descriptors, num_threads = len(os.listdir("/proc/self/fd")), threading.active_count()

    def is_clean() -> bool:
        return (
            children() <= before
            and len(os.listdir("/proc/self/fd")) <= num_descriptors
            and threading.active_count() <= num_threads
        )

    num_interrupted = 0
    for _ in range(count):
        timer = threading.Timer(rng.random() * duration, press_ctrl_c)
        try:
            timer.start()
            live(create)
            timer.join()
        except KeyboardInterrupt:
            num_interrupted += 1
        timer.join()
        until(is_clean)
        gc.collect()
    assert num_interrupted >= count / 2
    assert live(create) == expected


def test_interrupts_at_random_moments() -> None:
    interrupt_lives(scripted_llm, 5, 3)


@pytest.mark.full
def test_interrupts_at_random_moments_reap_the_workers() -> None:
    interrupt_lives(llm_with_workers, 50, 5)


def test_an_interrupted_batch_is_aborted_and_the_next_one_runs() -> None:
    with scripted_llm() as llm:
        threading.Timer(0.05, press_ctrl_c).start()
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[5]] * 8, SamplingParams(max_tokens=250, ignore_eos=True))
        assert llm.engine.status().num_requests == 0
        (output,) = llm.generate([[5]], LONG)
        assert len(output.outputs[0].token_ids) == 30


def test_an_llm_that_is_dropped_ends_its_engine() -> None:
    llm = scripted_llm()
    engine, thread = llm.engine, llm._thread
    reference = weakref.ref(llm)
    del llm
    assert reference() is None
    thread.join()
    assert engine.state == "dead"


def test_an_error_of_the_start_leaves_nothing() -> None:
    num_threads = threading.active_count()

    def fail(*arguments: Any, **options: Any) -> Engine:
        raise ValueError("no such thing")

    with pytest.raises(ValueError, match="no such thing"):
        LLM("demo", create_engine=fail)
    assert threading.active_count() == num_threads


METHODS: dict[str, Callable[[LLM], object]] = {
    "generate": lambda llm: llm.generate([[5]], LONG)[0].outputs[0].finish_reason,
    "chat": lambda llm: llm.chat([{"role": "user", "content": "Hi"}], LONG),
    "embed": lambda llm: llm.embed([[5]]),
    "abort": lambda llm: llm.abort(),
    "sleep": lambda llm: llm.sleep(),
    "wake_up": lambda llm: llm.wake_up(),
    "reset_prefix_cache": lambda llm: llm.reset_prefix_cache(),
    "start_profile": lambda llm: llm.start_profile("x"),
    "stop_profile": lambda llm: llm.stop_profile(),
    "close": lambda llm: llm.close(),
    "engine": lambda llm: llm.engine,
}
REFUSED_ASLEEP = {"generate", "chat", "embed", "reset_prefix_cache"}
REFUSED_ASLEEP |= {"start_profile", "stop_profile"}


def test_each_method_in_each_state() -> None:
    assert METHODS.keys() == {name for name in dir(LLM) if not name.startswith("_")}
    with scripted_llm() as llm:
        for name, method in METHODS.items():
            if name not in ("close", "sleep"):
                method(llm)
            assert llm.engine.state == "ready", name
        llm.sleep()
        for name, method in METHODS.items():
            if name in REFUSED_ASLEEP:
                with pytest.raises(EngineUnavailableError, match="sleeping"):
                    method(llm)
            elif name not in ("close", "wake_up"):
                method(llm)
            assert llm.engine.state == "sleeping", name
        llm.wake_up()
        assert METHODS["generate"](llm) == "length"
    for name, method in METHODS.items():
        if name in ("close", "engine"):
            method(llm)
        else:
            with pytest.raises(EngineError, match="was closed"):
                method(llm)


def test_another_thread_aborts() -> None:
    with scripted_llm() as llm:

        def abort() -> None:
            until(lambda: llm.engine.status().stats.running)
            assert llm.abort() == 2

        thread = threading.Thread(target=abort)
        thread.start()
        outputs = llm.generate([[5], [6]], SamplingParams(max_tokens=250, ignore_eos=True))
        thread.join()
        assert {output.outputs[0].finish_reason for output in outputs} == {"abort"}


def test_sleep_has_two_levels() -> None:
    with scripted_llm() as llm:
        llm.sleep(level=0)
        with pytest.raises(FieldError, match="level is 2"):
            llm.sleep(level=2)


def test_two_threads_close() -> None:
    llm = scripted_llm()
    threads = [threading.Thread(target=llm.close) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert llm.engine.state == "dead"


def test_close_ends_the_calls_of_other_threads() -> None:
    llm = scripted_llm()
    outputs: list[RequestOutput] = []

    def generate() -> None:
        params = SamplingParams(max_tokens=250, ignore_eos=True)
        outputs.extend(llm.generate([[5]] * 4, params))

    thread = threading.Thread(target=generate)
    thread.start()
    until(lambda: llm.engine.num_requests)
    llm.close()
    thread.join(20)
    assert not thread.is_alive()
    assert {output.error for output in outputs} == {"the engine was stopped"}


DROPPED = """
import asyncio, gc, sys
from tests.support.engines.scripted_engine import scripted_engine

async def main():
    engine, node = scripted_engine()
    await engine.start()
    node.context.destroy(0)

asyncio.run(main())
if "collect" in sys.argv:
    gc.collect()
print("done")
"""


@pytest.mark.parametrize("arguments", [["collect"], pytest.param([], marks=pytest.mark.full)])
def test_an_engine_that_was_not_stopped_does_not_hang(arguments: list[str]) -> None:
    command = [sys.executable, "-c", DROPPED, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout == "done\n"


NOT_CLOSED = """
from gllm import LLM, SamplingParams

llm = LLM("demo", progress=False, threads=1, kv_cache_memory=2**24)
llm.generate("Hello", SamplingParams(max_tokens=3))
"""


@pytest.mark.full
def test_an_llm_that_was_not_closed_ends_with_its_program() -> None:
    command = [sys.executable, "-c", NOT_CLOSED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""


@pytest.mark.full
async def test_a_dropped_engine_kills_its_workers() -> None:
    """The loop of a program ends before its objects are collected."""

    async def main() -> None:
        config = EngineConfig.from_options("demo", threads=1, kv_cache_memory=2**24)
        await Engine(config).start()

    before = children()
    await asyncio.to_thread(asyncio.run, main())
    gc.collect()
    assert children() <= before
