"""Packaging of gllm: run-time needs, extras, the console script."""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent


def names(file: str) -> list[str]:
    """Package names of a pinned requirements file, without the pins: those are for `make setup`."""
    lines = (ROOT / file).read_text().splitlines()
    return [line.split("==")[0] for line in lines if line and not line.startswith("#")]


setup(
    name="gllm",
    version="0.1.0",
    description="Pipeline-parallel LLM serving with token throttling",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["gllm", "gllm.*"]),
    package_data={"gllm": ["demo/*", "sim/data/*", "py.typed"]},
    install_requires=["torch>=2.11", *names("requirements.txt")],
    extras_require={
        "sim": names("requirements-sim.txt"),
        "dev": names("requirements-dev.txt"),
        "gpu": ["triton>=3.6", "flash-attn"],
    },
    entry_points={"console_scripts": ["gllm = gllm.cli:main"]},
)
