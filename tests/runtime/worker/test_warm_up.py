"""No kernel is left to be compiled once a stage has run its example steps."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.gpu.host import HostQueues
from gllm.config.engine import EngineConfig
from gllm.kernels.fp8_weights import Fp8Matrix
from gllm.kernels.grouped_words import GroupedWords
from gllm.kernels.triton import linear_fp8, tiles
from gllm.kernels.triton.linear_grouped import linear_grouped
from gllm.messages.sampling import SequenceSamplingParams
from gllm.messages.steps import RegisterSequences
from gllm.models.config import read_config
from gllm.runtime.worker.cuda.executor import CudaExecutor
from gllm.runtime.worker.cuda.graphs import plan_table_attention
from gllm.scheduler.plan import ScheduledRow, StepPlan
from tests.support.gpu.variants import recorded_variants
from tests.support.models.tiny_models import save

LONGEST, BLOCK_SIZE, NUM_BLOCKS, MAX_TOKENS = 4096, 16, 1024, 512
GREEDY = SequenceSamplingParams(temperature=0.0)
SPECIAL = [
    SequenceSamplingParams(temperature=0.7),
    SequenceSamplingParams(top_p=0.5),
    SequenceSamplingParams(top_k=3),
    SequenceSamplingParams(min_p=0.1),
    SequenceSamplingParams(repetition_penalty=1.2),
    SequenceSamplingParams(presence_penalty=0.3),
    SequenceSamplingParams(logprobs=2),
    SequenceSamplingParams(bad_words=((3, 4, 5),)),
    SequenceSamplingParams(allowed=(1, 2)),
    SequenceSamplingParams(logit_bias={3: 1.0}),
]


def executor_of(folder: Path, **options: Any) -> CudaExecutor:
    """A stage whose kernels for GPUs are recorded."""
    config = read_config(folder)
    engine = EngineConfig.from_options(
        str(folder),
        block_size=BLOCK_SIZE,
        max_model_len=LONGEST,
        max_num_seqs=64,
        max_num_batched_tokens=MAX_TOKENS,
        **options,
    )
    layers = range(config.model.num_layers)
    plan = partial(plan_table_attention, requested_tiles=set())
    executor = CudaExecutor(config, engine, 1, layers, HostQueues(), plan)
    executor.load(folder, lambda done, total: None)
    executor.reserve(engine.scheduler.resolve(1, NUM_BLOCKS, LONGEST))
    return executor


class Steps:
    """Steps of sequences with any context, by hand."""

    def __init__(self, executor: CudaExecutor) -> None:
        self._executor, self._count = executor, 0
        self._ended: list[int] = []

    def run(self, rows: list[tuple[int, int, SequenceSamplingParams]]) -> None:
        """One step of rows, each (tokens before, new tokens, sampling) of a new sequence."""
        planned = []
        for start, tokens, sampling in sorted(rows, key=lambda row: row[1]):
            self._count += 1
            seq, prompt = self._count, [1] * (start + tokens)
            self._executor.register(RegisterSequences(seq, len(prompt), prompt, sampling))
            blocks = [block % NUM_BLOCKS for block in range(-(-len(prompt) // BLOCK_SIZE))]
            planned.append(ScheduledRow(seq, 0, start, tokens, blocks, [], True))
        batch = self._executor.prepare(StepPlan(self._count, planned, self._ended))
        self._ended = [row.seq for row in planned]
        self._executor.compute(batch, None)


@pytest.mark.parametrize(
    "family",
    [
        "gemma2",
        "deepseek-v2",
        pytest.param("qwen3", marks=pytest.mark.full),
        pytest.param("qwen2-moe", marks=pytest.mark.full),
    ],
)
def test_no_step_needs_a_kernel_that_examples_did_not(family: str, tmp_path: Path) -> None:
    executor = executor_of(save(family, tmp_path))
    with recorded_variants() as variants, torch.inference_mode():
        # As at the start of a stage.
        executor.available_bytes(0.9, BLOCK_SIZE, graph_rows=4)
        executor.allocate(NUM_BLOCKS, BLOCK_SIZE)
        executor.warm_up()
        known = set(variants)
        assert any("decode_kernel" in one for one in known)
        assert any("prefill_kernel" in one for one in known)
        steps = Steps(executor)
        for count in (1, 2, 3, 16, 17, 32, 40, 64):
            steps.run([(count, 1, GREEDY)] * count)
            steps.run([(1500 + count, 1, SPECIAL[count % 10])] * count)
        for tokens in (2, 3, 16, 31, 32, 33, 48, 64, 100, 511):
            steps.run([(0, tokens, GREEDY)])
            steps.run([(2000, tokens, SPECIAL[tokens % 10]), (tokens, 1, GREEDY)])
        steps.run([(4000, 1, GREEDY)] + [(5, 1, one) for one in SPECIAL] + [(3000, 200, GREEDY)])
        assert sorted(variants - known) == []


def test_products_by_8_bit_floats_are_known_by_the_numbers_of_tokens_at_which_tiles_change() -> (
    None
):
    """For weights whose inputs are cut into parts, and for others."""
    counts = [1, *tiles.list_token_boundaries(), 2000]
    for outputs, inputs in ((3584, 3584), (28_672, 4096), (256, 14_336)):
        codes = torch.zeros(1, dtype=torch.float8_e4m3fn).expand(outputs, inputs)
        matrix = Fp8Matrix(
            codes, torch.ones(outputs // 128, inputs // 128), 128, 128, torch.bfloat16
        )
        with recorded_variants() as variants:
            for bias in (None, torch.zeros(outputs, dtype=torch.bfloat16)):
                for tokens in counts:
                    x = torch.zeros(1, inputs, dtype=torch.bfloat16).expand(tokens, inputs)
                    linear_fp8.linear_fp8(x.contiguous(), matrix, bias, fp8=True)
                known = set(variants)
                for tokens in (2, 15, 18, 31, 48, 64, 100, 256, 1111, 1999):
                    x = torch.zeros(tokens, inputs, dtype=torch.bfloat16)
                    linear_fp8.linear_fp8(x, matrix, bias, fp8=True)
                assert sorted(variants - known) == []


def test_products_by_few_bits_are_known_by_the_numbers_of_tokens_at_which_tiles_change() -> None:
    """For weights whose inputs are cut into parts, and for others."""
    counts = [1, *tiles.list_token_boundaries(), 2000]
    for outputs, inputs in ((3584, 3584), (28_672, 4096), (256, 14_336)):
        codes = torch.zeros(1, dtype=torch.int32).expand(inputs // 128, 16, outputs)
        scales = torch.zeros(1, dtype=torch.float16).expand(inputs // 32, outputs)
        words = GroupedWords(4, 32, 8, inputs, None, codes, None, scales, None, None, None)
        with recorded_variants() as variants:
            for tokens in counts:
                linear_grouped(torch.zeros(tokens, inputs, dtype=torch.bfloat16), words, None)
            known = set(variants)
            for tokens in (2, 15, 18, 31, 48, 64, 100, 256, 1111, 1999):
                linear_grouped(torch.zeros(tokens, inputs, dtype=torch.bfloat16), words, None)
            assert sorted(variants - known) == []


COUNT = """
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver


class Driver:
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)


driver.set_active(Driver())
from gllm.kernels.triton.common import CompilationCounter
from gllm.kernels.triton.rms_norm import _rms_norm


def launch(rows, size):
    x, weight = torch.zeros(rows, size), torch.zeros(size)
    numbers = (rows, size, size, size, 1e-6)
    _rms_norm.warmup(x, x, weight, x, *numbers, ADD=False, ROWS=1, BLOCK=256, grid=(1,))


launch(7, 256)
counter = CompilationCounter()
for rows in (7, 1, 16, 4096):
    launch(rows, 256)
print(counter.count)
launch(1, 200)
launch(3, 200)
print(counter.count)
"""


@pytest.mark.full
def test_kernels_that_are_compiled_late_are_counted() -> None:
    """Not those of another number of rows, which is no constant."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COUNT], env=kept, capture_output=True, text=True)
    assert done.stdout.split() == ["0", "1"], done.stderr
    assert done.stderr.count("compiled while serving: _rms_norm") == 1
