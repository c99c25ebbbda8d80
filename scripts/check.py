"""Check parts of the project while working on them: `python -m scripts.check FILES`.

FILES are files or folders of gllm/ and tests/. Runs ruff and mypy on them and on their tests, then
those tests that `make test` has. The tests of gllm/NAME are in tests/NAME, or in the folder for the
package above it; a part outside of gllm/ has them where PLACES says.
"""

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLACES = {
    "experiments": "tests/experiments",
    "gllm/kernels/triton": "tests/triton",
    "gllm/kernels": "tests/kernels",
    "gllm/frontend/page": "tests/e2e/page",
    "benchmarks": "tests/benchmarks",
    "scripts": "tests/scripts",
}
"""Folders whose tests are not in the folder of tests that has their name."""


def tests_of(path: Path) -> Path | None:
    """Return the tests of a file or folder, relative to the root; None if there are none."""
    if path.parts[0] == "tests":
        return path if path.parts[1:2] != ("support",) else None
    for folder, tests in PLACES.items():
        if path.is_relative_to(folder):
            return Path(tests)
    parts = path.parts[1:]
    folders = (Path("tests", *parts[:count]) for count in range(len(parts), 0, -1))
    return next((folder for folder in folders if (ROOT / folder).is_dir()), None)


def plan_commands(names: Iterable[str]) -> list[list[str]]:
    """Return the commands that check files and folders.

    Raises:
        ValueError: A name is not in the checkout, or none is given.
    """
    paths = [Path(name) for name in names]
    if not paths:
        raise ValueError('no files: make check FILES="gllm/scheduler"')
    for path in paths:
        if path.is_absolute() or not (ROOT / path).exists():
            raise ValueError(f"{path} is not in the checkout: name it from its root")
    tests = sorted({str(found) for path in paths if (found := tests_of(path))})
    checked = sorted({*map(str, paths), *tests})
    commands = [
        ["ruff", "format", "--check", *checked],
        ["ruff", "check", *checked],
        ["mypy", *checked],
    ]
    if tests:
        commands.append(["pytest", "-q", "-n", "auto", "--maxprocesses", "8", *tests])
    return commands


def main(names: list[str]) -> int:
    """Run the commands until one fails; return its exit code."""
    try:
        commands = plan_commands(names)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    for command in commands:
        print("==", *command, flush=True)
        if code := subprocess.run([sys.executable, "-m", *command], cwd=ROOT).returncode:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
