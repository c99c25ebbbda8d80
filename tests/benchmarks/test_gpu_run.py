"""The GPU benchmark without a GPU: its dry run, and sections whose process dies or hangs."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.gpu import run
from benchmarks.gpu.report import BEGIN, END, complaints
from benchmarks.gpu.rows import FAILED, OK, SKIPPED, read_log
from benchmarks.gpu.section import SECTIONS, Task

pytestmark = pytest.mark.full

PAGE = f"# GPU\n\nBefore.\n\n{BEGIN}\nold figures\n{END}\n\nBehind.\n"


FEW_WORKERS = """
import runpy
from benchmarks.gpu import stages
stages.WORKERS = (2, 1), (2, 2)
runpy.run_module("benchmarks.gpu.section", run_name="__main__")
"""
"""Section in which two stages, and two stages of two ranks, stand for all numbers of workers."""


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("only", "section"),
    [
        ("kernels,qwen2.5-7b,stages", ("-c", FEW_WORKERS)),
        pytest.param("", run.SectionProcess().command, marks=pytest.mark.long),
    ],
    ids=["one model", "all"],
)
def test_a_dry_run_has_every_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], only: str, section: tuple[str, ...]
) -> None:
    # However busy the machine is.
    process = run.SectionProcess(section, start_seconds=900.0, row_seconds=900.0)
    out, page = tmp_path / "gpu.json", tmp_path / "gpu.md"
    page.write_text(PAGE)
    command = ["--dry-run", "--out", str(out), "--page", str(page), "--time-budget", "4000"]
    command += ["--only", only]
    status = run.main(command, process)
    results = json.loads(out.read_text())
    wrong = [(row["name"], row["note"], row["traceback"]) for row in results["rows"]
             if row["status"] == FAILED]  # fmt: skip
    assert (status, wrong) == (0, [])
    assert complaints(results) == []
    assert {row["section"] for row in results["rows"]} == set(run.sections_of(only))
    # How long transformers takes may not tell a step on a busy machine.
    skipped = [row["name"] for row in results["rows"] if row["status"] == SKIPPED]
    assert all(name.startswith("transformers") for name in skipped)
    assert results["ceilings"]["bytes_per_second"] > 0
    found = {aim["figure"] for row in results["rows"] for aim in row["aims"]}
    assert found == {"busy", "weights_share", "matrix_share", "included"}
    text, printed = page.read_text(), capsys.readouterr().out
    assert text.startswith("# GPU\n\nBefore.")
    assert text.endswith("Behind.\n")
    assert "old figures" not in text
    for row in results["rows"]:
        assert f"| {row['section']}: {row['name']} |" in text
        assert f"| {row['section']}: {row['name']} |" in printed


DYING = """
import json, os, sys, time
task = json.loads(sys.argv[1])
log = open(task["log"], "a")
def tell(**line): print(json.dumps(line), file=log, flush=True)
tell(rows=["a", "b", "c", "d", "e"])
for name in "abcde":
    if name in task["done"]:
        continue
    tell(begin=name, is_rival=name == "d")
    if name in "bd":
        print("the reason", file=sys.stderr, flush=True)
        os._exit(7)
    if name == "c":
        time.sleep(600)
    tell(row={"section": "kernels", "name": name, "status": "ok"})
"""


def test_the_next_rows_go_on_behind_one_that_dies_or_hangs(tmp_path: Path) -> None:
    process = run.SectionProcess(("-c", DYING), row_seconds=3.0)
    task = Task("kernels", str(tmp_path / "log"), True, 200.0)
    told = run.run_section(task, time.monotonic() + 200, process)
    statuses = {row.name: row.status for row in told.rows}
    assert statuses == {"a": OK, "b": FAILED, "c": FAILED, "d": SKIPPED, "e": OK}
    notes = {row.name: row.note for row in told.rows}
    assert notes["b"] == "its process ended with 7: the reason"
    assert "hangs" in notes["c"]
    assert "ended with 7" in notes["d"]


class StoppedProcess(run.SectionProcess):
    """Process whose time is up as soon as it begins row c."""

    def watch(self, process: "subprocess.Popen[str]", log: Path, stop: float) -> str:
        """Wait for the row."""
        while not log.is_file() or '"begin": "c"' not in log.read_text():
            time.sleep(0.01)
        return run.TIME_UP


def test_rows_past_the_time_are_skipped(tmp_path: Path) -> None:
    process = StoppedProcess(("-c", DYING.replace('"bd"', '"-"')))
    task = Task("kernels", str(tmp_path / "log"), True, 1.0)
    told = run.run_section(task, time.monotonic() + 200, process)
    statuses = {row.name: row.status for row in told.rows}
    assert statuses == {"a": OK, "b": OK, "c": SKIPPED, "d": SKIPPED, "e": SKIPPED}
    assert all("time" in row.note for row in told.rows if row.status == SKIPPED)


def test_a_section_that_cannot_start_is_a_failure(tmp_path: Path) -> None:
    process = run.SectionProcess(("-c", "raise SystemExit('no GPU')"))
    task = Task("kernels", str(tmp_path / "log"), False, 100.0)
    told = run.run_section(task, time.monotonic(), process)
    assert [(row.name, row.status) for row in told.rows] == [("start", FAILED)]


def test_a_line_that_was_cut_off_is_passed_over(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text('{"rows": ["a", "b"]}\n{"begin": "a"}\n{"row": {"sec')
    told = read_log(log)
    assert (told.names, told.open, told.rows) == (["a", "b"], "a", [])


def test_what_is_asked_for() -> None:
    assert run.sections_of("") == [*SECTIONS]
    assert run.sections_of("kernels") == ["ceilings", "kernels"]
    assert run.sections_of("engine") == ["ceilings", "Qwen2.5-7B", "Llama-3.1-8B"]
    assert run.options_of(["kv-cache-dtype=fp8"]) == {"kv_cache_dtype": "fp8"}
    with pytest.raises(ValueError, match="kernel: sections are ceilings, kernels"):
        run.sections_of("kernel")
    with pytest.raises(ValueError, match="NAME=VALUE"):
        run.options_of(["fp8"])


def test_the_command_needs_no_torch_and_runs_as_a_file() -> None:
    """Nor anything else that is installed: -S leaves site-packages out."""
    command = [sys.executable, "-S", str(Path(run.__file__)), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/")
    assert "--dry-run" in done.stdout
