"""Which backend a stage takes, and what the ones it cannot take say."""

import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch

from gllm.config.engine import ATTENTION_BACKENDS
from gllm.kernels.attention_backends import (
    AUTO,
    BACKENDS,
    AttentionRequirements,
    HeadShape,
    backend_module,
    choose_backend,
)
from gllm.kernels.native.library import KernelLibrary, using_library
from tests.support.gpu import fake_flash_attention
from tests.support.models.kernel_builds import using_build

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
LATENT = HeadShape(576, 512, shared=True)
ON_CPU = AttentionRequirements(
    "cpu", (0, 0), torch.float32, torch.float32, 16, frozenset({HeadShape(64, 64)})
)
ON_GPU = AttentionRequirements("cuda", (9, 0), BF16, BF16, 256, frozenset({HeadShape(128, 128)}))


class _Everything(KernelLibrary):
    """A build that is not there."""

    def __init__(self) -> None:
        pass


Install = Callable[[object], None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Install a module as flash_attn; None: as Python marks a module that is not to be imported."""
    return lambda module: monkeypatch.setitem(sys.modules, "flash_attn", module)


@pytest.fixture
def installed(install: Install) -> None:
    install(fake_flash_attention)


def test_the_choices_of_the_flag_are_the_backends() -> None:
    assert sorted(ATTENTION_BACKENDS) == sorted(["auto", *BACKENDS])
    for device, names in AUTO.items():
        assert all(device in BACKENDS[name].devices for name in names)


@pytest.mark.parametrize("name", sorted(set(BACKENDS) - {"triton"}))
def test_each_is_a_module_with_the_operation(name: str) -> None:
    assert callable(backend_module(name).paged_attention)


def test_a_cpu_takes_compiled_kernels_where_they_fit() -> None:
    half = replace(ON_CPU, dtype=torch.float16, cache_dtype=torch.float16)
    others = [replace(ON_CPU, cache_dtype=cached) for cached in (FP8, torch.float16)]
    with using_library(_Everything()):
        for wanted in (ON_CPU, half, *others):
            assert choose_backend("auto", wanted).name == "native"
            assert choose_backend("native", wanted).name == "native"
        assert choose_backend("torch", ON_CPU).name == "torch"


def test_a_cpu_without_compiled_kernels_takes_torch() -> None:
    with using_build("torch"):
        assert choose_backend("auto", ON_CPU).name == "torch"
        with pytest.raises(ValueError, match=r"no compiled .* \(GLLM_CPU_KERNELS is off\), or"):
            choose_backend("native", ON_CPU)


@pytest.mark.parametrize("name", ["triton", "flash-attn"])
def test_kernels_for_gpus_are_not_for_cpus(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: does not compute on a CPU; choose auto or .*"):
        choose_backend(name, ON_CPU)


def test_native_kernels_are_not_for_gpus() -> None:
    with pytest.raises(ValueError, match=r"native: does not compute on GPUs; choose auto or .*tri"):
        choose_backend("native", ON_GPU)


def test_a_gpu_takes_flash_attention_where_it_fits(installed: None) -> None:
    pytest.importorskip("triton")
    assert (
        choose_backend("auto", ON_GPU).name
        == choose_backend("flash-attn", ON_GPU).name
        == "flash-attn"
    )
    choice = choose_backend("auto", replace(ON_GPU, block_size=16))
    assert choice.name == "triton"
    assert "--block-size 256" in choice.reason
    assert choose_backend("triton", ON_GPU).name == "triton"
    assert choose_backend("torch", ON_GPU).name == "torch"


@pytest.mark.parametrize(
    ("misfit", "reason"),
    [
        (
            replace(ON_GPU, block_size=16),
            "multiple of 256 tokens, not 16; choose --block-size 256",
        ),
        (replace(ON_GPU, cache_dtype=FP8), "float8_e4m3fn; choose --kv-cache-dtype auto"),
        (
            replace(ON_GPU, dtype=torch.float32, cache_dtype=torch.float32),
            "choose another --dtype",
        ),
        (replace(ON_GPU, capability=(7, 5)), "8.0 or more, this one has 7.5"),
        (replace(ON_GPU, shapes=ON_GPU.shapes | {LATENT}), "latent attention"),
        (replace(ON_GPU, shapes=frozenset({HeadShape(320, 320)})), "320 elements"),
        (replace(ON_GPU, shapes=frozenset({HeadShape(12, 12)})), "12 elements"),
        (replace(ON_GPU, shapes=frozenset({HeadShape(64, 64, has_sinks=True)})), "attention sinks"),
        (replace(ON_GPU, shapes=frozenset({HeadShape(192, 128)})), "values 128"),
    ],
)
def test_what_flash_attention_does_not_take(
    installed: None, misfit: AttentionRequirements, reason: str
) -> None:
    with pytest.raises(ValueError, match=f"--attention-backend flash-attn: .*{reason}"):
        choose_backend("flash-attn", misfit)
    pytest.importorskip("triton")
    assert choose_backend("auto", misfit).name == "triton"


def test_flash_attention_has_to_be_installed(install: Install) -> None:
    install(None)
    with pytest.raises(ValueError, match=r"flash-attn: .*cannot be imported .*pip install flash-a"):
        choose_backend("flash-attn", ON_GPU)


def test_another_package_of_that_name_is_not_it(install: Install) -> None:
    """As FlashAttention-4 alone, which shares the name but has none of the functions."""
    install(ModuleType("flash_attn"))
    with pytest.raises(ValueError, match="flash-attn: cannot be imported"):
        choose_backend("flash-attn", ON_GPU)


@pytest.mark.parametrize(("version", "fits"), [("2.5.9", False), ("2.6.0", True), ("2.10", True)])
def test_flash_attention_has_to_be_new_enough(version: str, fits: bool, install: Install) -> None:
    names = ("flash_attn_varlen_func", "flash_attn_with_kvcache")
    functions = {name: getattr(fake_flash_attention, name) for name in names}
    install(SimpleNamespace(__version__=version, **functions))
    if fits:
        assert choose_backend("flash-attn", ON_GPU).name == "flash-attn"
    else:
        with pytest.raises(ValueError, match=r"2\.5\.9 is installed; pip install -U flash-attn"):
            choose_backend("flash-attn", ON_GPU)
