"""Threads of compiled kernels: the same bits with any number of them, anywhere; none at rest."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import get_context

import pytest
import torch
from torch import Tensor

from gllm.kernels.linear import linear, prepare
from gllm.kernels.linear_int8 import linear_int8, prepare_int8
from gllm.kernels.native.library import load_library
from gllm.kernels.rms_norm import rms_norm
from gllm.kernels.threads import using_num_threads

pytestmark = pytest.mark.skipif(load_library() is None, reason="no compiled kernels here")

ROWS, INPUTS, OUTPUTS = 70, 512, 1024


def compute(rows: int, seed: int = 0) -> list[Tensor]:
    """Return results of kernels that divide their work: products, 8 bits, a norm."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, INPUTS, generator=generator).bfloat16()
    weight = torch.randn(OUTPUTS, INPUTS, generator=generator).bfloat16()
    return [
        linear(x, prepare(weight), None),
        linear_int8(x, prepare_int8(weight), None),
        rms_norm(x, weight[0], 1e-6),
    ]


def count_helpers() -> int:
    """Return the number of this process's threads that the kernels have started."""
    names = []
    for task in os.listdir("/proc/self/task"):
        # A thread may end meanwhile.
        with suppress(OSError), open(f"/proc/self/task/{task}/comm", encoding="ascii") as file:
            names.append(file.read().strip())
    return names.count("gllm-kernels")


def wait_for_helpers(count: int) -> None:
    """Wait until there are so many: they end after the thread that they help, in Python's eyes."""
    deadline = time.monotonic() + 30
    while count_helpers() != count:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("rows", [1, 3, ROWS])
def test_any_number_of_threads_computes_the_same_bits(rows: int) -> None:
    with using_num_threads(1):
        alone = compute(rows)
    for count in (2, 3, 8):
        with using_num_threads(count):
            for _ in range(5):
                assert all(map(torch.equal, compute(rows), alone)), count


def test_threads_that_call_at_the_same_time_have_helpers_of_their_own() -> None:
    with using_num_threads(3):
        wanted = [compute(ROWS, seed) for seed in range(4)]
        before = count_helpers()
        with ThreadPoolExecutor(4) as pool:
            for _ in range(5):
                made = list(pool.map(lambda seed: compute(ROWS, seed), range(4)))
                for results, expected in zip(made, wanted, strict=True):
                    assert all(map(torch.equal, results, expected))
    wait_for_helpers(before)


def test_helpers_end_with_the_thread_that_they_help() -> None:
    before = count_helpers()
    with using_num_threads(3), ThreadPoolExecutor(1) as pool:
        pool.submit(compute, ROWS).result()
        assert count_helpers() >= before + 2
    wait_for_helpers(before)


def test_a_forked_child_starts_its_own_helpers() -> None:
    x, matrix = torch.ones(ROWS, INPUTS), prepare(torch.ones(OUTPUTS, INPUTS))
    queue = get_context("fork").SimpleQueue()

    def compute_in_child() -> None:
        # Nothing but a kernel: torch's own threads do not survive a fork.
        queue.put((linear(x, matrix, None)[-1, :4].tolist(), count_helpers()))

    with using_num_threads(3):
        linear(x, matrix, None)
        child = get_context("fork").Process(target=compute_in_child)
        child.start()
    try:
        child.join(30)
        assert child.exitcode == 0
        assert queue.get() == ([INPUTS] * 4, 2)
    finally:
        child.kill()


def test_helpers_without_work_take_no_time() -> None:
    with using_num_threads(4):
        compute(ROWS)
    time.sleep(0.02)
    begin = time.process_time()
    time.sleep(0.1)
    assert time.process_time() - begin < 0.05
