"""Rows of the GPU benchmark see what is wrong; figures follow from ceilings; missing packages."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import agreement, attention, engine, kernels
from benchmarks.gpu.agreement import Truth, chunks_of, compare
from benchmarks.gpu.models import InMemory, mark
from benchmarks.gpu.place import Place
from benchmarks.gpu.report import SCHEMA, ceilings_of, complaints, derived, results_of, table
from benchmarks.gpu.rows import (
    FAILED,
    OK,
    SKIPPED,
    Measured,
    PendingRow,
    Row,
    SkipRowError,
    judged,
    run_row,
)
from gllm.kernels.native import library
from gllm.kernels.sampling import sample

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Place:
    # A dry run leaves out what is compiled; other tests need it.
    monkeypatch.setattr(library, "load_library", library.load_library)
    return Place(is_dry=True)


def of_kernels(place: Place, begin: str) -> PendingRow:
    return next(named for named in kernels.rows(place) if named.name.startswith(begin))


WRONG = {
    "decode attention": (attention, "paged_attention"),
    "prefill attention": (attention, "paged_attention"),
    "rms_norm, ": (kernels, "rms_norm"),
    "rms_norm behind": (kernels, "add_rms_norm"),
    "rotation": (kernels, "rotate_and_store"),
    "silu gate": (kernels, "act_and_mul"),
    "fp8 linear": (kernels, "linear_fp8"),
    "int4 linear": (kernels, "linear_grouped"),
    "experts": (kernels, "run_stacked"),
}


@pytest.mark.parametrize("row", WRONG)
def test_a_wrong_kernel_fails(row: str, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_row("kernels", of_kernels(place, row)).status == OK
    module, name = WRONG[row]
    right = getattr(module, name)

    def wrong(*arguments: Any) -> torch.Tensor:
        made = right(*arguments)
        # One number of many, by a quarter of the largest.
        made.view(-1)[-1] += 0.25 * made.abs().max() + 1e-3
        return made

    monkeypatch.setattr(module, name, wrong)
    failed = run_row("kernels", of_kernels(place, row))
    assert failed.status == FAILED
    assert "above the tolerance" in failed.note


def test_a_wrong_draw_fails(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    right = sample
    calls = iter(range(100))

    def wrong(logits: torch.Tensor, plan: Any) -> torch.Tensor:
        tokens = right(logits, plan)
        # The first call makes the reference.
        return tokens if not next(calls) else tokens + 1

    monkeypatch.setattr(kernels, "sample", wrong)
    assert run_row("kernels", of_kernels(place, "sampling, greedy")).status == FAILED


def test_what_a_row_raises_is_kept() -> None:
    def fail() -> Measured:
        raise ZeroDivisionError("by zero")

    def skip() -> Measured:
        raise SkipRowError("no flash")

    failed, skipped = run_row("x", PendingRow("a", fail)), run_row("x", PendingRow("b", skip))
    assert (failed.status, failed.note) == (FAILED, "ZeroDivisionError: by zero")
    assert "in fail" in failed.traceback
    assert (skipped.status, skipped.note) == (SKIPPED, "no flash")
    assert run_row("x", PendingRow("c", fail, is_rival=True)).status == SKIPPED
    nothing = judged({"error": float("nan"), "tolerance": 1.0}, {})
    assert nothing.fault
    broken = run_row("x", PendingRow("d", lambda: Measured({"ms": float("inf"), "bytes": 1.0})))
    assert (broken.status, broken.note) == (FAILED, "not finite: ms")
    assert broken.figures == {"ms": -1.0, "bytes": 1.0}


def logits(rows: int = 8, size: int = 50) -> torch.Tensor:
    torch.manual_seed(0)
    made = torch.randn(rows, size)
    made[torch.arange(rows), torch.arange(rows)] += 20
    return made


def test_agreement_sees_errors_and_other_tokens() -> None:
    truth = Truth([0] * 8, logits(), 0.1)
    assert not compare(logits() + 0.15, truth).fault
    far = compare(logits() + 0.25, truth)
    assert "error 0.25 is above 2 x 0.1" in far.fault
    other = logits()
    other[3, 7] = 40
    assert "1 of 8 likeliest tokens differ" in compare(other, truth).fault
    broken = logits()
    broken[0, 0] = float("nan")
    assert compare(broken, truth).fault


def test_agreement_sees_a_layer_that_is_a_bit_off(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = InMemory.read_parts

    def wrong(self: InMemory, names: list[str], *more: Any) -> list[torch.Tensor]:
        off = 1.2 if names == ["model.layers.0.mlp.down_proj.weight"] else 1.0
        return [off * each for each in right(self, names, *more)]

    monkeypatch.setattr(InMemory, "read_parts", wrong)
    named = engine.rows(place, "Llama-3.1-8B", tmp_path, {})
    ways = [each for each in named if "agreement" in each.name]
    rows = [run_row("x", each) for each in ways]
    assert [row.status for row in rows] == [FAILED] * len(agreement.WAYS)
    assert all("is above" in row.note for row in rows)


def test_positions_that_are_too_close_are_excluded() -> None:
    reference = logits()
    reference[2, 9] = reference[2].max() - 0.3
    ours = reference.clone()
    ours[2, 9] += 0.19
    ours[2, 2] -= 0.19
    found = compare(ours, Truth([0] * 8, reference, 0.1))
    assert not found.fault
    assert (found.figures["excluded"], found.figures["included"]) == (1, 0.875)
    assert agreement.INCLUDED > 0.875


def test_every_way_takes_all_positions() -> None:
    for way in agreement.WAYS:
        for positions in (9, 24, 512):
            assert sum(chunks_of(way, positions)) == positions
    assert chunks_of(agreement.WAYS[2], 512) == [448] + [1] * 64


def test_marked_rows_are_the_likeliest_of_their_own_states() -> None:
    torch.manual_seed(1)
    states = torch.randn(12, 64) + torch.randn(64)
    weights = {"lm_head.weight": torch.randn(300, 64) / 8}
    tokens = [7 * index for index in range(12)]
    mark(weights, states, tokens)
    made = states @ weights["lm_head.weight"].t()
    assert made.argmax(dim=-1).tolist() == tokens
    top = made.topk(2, dim=-1).values
    assert float((top[:, 0] - top[:, 1]).min()) > 5


CEILINGS = [
    Row("ceilings", "device copy", OK, {"ms": 2.0, "bytes": 8e9}),
    Row("ceilings", "bf16 matrix product", OK, {"ms": 1.0, "flops": 8e11}),
]


def test_limits_follow_from_the_ceilings() -> None:
    rates = ceilings_of(CEILINGS)
    assert rates == {"bytes_per_second": 4e12, "flops_per_second": 8e14}
    found = derived({"ms": 4.0, "bytes": 8e9, "flops": 8e11, "weight_bytes": 4e9}, rates)
    assert found["gb_per_s"] == pytest.approx(2000)
    assert found["tflop_per_s"] == pytest.approx(200)
    assert found["copy_share"] == pytest.approx(0.5)
    assert found["matrix_share"] == pytest.approx(0.25)
    assert found["limit_ms"] == pytest.approx(2)
    assert found["share"] == pytest.approx(0.5)
    assert found["weights_share"] == pytest.approx(0.25)
    unknown = derived({"ms": 4.0, "bytes": 8e9}, ceilings_of([]))
    assert "share" not in unknown
    assert unknown["gb_per_s"] == pytest.approx(2000)


RUN = {"date": "d", "command": "c", "dry_run": False, "budget_seconds": 480.0, "seconds": 1.0}


def test_aims_are_judged_and_keys_checked() -> None:
    rows = [
        *CEILINGS,
        Row("kernels", "good", OK, {"ms": 1.0, "bytes": 3.6e9}, {"copy_share": 0.85}),
        Row("kernels", "slow", OK, {"ms": 1.0, "bytes": 3.2e9}, {"copy_share": 0.85}),
        Row("kernels", "wrong", FAILED, {"ms": 1.0, "bytes": 3.6e9}, {"copy_share": 0.85}, "bad|x"),
    ]
    results = results_of(rows, {}, RUN)
    assert complaints(results) == []
    assert results["summary"] == {
        "ok": 4,
        "failed": 1,
        "skipped": 0,
        "aims_met": 1,
        "aims_missed": 2,
    }
    lines = table(results).splitlines()
    assert "copy_share 0.9 of 0.85: met" in lines[4]
    assert "copy_share 0.8 of 0.85: missed" in lines[5]
    assert lines[6].endswith("| failed: bad/x |")
    results["rows"][0]["figures"]["speed"] = 1.0
    del results["device"]["driver"]
    assert complaints(results) == [
        f"results.device has to have the keys {sorted(SCHEMA['device'])}",
        "results.rows[0].figures.speed is no known figure, or no number",
    ]


def test_cases_count_what_they_move() -> None:
    case = attention.Case(attention.QWEN, 64, 2048)
    assert case.num_bytes == 2 * 64 * 2048 * 4 * 128 * 2 + 2 * 64 * 28 * 128 * 2
    assert replace(case, fp8=True).num_bytes == case.num_bytes - 2 * 64 * 2048 * 4 * 128
    chunk = attention.Case(attention.LLAMA, 0, 0, 3, 5)
    assert chunk.pairs == 6 + 7 + 8
    assert chunk.flops == 4 * 32 * 128 * 21


BARE = """
import importlib.util, sys
MISSING = {"msgspec", "zmq", "uvloop", "setproctitle", "aiohttp", "llguidance"}
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name in MISSING else find(name, *more)
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in MISSING:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Refuse())
"""
WITHOUT_MSGSPEC = """
from benchmarks.gpu.stand_ins import provide_msgspec
assert provide_msgspec()
from gllm.messages.steps import RegisterSequences
from gllm.messages.sampling import SequenceSamplingParams
from gllm.messages.requests import SubmitRequest
import benchmarks.gpu.engine, benchmarks.gpu.kernels
assert SequenceSamplingParams().temperature == 1.0
assert SequenceSamplingParams(0.0).logit_bias == {}
assert SequenceSamplingParams().logit_bias is not SequenceSamplingParams().logit_bias
assert RegisterSequences(3, 2, [5, 6], SequenceSamplingParams()).n == 1
assert not SequenceSamplingParams().needs_prompt
assert SequenceSamplingParams(repetition_penalty=1.1).needs_prompt
import msgspec
assert msgspec.structs.replace(RegisterSequences(3, 2), n=4) == RegisterSequences(3, 2, n=4)
assert SubmitRequest(1, [2], SequenceSamplingParams(), 3, []).cache_salt == ""
"""


def test_one_process_needs_no_msgspec() -> None:
    done = subprocess.run(
        [sys.executable, "-c", BARE + WITHOUT_MSGSPEC], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


STAGES_IN_ONE_PROCESS = """
from benchmarks.gpu import stages
from benchmarks.gpu.rows import PendingRow, run_row
baseline = stages.Baseline(True, {})
row = run_row("stages", PendingRow("", lambda: stages.compare(baseline, 2)))
print(row.status, row.figures, row.note, sep="; ")
print(sum(map(len, baseline.texts())), len(set(sum(baseline.texts(), []))))
"""


def test_stages_that_cannot_be_processes_run_within_one() -> None:
    code = BARE + STAGES_IN_ONE_PROCESS
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    row, counts = done.stdout.splitlines()
    assert row.startswith("ok; {'texts': 2, 'mismatched': 0}; within one process: no zmq, msgspec")
    tokens, different = map(int, counts.split())
    assert tokens == 8
    assert different > 2


def test_where_graphs_cannot_be_recorded_the_rows_behind_do_without(
    place: Place, tmp_path: Path
) -> None:
    named = engine.rows(place, "Qwen2.5-7B", tmp_path, {}, graphs=False)
    ready, decode = (run_row("x", next(named)) for _ in range(2))
    assert (ready.status, ready.figures["graphs"]) == (FAILED, 0)
    assert (decode.status, decode.name) == (OK, "decode, batch 1")
    assert "no graphs" in decode.note
