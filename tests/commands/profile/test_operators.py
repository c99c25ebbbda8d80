"""Operator profiles: their points and tables, and steps that forests predict from them."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gllm.commands.profile.command import main as profile
from gllm.commands.profile.operator_profile import (
    OperatorPoints,
    OperatorProfiler,
    count_table_rows,
    time_all_reduce,
    time_send,
)
from gllm.commands.profile.span import StepRows, TimedSpan
from gllm.commands.simulate import main as simulate
from gllm.config.engine import EngineConfig
from gllm.kernels.threads import using_num_threads
from gllm.models.config import read_config
from gllm.models.hub import DEMO
from gllm.observability import progress
from gllm.scheduler.stage_work import StageWork
from gllm.sim.costs.base import CostRangeError
from gllm.sim.costs.forest import ForestCostModel
from gllm.sim.costs.operator_tables import OperatorTables
from tests.support.exit_status import exit_status

SMALL = OperatorPoints(max_tokens=128, max_batch=8, stride=8, repeats=1)


@pytest.fixture(autouse=True)
def no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep forests of new measurements, which nobody needs again, out of the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def small_forests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fit a few trees only, where the predictions do not matter."""
    monkeypatch.setattr("gllm.sim.costs.operators.NUM_TREES", 5)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Compute with one thread: several wait for each other on a busy machine."""
    with using_num_threads(1):
        yield


def config() -> EngineConfig:
    return EngineConfig.from_options("demo", threads=1, dtype="float32", max_model_len=1024)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("operators")
    OperatorProfiler(config(), DEMO, "this-cpu", SMALL).run([1, 2]).write(path)
    return path


def test_points_are_vidurs_up_to_the_limits() -> None:
    """Its tables have 259 token counts, and batches up to 128."""
    points = OperatorPoints()
    assert len(points.tokens) == 259
    assert {batch for batch, _ in points.decodes} == set(range(1, 129))
    assert {(0, 4096), (4032, 64), (512, 512)} <= set(points.prefills)
    assert max(kv + chunk for kv, chunk in points.prefills) == 4096
    for small in (SMALL, OperatorPoints(1000, 16, 3)):
        assert (
            small.tokens[-1] == small.max_tokens == max(sum(prefill) for prefill in small.prefills)
        )
        assert max(small.decodes) == (small.max_batch, small.max_tokens - 1)
    with pytest.raises(ValueError, match="max_tokens is 8"):
        OperatorPoints(8)


def test_tables_are_complete(folder: Path) -> None:
    tables = OperatorTables(folder)
    names = ("token_ops", "attention", "collectives", "cpu_overheads", "model_shapes")
    rows = {name: tables.read(name) for name in names}
    assert sum(map(len, rows.values())) == count_table_rows(SMALL, [1, 2])
    assert {row["tp"] for row in rows["token_ops"]} == {"1", "2"}
    assert rows["model_shapes"][0]["num_layers"] == "6"
    for row in rows["token_ops"]:
        times = [float(row[f"{name}_ms"]) for name in ("emb", "attn_pre_proj", "mlp_down_proj")]
        assert min(times) > 0


@pytest.mark.usefixtures("small_forests")
def test_a_forest_reads_the_folder(folder: Path) -> None:
    for tp in (1, 2):
        cost = ForestCostModel(2, tp=tp, tables=OperatorTables(folder))
        assert cost.layers == [3, 3]
        assert list(cost.ranges["num_tokens"]) == [1, 128]
        with TimedSpan(
            config(), read_config(DEMO), DEMO, range(1), [[(0, 100)]], tp
        ) as span:  # fmt: skip
            work, _ = span.time_step([(0, 100)])
        parts = cost.operator_seconds(1, work)
        assert sum(parts.values()) == pytest.approx(cost.stage_seconds(1, work))
        assert (parts["collectives"] > 0) == (tp == 2)
        longer = StageWork(0, 129, work.prefill_chunks, 0, 0, 1)
        with pytest.raises(CostRangeError, match="the operator profile: num_tokens is 129"):
            cost.stage_seconds(0, longer)
    with pytest.raises(ValueError, match=r"\('this-cpu', 'demo', 4\) .*choose from"):
        ForestCostModel(tp=4, tables=OperatorTables(folder))


@pytest.mark.usefixtures("small_forests")
def test_the_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(progress, "MAX_SECONDS", 0.0)
    output = Path("operators")
    flags = ["--operators", "--operator-tp", "2", "--operator-tokens", "96", "--operator-batch"]
    small = [*flags, "4", "--operator-stride", "16", "--operator-repeats", "1"]
    output.mkdir()  # As a profile that is measured again.
    assert profile(["demo", *small, "--threads", "1", "--output", str(output)]) == 0
    lines = re.findall(r"operators: (\d+) of (\d+), \d+ s", capsys.readouterr().err)
    assert len(lines) > 10
    assert lines[-1][0] == lines[-1][1]
    load = ["--workload", "fixed:60,20", "--requests", "8", "--max-num-batched-tokens", "90"]
    assert simulate(["--profile", str(output), "--tp", "2", *load, "--output", "first"]) == 0
    assert "requests/s" in capsys.readouterr().out
    metrics = json.loads(Path("first", "metrics.json").read_text())
    assert metrics["configuration"]["profile"] == str(output.absolute())
    assert len(metrics["profile_sha256"]) == 64
    assert simulate(["--profile", str(output), *load]) == 2
    assert "was not profiled" in capsys.readouterr().err
    assert simulate(["--profile", str(tmp_path), *load]) == 2
    assert "is no folder of `gllm profile --operators`" in capsys.readouterr().err
    assert profile(["demo", "--operators", "--operator-tokens", "8"]) == 2
    capsys.readouterr()
    assert profile(["demo", "--operators", "--pp", "2", "--tp", "1,2"]) == 2
    assert "--tp 1,2 has no meaning: name the tensor parallel sizes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--operators", "--operator-tp", "0"], "argument --operator-tp: '0' has to be an integer"),
        (["--operators", "--operator-tp", "2,x"], "--operator-tp: '2,x' has to be an integer in"),
        (["--operators", "--pp", "2"], "price any number of stages: leave --pp out"),
        (["--operators", "--output", __file__], "is not a folder"),
        (["--device", "emulated:L20"], "--device emulated:L20: gllm profile measures this"),
        (["--output", "."], "--output .: cannot be used: it is a folder"),
    ],
)
def test_bad_flags_are_refused_before_anything_is_measured(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_status(profile, ["demo", *flags]) == 2
    assert words in capsys.readouterr().err


def test_sums_and_transfers_are_timed() -> None:
    for times in (
        time_all_reduce(2, [1, 40], 64, torch.float32, 3),
        time_send([1, 40], 64, torch.float32, 3),
    ):
        assert [len(times[tokens]) for tokens in (1, 40)] == [3, 3]
        assert min(min(time) for time in times.values()) > 0


STEPS: list[StepRows] = [
    [(0, 100)],
    [(0, 300)],
    [(200, 90)],
    [(40, 1)] * 4,
    [(300, 1)] * 20,
    [(0, 60), (100, 1), (200, 1)],
]


@pytest.mark.long
@pytest.mark.parametrize("tp", [1, 2])
def test_steps_are_predicted_from_operators(tp: int, tmp_path: Path) -> None:
    """Steps of the demo within 15 % in total, without the sums: a rank is timed alone."""
    points = OperatorPoints(max_tokens=512, max_batch=32, stride=4, repeats=9)
    OperatorProfiler(config(), DEMO, "this-cpu", points).run([tp]).write(tmp_path)
    cost = ForestCostModel(tp=tp, tables=OperatorTables(tmp_path))
    predicted, taken = [], []
    with TimedSpan(config(), read_config(DEMO), DEMO, range(6), STEPS, tp) as span:
        for rows in STEPS:
            work, seconds = span.repeat_step(rows, 9)
            parts = cost.operator_seconds(0, work)
            predicted.append(sum(parts.values()) - parts["collectives"])
            taken.append(seconds)
    assert sum(predicted) == pytest.approx(sum(taken), rel=0.15), (predicted, taken)
