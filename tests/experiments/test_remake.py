"""All pages are made again by the commands that they name; one that fails stops no other."""

import re
import shlex
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments import remake
from experiments.remake import Lane, Outcome, PageCommand, PageRunner

PAGES = Path(__file__).parents[2] / "experiments" / "pages"
HANDWRITTEN = {"README", "claims", "misses"}
"""Pages without a command: written by hand, or by a script from the others."""


def make_page(folder: Path, name: str, program: str, flag: str = "--real") -> PageCommand:
    """Return the command of a page that runs a Python program whose second argument is the page."""
    page = folder / f"{name}.md"
    page.write_text(f"# {name}\n\nMade by `python -m experiments slo`. Run time: 7 s\n\n1\n")
    return PageCommand(page, ("python", "-c", program, "slo", str(page), flag))


def test_every_page_with_figures_names_its_command() -> None:
    commands = {each.page.stem: each for each in remake.read_commands()}
    assert set(commands) == {page.stem for page in PAGES.glob("*.md")} - HANDWRITTEN
    assert all(each.words[:3] == ("python", "-m", "experiments") for each in commands.values())
    assert all(each.seconds is not None for each in commands.values())


@pytest.mark.parametrize(
    ("words", "lane"),
    [
        ("slo", Lane.SIMULATION),
        ("slo --emulated", Lane.REAL_TIME),
        ("two-nodes", Lane.REAL_TIME),
        ("pools", Lane.REAL_TIME),
        ("ablation --real", Lane.ALONE),
        ("prediction", Lane.ALONE),
    ],
)
def test_the_command_tells_what_it_needs_of_the_machine(words: str, lane: Lane) -> None:
    command = PageCommand(Path("x.md"), tuple(shlex.split(f"python -m experiments {words}")))
    assert command.lane is lane


@given(st.lists(st.none() | st.floats(0, 1e4), max_size=8))
def test_long_simulations_begin_first(cpu_seconds: list[float | None]) -> None:
    commands = [PageCommand(Path(f"{i}.md"), (), None, each) for i, each in enumerate(cpu_seconds)]
    ordered = remake.order_longest_first(commands)
    assert sorted(each.page for each in ordered) == sorted(each.page for each in commands)
    known = [float("inf") if each.cpu_seconds is None else each.cpu_seconds for each in ordered]
    assert known == sorted(known, reverse=True)


LANES = {Lane.ALONE: "--real", Lane.REAL_TIME: "--emulated", Lane.SIMULATION: ""}


def make_timed(lane: Lane, seconds: float, cpu_seconds: float) -> PageCommand:
    """Return a command of a lane with its last run times."""
    words = f"python -m experiments slo {LANES[lane]}"
    return PageCommand(Path("x.md"), tuple(words.split()), seconds, cpu_seconds)


TIMED = st.builds(make_timed, st.sampled_from(Lane), st.floats(0, 1e4), st.floats(0, 1e4))


@given(st.lists(TIMED, max_size=8), TIMED, st.integers(1, 8))
def test_the_estimate_is_no_less_than_any_page(
    commands: list[PageCommand], further: PageCommand, jobs: int
) -> None:
    before, after = (
        remake.estimate_seconds(each, jobs) for each in (commands, [*commands, further])
    )
    assert after >= before
    is_simulation = further.lane is Lane.SIMULATION
    least = further.cpu_seconds if is_simulation else further.seconds
    assert least is not None
    assert after >= least
    assert remake.estimate_seconds(commands, jobs + 1) <= before


def test_the_estimate_adds_what_cannot_run_together() -> None:
    commands = [
        make_timed(Lane.ALONE, 10, 1),
        make_timed(Lane.REAL_TIME, 100, 30),
        make_timed(Lane.SIMULATION, 999, 90),
        make_timed(Lane.SIMULATION, 999, 90),
    ]
    assert remake.estimate_seconds(commands, 2) == 10 + (30 + 90 + 90) / 2
    assert remake.estimate_seconds(commands, 4) == 10 + 100
    assert remake.estimate_seconds(commands[:1] + commands[3:], 4) == 10 + 90


def test_simulations_run_beside_each_other(tmp_path: Path) -> None:
    # Each ends only once the other one has begun.
    program = (
        "import pathlib, sys, time; page = pathlib.Path(sys.argv[2]); "
        "page.with_suffix('.begun').touch(); "
        "exec('while len(list(page.parent.glob(\"*.begun\"))) < 2: time.sleep(0.01)')"
    )
    commands = [make_page(tmp_path, name, program, "--quick") for name in ("a", "b")]
    outcomes = PageRunner(2, max_seconds=600, report=lambda each: None).run_all(commands)
    assert [each.status for each in outcomes] == [0, 0]


def test_a_failure_stops_no_other_page(tmp_path: Path) -> None:
    append = "import sys, pathlib; p = pathlib.Path(sys.argv[2]); p.write_text(p.read_text() + '2')"
    commands = [
        make_page(tmp_path, "bad", "import sys; print('why'); sys.exit(3)"),
        make_page(tmp_path, "good", append, "--emulated"),
        make_page(tmp_path, "same", "pass", "--quick"),
    ]
    reported: list[Outcome] = []
    outcomes = PageRunner(1, report=reported.append).run_all(commands)
    found = {each.command.page.stem: (each.status, each.num_changed) for each in outcomes}
    assert found == {"bad": (3, 0), "good": (0, 1), "same": (0, 0)}
    assert {each.command.lane for each in outcomes} == set(Lane)
    assert sorted(map(str, reported)) == sorted(map(str, outcomes))
    assert str(outcomes[0]).endswith("FAILED (exit status 3): why")


def test_stopped_commands_end_with_their_children(tmp_path: Path) -> None:
    program = (
        "import os, subprocess, sys, time; "
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
        "path = sys.argv[2]; open(path + '.new', 'w').write(str(child.pid)); "
        "os.rename(path + '.new', path + '.pid'); time.sleep(600)"
    )
    command = make_page(tmp_path, "hangs", program)
    runner = PageRunner(1, report=lambda each: None)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(runner.run, command)
        file = Path(f"{command.page}.pid")
        while not file.exists():
            assert not running.done()
            time.sleep(0.01)
        runner.stop()
        assert running.result().status == -signal.SIGKILL
    while _is_running(int(file.read_text())):
        time.sleep(0.01)
    assert runner.run(command).status < 0, "none begins after the stop"


def test_a_page_that_takes_too_long_fails(tmp_path: Path) -> None:
    command = make_page(tmp_path, "hangs", "import time; time.sleep(600)")
    outcome = PageRunner(1, max_seconds=0.1, report=lambda each: None).run(command)
    assert outcome.status == -signal.SIGKILL


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_the_exit_status_tells_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = make_page(tmp_path, "a", "pass"), make_page(tmp_path, "b", "raise ValueError('x')")
    monkeypatch.setattr(remake, "FINAL_COMMAND", ("python", "-c", "pass"))
    for commands, status in (([good], 0), ([bad, good], 1)):
        monkeypatch.setattr(remake, "read_commands", lambda found=commands: found)
        assert remake.main([]) == status
    output = capsys.readouterr().out
    assert "ValueError: x" in output
    assert "1 of 2 pages" in output


def test_an_unknown_page_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert remake.main(["nothing"]) == 2
    assert "'nothing' is no page with a command: one of ablation" in capsys.readouterr().err


def test_the_commands_are_shown_without_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert remake.main(["--dry-run", "slo", "slo-emulated"]) == 0
    simulated, emulated, sum_of_both = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        r"by these and their CPU times: \d\.\d h, \d+ simulations at a time", sum_of_both
    )
    assert simulated.endswith("simulation python -m experiments slo")
    assert emulated.endswith("real time  python -m experiments slo --emulated")


def test_make_runs_it() -> None:
    done = subprocess.run(
        ["make", "-n", "-o", ".venv/.ready", "experiments", "ARGS=--dry-run"],
        cwd=PAGES.parents[1], capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "python -m experiments.remake --dry-run" in done.stdout
