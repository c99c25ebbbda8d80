"""The comparison on a CPU: medians, ratios, limits, aims, and the page that is made of them."""

from pathlib import Path

import pytest

from benchmarks.cpu import comparison_page as page
from benchmarks.cpu import results
from benchmarks.cpu.aims import four_bit_verdicts, server_verdicts, verdict_table
from benchmarks.cpu.limits import Rates
from benchmarks.cpu.model import KV_BYTES, WEIGHT_BYTES
from benchmarks.cpu.report import (
    by_round,
    cells_of,
    hybrid_table,
    limits,
    peers_of,
    ratio,
    speed_table,
)
from benchmarks.cpu.results import Results, Row

pytestmark = pytest.mark.full

SPEED = "output_throughput"
FIGURES = (
    SPEED,
    "total_token_throughput",
    "request_throughput",
    *(f"{kind}_{name}_ms" for name in ("ttft", "tpot", "itl") for kind in ("median", "p99")),
)


def row(peer: str, turn: int, speed: float, cell: str = "16 streams", pss: int = 10**9) -> Row:
    figures = dict.fromkeys(FIGURES, 1000 / speed) | {SPEED: speed}
    return Row(peer, cell, turn, figures, 0.01, pss)


ROWS = [
    *(row("gllm", 0, speed) for speed in (140.0, 150.0, 160.0)),
    *(row("gllm", 1, speed) for speed in (70.0, 80.0, 90.0)),
    row("vllm", 0, 100.0),
    row("vllm", 1, 50.0),
    row("vllm", 2, 10.0),
    row("llama.cpp", 0, 75.0),
    row("llama.cpp", 1, 60.0),
]
ASKED = {
    "streams": [1, 16],
    "prompt": 128,
    "new": 64,
    "prefills": [512],
    "rounds": 3,
    "repeats": 3,
    "requests": 48,
    "threads": 2,
    "kv_cache_memory": 2**30,
}


def found(mode: str = "server", rows: list[Row] = ROWS) -> Results:
    versions = {"gllm": "gllm 1", "vllm": "vllm 2", "llama.cpp": "llama 3"}
    return Results(
        mode,
        "2026-01-02",
        "compare",
        "2 cores",
        dict(ASKED),
        versions,
        refused={"transformers": "pip failed"},
        limits=[Rates(1, 20e9, 2e11), Rates(2, 30e9, 4e11), Rates(2, 35e9, 3e11)],
        rows=rows,
    )


def test_a_ratio_is_the_median_of_those_of_the_rounds() -> None:
    assert by_round(ROWS, "gllm", "16 streams", SPEED) == {0: 150.0, 1: 80.0}
    # Round 0: 150 over 100, round 1: 80 over 60; round 2 has no gllm.
    assert ratio(ROWS, "gllm", ("vllm", "llama.cpp"), "16 streams", SPEED) == pytest.approx(
        (1.5 + 80 / 60) / 2
    )
    assert ratio(ROWS, "gllm", ("vllm", "llama.cpp"), "16 streams", SPEED, min) == pytest.approx(
        (2.0 + 1.6) / 2
    )
    assert ratio(ROWS, "gllm", ("openvino",), "16 streams", SPEED) is None


def test_limits_are_rooflines() -> None:
    rates = Rates(2, 40e9, 4e11)
    context = 128 + 32
    read = (WEIGHT_BYTES + context * KV_BYTES) / 40e9
    assert rates.decode(1, 128, 64) == pytest.approx(1 / read)
    # A long prompt is bound by its products: more than twice the body's parameters a token.
    assert 3e11 < rates.prefill(2048) * 2 * 358e6 < 4e11
    served = rates.served(1, 128, 64)
    assert served < rates.decode(1, 128, 64)
    # What the machine did in its best round is its limit.
    assert limits(found()) == pytest.approx(
        {
            "1 stream": Rates(2, 35e9, 4e11).served(1, 128, 64),
            "16 streams": Rates(2, 35e9, 4e11).served(16, 128, 64),
        }
    )
    in_process = limits(found("in-process"))
    assert list(in_process) == ["decode b=1", "decode b=16", "prefill 512"]


def test_the_table_of_speeds() -> None:
    lines = speed_table(found()).splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == [
        "gllm",
        "vllm",
        "llama.cpp",
        "physical limit, bf16",
    ]
    assert "115 (70-160)" in lines[2]
    assert peers_of(found()) == ["gllm", "vllm", "llama.cpp"]


def test_aims() -> None:
    seen = {verdict.description: verdict for verdict in server_verdicts(found())}
    speed = seen["output tokens/s, 16 streams, x the best"]
    assert speed.measured == pytest.approx(1.4167, abs=1e-4)
    assert speed.is_met is True
    assert "1 stream" not in " ".join(seen)
    # Every latency of these rows is the shorter the higher the speed.
    assert seen["TTFT, median, 16 streams, x the best"].is_met
    memory = seen["peak PSS beyond weights and KV cache, MB"]
    assert memory.measured == pytest.approx((1e9 - WEIGHT_BYTES - 2**30) / 1e6)
    table = verdict_table(found())
    assert table.count("| met") == 4
    slow = [row("gllm", 0, 100.0, pss=3 * 10**9), row("vllm", 0, 100.0)]
    assert verdict_table(found(rows=slow)).count("**missed**") == 2
    assert verdict_table(found(rows=ROWS[6:])) == ""


def test_files_of_four_bits_are_compared_with_the_time_of_reading_them() -> None:
    speeds = {"gllm-q4_0": 60.0, "llama.cpp-q4_0": 50.0, "vllm-int4": 40.0}
    rows = [Row(peer, "decode b=1", 0, {"tokens_per_second": s}, 0.0) for peer, s in speeds.items()]
    run = found("four-bit", rows)
    run.versions = dict.fromkeys(speeds, "1.0")
    run.file_bytes = {"gllm-q4_0": 350_000_000, "llama.cpp-q4_0": 350_000_000}
    # 35 GB/s are read at best, and the cache of 160 tokens is small beside the file.
    limit = 35e9 / (350e6 + 160 * KV_BYTES)
    seen = {verdict.description: verdict for verdict in four_bit_verdicts(run)}
    assert seen["gllm-q4_0, decode b=1, x the best"].measured == pytest.approx(1.2)
    share = seen["gllm-q4_0, decode b=1, share of the read bandwidth"]
    assert share.measured == pytest.approx(60 / limit)
    assert not share.is_met
    *_, bf16, reading = speed_table(run).splitlines()
    assert "physical limit, bf16" in bf16
    assert "reading 350 MB of q4_0" in reading
    assert f"{limit:.4g}" in reading


def test_hybrids_are_compared_with_the_dense_model_and_the_peer() -> None:
    speeds = {"gllm": 30.0, "llama.cpp": 25.0, "gllm-lfm2": 33.0, "llama.cpp-lfm2": 22.0}
    rows = [Row(peer, "decode b=1", 0, {"tokens_per_second": s}, 0.0) for peer, s in speeds.items()]
    run = found("hybrid", rows)
    run.versions = dict.fromkeys(speeds, "1.0")
    table = [line.split("|")[1:-1] for line in hybrid_table(run).splitlines()[2:]]
    assert {name.strip(): float(value) for name, value in table} == {
        "gllm / llama.cpp": 1.2,
        "gllm-lfm2 / gllm": 1.1,
        "llama.cpp-lfm2 / llama.cpp": 0.88,
        "gllm-lfm2 / llama.cpp-lfm2": 1.5,
    }
    assert "ratio of tokens/s" in "\n".join(page.sections(run))


def test_the_page_of_all_modes(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    with pytest.raises(ValueError, match="has no results: measure first"):
        page.write_docs(tmp_path, docs)
    speeds = {"gllm": 30.0, "openvino": 30.0, "openvino-int8": 40.0}
    alone = [
        Row(peer, "decode b=1", 0, {"tokens_per_second": speed}, 0.02, 10**9)
        for peer, speed in speeds.items()
    ]
    in_process = found("in-process", alone)
    in_process.versions = dict.fromkeys(speeds, "1.0")
    loaded = [row(peer, 0, 9.0, cell) for peer in ("gllm", "vllm") for cell in ("0.5 requests/s",)]
    poisson = found("poisson", [*loaded, row("gllm", 0, 9.0, "azure-conv / 8, 32 at once")])
    poisson.asked["rates"] = [0.5, 1.0]
    for each in (found(), poisson, in_process):
        each.save(tmp_path / f"{each.mode}.json")
        assert results.load(tmp_path / f"{each.mode}.json") == each
    text = page.write_docs(tmp_path, docs).read_text()
    assert "transformers: pip failed" in text
    assert "gllm, decode b=1, x the best | 1 " in text
    assert "### 0.5 requests/s" in text
    for picture in ("server-bf16", "poisson", "in-process-bf16", "in-process-int8"):
        assert f"](cpu/{picture}.png)" in text
        assert (tmp_path / "docs" / "cpu" / f"{picture}.png").stat().st_size > 1000
    for mode in ("server", "poisson", "in-process"):
        assert (tmp_path / "docs" / "cpu" / f"{mode}.json").exists()
    assert cells_of(poisson) == ["0.5 requests/s", "azure-conv / 8, 32 at once"]


def test_a_file_that_is_no_result(tmp_path: Path) -> None:
    path = tmp_path / "server.json"
    path.write_text("{}")
    with pytest.raises(ValueError, match="no result of this comparison"):
        results.load(path)
