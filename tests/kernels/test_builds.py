"""Builds of the compiled kernels: which one a process uses, and what torch computes instead."""

import json
import logging
import os
import shutil
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from gllm.kernels.attention_backends import AttentionRequirements, HeadShape, choose_backend
from gllm.kernels.linear import linear, prepare
from gllm.kernels.linear_unquantized import UnquantizedMatrix
from gllm.kernels.native import library
from gllm.kernels.native.builds import (
    AMX,
    BFLOAT16,
    BUILD_VARIABLE,
    BUILDS,
    OFF,
    TILES_PERMITTED,
    BuildSelection,
    check_sources,
    digest_sources,
    processor_features,
    select_build,
)
from gllm.kernels.native.library import (
    KernelLibrary,
    LinearArguments,
    MeasuredKernelLibrary,
    Operation,
    library_for,
    using_library,
)
from gllm.kernels.native.measure import measure_slowdowns

EVERY = frozenset().union(*BUILDS.values())
ONLY_AVX2 = BUILDS["avx2"]


def folder_of(path: Path, *names: str) -> Path:
    for name in names:
        (path / f"_{name}.so").touch()
    return path


@pytest.mark.parametrize(
    ("features", "wanted"),
    [
        (EVERY, "amx_bf16"),
        (EVERY - {TILES_PERMITTED}, "avx512_bf16"),
        (BUILDS["avx512"] | ONLY_AVX2, "avx512"),
        (ONLY_AVX2, "avx2"),
        (frozenset({"sse2"}), "portable"),
    ],
)
def test_the_best_build_that_the_processor_runs(
    tmp_path: Path, features: frozenset[str], wanted: str
) -> None:
    build = select_build({}, features, folder_of(tmp_path, *BUILDS))
    assert (build.name, build.path) == (wanted, tmp_path / f"_{wanted}.so")
    assert not build.is_named


@pytest.mark.parametrize("name", BUILDS)
def test_the_variable_names_a_build(tmp_path: Path, name: str) -> None:
    build = select_build({BUILD_VARIABLE: name}, EVERY, folder_of(tmp_path, *BUILDS))
    assert (build.name, build.path) == (name, tmp_path / f"_{name}.so")
    assert build.is_named


def test_off_is_torch_alone(tmp_path: Path) -> None:
    build = select_build({BUILD_VARIABLE: OFF}, EVERY, folder_of(tmp_path, *BUILDS))
    assert (build.name, build.path) == (OFF, None)


def test_the_reason_tells_that_amx_is_not_permitted(tmp_path: Path) -> None:
    libraries = folder_of(tmp_path, *BUILDS)
    assert (
        f"not {AMX}: Linux does not permit"
        in select_build({}, EVERY - {TILES_PERMITTED}, libraries).reason
    )
    for features in (EVERY, EVERY - {"amx_tile", TILES_PERMITTED}):
        assert AMX not in select_build({}, features, libraries).reason


@pytest.mark.parametrize("is_permitted", [True, False])
def test_permission_is_requested_where_the_processor_has_amx(
    tmp_path: Path, is_permitted: bool
) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\nflags\t\t: fpu avx2 amx_tile\n")
    features = processor_features(file, lambda: is_permitted)
    assert (TILES_PERMITTED in features) == is_permitted
    file.write_text("flags\t\t: fpu avx2\n")
    assert TILES_PERMITTED not in processor_features(file, lambda: is_permitted)


def test_without_builds_the_reason_is_told(tmp_path: Path) -> None:
    assert "none was compiled" in select_build({}, EVERY, tmp_path).reason
    build = select_build({}, frozenset(), folder_of(tmp_path, "avx2"))
    assert build.path is None
    assert "supports none of those compiled (avx2)" in build.reason


@pytest.mark.parametrize(
    ("name", "features", "compiled", "reason"),
    [
        ("sse9", EVERY, BUILDS, r"'sse9', but has to be one of amx_bf16, .*portable, off"),
        ("AVX2", EVERY, BUILDS, r"'AVX2', but has to be one of"),
        (
            "avx512",
            ONLY_AVX2,
            BUILDS,
            r"lacks avx512bw, .*: choose one of avx2, portable, off",
        ),
        (
            AMX,
            BUILDS[BFLOAT16],
            BUILDS,
            r"lacks amx_bf16, amx_int8, amx_tile: choose one of avx512_bf16",
        ),
        (
            AMX,
            EVERY - {TILES_PERMITTED},
            BUILDS,
            r"Linux does not permit .* choose one of avx512_bf16",
        ),
        (
            "avx2",
            EVERY,
            ("portable",),
            r"not compiled: choose one of portable, off, or install",
        ),
    ],
)
def test_a_build_that_cannot_be_used_is_refused(
    tmp_path: Path,
    name: str,
    features: frozenset[str],
    compiled: tuple[str, ...],
    reason: str,
) -> None:
    with pytest.raises(ValueError, match=f"{BUILD_VARIABLE} is .*{reason}"):
        select_build({BUILD_VARIABLE: name}, features, folder_of(tmp_path, *compiled))


@pytest.mark.parametrize(
    ("build", "level", "text"),
    [
        (BuildSelection("avx2", Path("x"), "the best", False), "INFO", "build avx2 (the best)"),
        (
            BuildSelection(OFF, None, "none was compiled", False),
            "WARNING",
            "none, torch computes (none",
        ),
        (BuildSelection(OFF, None, "it is off", True), "INFO", "none, torch computes (it is off)"),
    ],
)
def test_the_log_tells_the_build(
    build: BuildSelection,
    level: str,
    text: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        library.log_kernels(build)
    (record,) = caplog.records
    assert record.levelname == level
    assert text in record.getMessage()


class SlowLinear(MeasuredKernelLibrary):
    """A build whose products take twenty times as long."""

    def __call__(self, arguments: object) -> None:
        for _ in range(20 if isinstance(arguments, LinearArguments) else 1):
            super().__call__(arguments)  # type: ignore[arg-type]


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> BuildSelection:
    """The best build of this machine."""
    monkeypatch.delenv(BUILD_VARIABLE, raising=False)
    found = select_build()
    if found.path is None:
        pytest.skip(found.reason)
    return found


def test_no_build_is_many_times_slower_than_torch(way: str) -> None:
    """Torch may use instructions that a build does without: some times as long is what that costs.
    Sums that do not fit into registers cost 20 to 40 times as long."""
    kernels = library.load_library()
    if kernels is None:
        pytest.skip("torch itself")
    ratios = measure_slowdowns(kernels, torch.float32)
    assert max(ratios.values()) < 8, ratios


def test_decodes_and_prefill_chunks_count_alike(build: BuildSelection) -> None:
    """A build that needs half the time for decodes is kept although a chunk takes twice as long."""
    assert build.path is not None
    ratios = iter([0.5, 2.0, 0.5, 8.0, 1.0, 1.0, 3.0])
    kernels = MeasuredKernelLibrary(build.path, build.name)
    slowdowns = measure_slowdowns(kernels, torch.float32, lambda *arguments: next(ratios))
    assert slowdowns == {"linear": 1.0, "attention": 2.0, "norm": 1.0, "gate": 1.0, "rotate": 3.0}


def test_torch_computes_what_a_build_computes_slower(
    build: BuildSelection, caplog: pytest.LogCaptureFixture
) -> None:
    assert build.path is not None
    kernels = SlowLinear(build.path, build.name)
    x, weight = torch.randn(5, 32), torch.randn(48, 32)
    threads = torch.get_num_threads()
    with using_library(kernels):
        matrix = prepare(weight)
        assert isinstance(matrix, UnquantizedMatrix)
        assert not matrix.is_packed
        assert torch.get_num_threads() == threads
        torch.testing.assert_close(linear(x, matrix, None), functional.linear(x, weight))
        assert library_for(x, "linear") is None
        # 8-bit products are in no way slower than the reference, which is all that torch has.
        assert library_for(x, "linear_int8") is kernels
    (record,) = caplog.records
    assert "torch computes linear" in record.getMessage()


def measured(build: BuildSelection, *ratios: dict[Operation, float]) -> MeasuredKernelLibrary:
    """The build, and the ratios that its measurements have, one after the other."""
    assert build.path is not None
    results = iter(ratios)
    return MeasuredKernelLibrary(build.path, build.name, lambda library, dtype: next(results))


def test_what_is_fast_enough_is_computed_by_the_build(build: BuildSelection) -> None:
    kernels = measured(build, {"linear": 1.2, "norm": 1.3})
    with using_library(kernels):
        assert library_for(torch.empty(1), "linear") is kernels
        assert library_for(torch.empty(1), "norm") is None


def test_stages_share_what_one_of_them_measured(build: BuildSelection) -> None:
    file = os.memfd_create("ratios")
    try:
        first = measured(build, {"linear": 9.0})
        second = measured(build, {"linear": 0.5})
        for each in (first, second):
            each.share(file)
        assert not first.is_preferred("linear", torch.float32)
        assert not second.is_preferred("linear", torch.float32)
        assert second.is_preferred("linear", torch.bfloat16)
        assert first.is_preferred("linear", torch.bfloat16)
        written = json.loads(os.pread(file, 1000, 0))
    finally:
        os.close(file)
    assert written == {"torch.float32": {"linear": 9.0}, "torch.bfloat16": {"linear": 0.5}}


def test_auto_leaves_attention_to_torch_where_that_is_faster(build: BuildSelection) -> None:
    wanted = AttentionRequirements(
        "cpu", (0, 0), torch.float32, torch.float32, 16, frozenset({HeadShape(64, 64)})
    )
    with using_library(measured(build, {"attention": 5.0})):
        choice = choose_backend("auto", wanted)
        assert choice.name == "torch"
        assert "native: takes more than" in choice.reason
        assert choose_backend("native", wanted).name == "native"


def test_a_library_of_other_sources_is_refused(tmp_path: Path) -> None:
    """One that was compiled before its sources changed would compute wrong numbers."""
    path = select_build().path
    if path is None:
        pytest.skip("no build was compiled")
    copied = Path(shutil.copy(path, tmp_path))
    KernelLibrary(copied)  # As in an installed package, which has no sources.
    for source in [*path.parent.glob("*.cpp"), *path.parent.glob("*.h")]:
        shutil.copy(source, tmp_path)
    KernelLibrary(copied)
    check_sources(copied, digest_sources(path.parent))
    with (tmp_path / "simd.h").open("a") as file:
        file.write("// changed")
    with pytest.raises(ValueError, match=f"{copied} was compiled from other sources.*make setup"):
        KernelLibrary(copied)
    with pytest.raises(ValueError, match="compiled from other sources"):
        check_sources(copied, "")
