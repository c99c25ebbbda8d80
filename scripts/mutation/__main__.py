"""A sample of mutants and the tests that find them.

    python -m scripts.mutation sample --number 120 --seed 43    # writes sample.json
    python -m scripts.mutation run --suite "not full and not long" --verdicts quick.json
    python -m scripts.mutation table before.json quick.json
    python -m scripts.mutation run --sample scripts/mutation/planners.json --verdicts planners.json

`run` changes a copy of the tree, never the tree itself; a later run goes on where one was cut off.
"""

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Lock

from scripts.mutation.operators import Mutant, cpp_mutants, python_mutants
from scripts.mutation.subjects import SUBJECTS, WRITTEN, Subject

ROOT = Path(__file__).parents[2]
SAMPLE = Path(__file__).with_name("sample.json")
MOST_PER_SUBJECT = 12
LIMIT_SECONDS = 1800
"""Time of the tests of one mutant; a mutant that takes longer has no verdict."""
TEST_SECONDS = 240
"""Time of one test; a test that takes longer has failed."""
NO_TESTS = 5
"""Exit code of pytest when no test is selected."""
BUILD = "avx2"
"""The build of the C++ kernels that is compiled and tested."""


@dataclass(frozen=True)
class Fault:
    """A mutant of the sample."""

    number: int
    subject: str
    path: str
    line: int
    scope: str
    before: str
    after: str
    equivalent: str = ""
    """Why no test can find it; empty if one can."""


@dataclass(frozen=True)
class Verdict:
    """Result of the tests for one mutant."""

    number: int
    outcome: str
    """`found`, `survived`, `cut off`, or `stale`: the changed lines are not in the file now."""
    by: str
    """The test that failed first."""
    seconds: float


def all_mutants(root: Path, subject: Subject) -> list[Mutant]:
    """Return every mutant of a subject's sources."""
    mutants: list[Mutant] = []
    for pattern in subject.sources:
        for path in sorted(root.glob(pattern)):
            name = str(path.relative_to(root))
            if path.suffix == ".py":
                mutants += python_mutants(path, name)
            elif "amx" not in path.name:
                mutants += cpp_mutants(path, name)
    return mutants


def draw_sample(root: Path, number: int, seed: int) -> list[Fault]:
    """Choose mutants evenly over the subjects, at most one per function."""
    generator = random.Random(seed)
    share, extra = divmod(number, len(SUBJECTS))
    faults: list[Fault] = []
    for place, (name, subject) in enumerate(SUBJECTS.items()):
        mutants = all_mutants(root, subject)
        generator.shuffle(mutants)
        scopes: set[tuple[str, str]] = set()
        for mutant in mutants:
            if len(scopes) == min(share + (place < extra), MOST_PER_SUBJECT):
                break
            if (mutant.path, mutant.scope) not in scopes:
                scopes.add((mutant.path, mutant.scope))
                faults.append(Fault(len(faults), name, *mutant))
    return faults


def load_sample(path: Path) -> list[Fault]:
    """Return a recorded sample."""
    return [Fault(**row) for row in json.loads(path.read_text(encoding="utf-8"))]


def save_rows(path: Path, rows: list[Fault] | list[Verdict]) -> None:
    """Write records as JSON, one per line."""
    lines = ",\n".join(json.dumps(asdict(row)) for row in rows)
    path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def copy_tree(root: Path, folder: Path) -> None:
    """Copy the tracked files of a checkout, and its compiled kernels."""
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True
    ).stdout.split("\0")
    kernels = [str(path.relative_to(root)) for path in root.glob("gllm/kernels/native/*.so")]
    for name in [*filter(None, names), *kernels]:
        if (root / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, folder / name)


def change_file(path: Path, fault: Fault) -> bool:
    """Put a fault into a file; return False if the changed lines are not there any more."""
    if not path.exists():
        return False
    source = path.read_text(encoding="utf-8")
    starts = [found.start() for found in re.finditer(re.escape(fault.before), source)]
    if not starts:
        return False
    near = min(starts, key=lambda start: abs(source.count("\n", 0, start) + 1 - fault.line))
    after = source[:near] + fault.after + source[near + len(fault.before) :]
    path.write_text(after, encoding="utf-8")
    return True


def compile_kernels(tree: Path) -> str:
    """Compile BUILD of a tree's kernels; return the compiler's error, empty if there is none."""
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    sources = sorted(map(str, (tree / "gllm/kernels/native").glob("*.cpp")))
    flags = ["-std=c++17", "-O3", "-pthread", "-fno-strict-aliasing", "-ffp-contract=fast"]
    flags += ["-fno-math-errno", "-fvisibility=hidden", "-Wno-psabi", "-mavx2", "-mfma", "-mf16c"]
    include = f"-I{sysconfig.get_paths()['include']}"
    output = tree / f"gllm/kernels/native/_{BUILD}{suffix}"
    command = ["g++", "-shared", "-fPIC", *flags, include, *sources, "-o", str(output)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    return run.stderr if run.returncode else ""


def run_tests(tree: Path, tests: list[str], suite: str, seconds: float) -> tuple[str, str]:
    """Run tests of a tree until one fails; return the outcome and the failing test."""
    # A fault may leave processes behind: everything runs in a session that is killed at the end.
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", suite]
    environment = {**os.environ, "PYTHONPATH": str(tree), "GLLM_CPU_KERNELS": BUILD}
    process = subprocess.Popen(
        [*command, "--timeout", str(TEST_SECONDS), *tests],
        cwd=tree,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=max(seconds, 1))
    except subprocess.TimeoutExpired:
        return "cut off", ""
    finally:
        subprocess.run(["pkill", "-KILL", "-s", str(process.pid)], check=False)
    if process.returncode in (0, NO_TESTS):
        return "survived", ""
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    return "found", failed[0] if failed else output.strip().splitlines()[-1][:200]


def judge(tree: Path, fault: Fault, suite: str, stages: list[list[str]], root: Path) -> Verdict:
    """Run stages of tests on one fault until one fails; the tree is clean again afterwards."""
    begin = time.monotonic()

    def verdict(outcome: str, by: str = "") -> Verdict:
        return Verdict(fault.number, outcome, by, round(time.monotonic() - begin, 1))

    path = tree / fault.path
    if not change_file(path, fault):
        return verdict("stale")
    try:
        if path.suffix != ".py" and (error := compile_kernels(tree)):
            return verdict("found", error.splitlines()[0])
        for tests in filter(None, stages):
            left = LIMIT_SECONDS - (time.monotonic() - begin)
            outcome, by = run_tests(tree, tests, suite, left)
            if outcome != "survived":
                return verdict(outcome, by)
        return verdict("survived")
    finally:
        shutil.copy2(root / fault.path, path)
        if path.suffix != ".py":
            for library in root.glob("gllm/kernels/native/*.so"):
                shutil.copy2(library, tree / library.relative_to(root))


def matching(root: Path, patterns: tuple[str, ...]) -> list[str]:
    """Return the tests that patterns name, each once."""
    paths = (str(path.relative_to(root)) for each in patterns for path in sorted(root.glob(each)))
    return list(dict.fromkeys(paths))


def load_verdicts(path: Path | None) -> dict[int, Verdict]:
    """Return recorded verdicts by the number of the fault."""
    if path is None or not path.exists():
        return {}
    rows = (Verdict(**row) for row in json.loads(path.read_text(encoding="utf-8")))
    return {verdict.number: verdict for verdict in rows}


def run(options: argparse.Namespace) -> None:
    """Judge the faults that have no verdict yet; with `--further`, survivors again."""
    root: Path = options.tree
    verdicts, hints = load_verdicts(options.verdicts), load_verdicts(options.hints)
    waiting: SimpleQueue[tuple[Fault, list[list[str]]]] = SimpleQueue()
    for fault in load_sample(options.sample):
        known, subject = verdicts.get(fault.number), (SUBJECTS | WRITTEN)[fault.subject]
        if fault.equivalent or (known and not (options.further and known.outcome == "survived")):
            continue
        stages = [] if known else [matching(root, subject.tests)]
        if options.further:
            stages.append(matching(root, subject.further))
        hint = hints[fault.number].by if fault.number in hints else ""
        if not known and "::" in hint and (root / hint.split("::")[0]).exists():
            # The file and not the test, which may have another name now.
            stages.insert(0, [hint.split("::")[0]])
        waiting.put((fault, stages))
    lock = Lock()

    def work() -> None:
        with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
            copy_tree(root, Path(folder))
            while not waiting.empty():
                fault, stages = waiting.get()
                verdict = judge(Path(folder), fault, options.suite, stages, root)
                with lock:
                    verdicts[fault.number] = verdict
                    print(*asdict(verdict).values(), fault.subject, fault.path, flush=True)
                    save_rows(options.verdicts, [verdicts[n] for n in sorted(verdicts)])

    with ThreadPoolExecutor(options.jobs) as pool:
        for future in [pool.submit(work) for _ in range(options.jobs)]:
            future.result()


def print_table(paths: list[Path], sample: Path) -> None:
    """Print, by subject, how many faults each suite finds."""
    faults = [fault for fault in load_sample(sample) if not fault.equivalent]
    print("| subject | faults |", " | ".join(path.stem for path in paths), "|")
    print("| --- | --: |", " | ".join("--:" for _ in paths), "|")
    sizes = Counter(fault.subject for fault in faults)
    counts = []
    for path in paths:
        outcomes = {row["number"]: row["outcome"] for row in json.loads(path.read_text())}
        is_found = [fault for fault in faults if outcomes.get(fault.number) == "found"]
        counts.append(Counter(fault.subject for fault in is_found))
    for name, size in sizes.items():
        print(f"| {name} | {size} |", " | ".join(str(count[name]) for count in counts), "|")
    print(f"| all | {len(faults)} |", " | ".join(str(count.total()) for count in counts), "|")


def main(arguments: list[str]) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m scripts.mutation", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    sample = commands.add_parser("sample", help="choose mutants of this tree")
    sample.add_argument("--number", type=int, default=120)
    sample.add_argument("--seed", type=int, default=43)
    tests = commands.add_parser("run", help="run tests on each mutant")
    tests.add_argument("--suite", default="not full and not long", help="expression of markers")
    tests.add_argument("--verdicts", type=Path, required=True, help="file of results")
    tests.add_argument("--tree", type=Path, default=ROOT, help="checkout whose tests run")
    tests.add_argument("--hints", type=Path, help="results of another suite: its tests run first")
    tests.add_argument("--further", action="store_true", help="survivors: tests of neighbours too")
    tests.add_argument("--jobs", type=int, default=1, help="mutants side by side")
    table = commands.add_parser("table", help="print what each suite found")
    table.add_argument("verdicts", type=Path, nargs="+")
    for command in (tests, table):
        command.add_argument("--sample", type=Path, default=SAMPLE, help="file of the faults")
    options = parser.parse_args(arguments)
    if options.command == "sample":
        save_rows(SAMPLE, draw_sample(ROOT, options.number, options.seed))
    elif options.command == "run":
        run(options)
    else:
        print_table(options.verdicts, options.sample)


if __name__ == "__main__":
    main(sys.argv[1:])
