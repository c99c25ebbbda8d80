"""Preparation of the peers' files: the model in their format, and binaries.

Each file is created once in the work folder and reused. Unfinished files have another name.
"""

import dataclasses
import shutil
import sys
from pathlib import Path

from benchmarks.cpu.environments import LLAMA_SOURCES
from benchmarks.cpu.workplace import PeerError, Workplace, run, variables
from gllm.config.engine import EngineConfig

LLAMA_BINARIES = ("llama-server", "llama-batched-bench", "llama-quantize")
CMAKE_FLAGS = (
    "-G",
    "Ninja",
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DGGML_NATIVE=ON",
    # Downloads and builds that the comparison does not need.
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
)
GGUF_TYPES = {"bf16": "bf16", "int8": "q8_0"}
"""Types that llama.cpp's converter writes, by gllm's names; its quantizer writes the others."""
OPENVINO_FORMATS = {"bf16": "fp16", "int8": "int8", "int4": "int4"}
"""Weight format by gllm's name. OpenVINO stores 16 bits as fp16 and converts them to bfloat16 at
load.
"""


def model_folder(work: Workplace, weights: str) -> Path:
    """Return the model's folder unchanged."""
    return work.model


def our_model(work: Workplace, weights: str) -> Path:
    """Return the model's folder unchanged.

    Raises:
        PeerError: This gllm cannot serve such weights.
    """
    fields = {field.name for field in dataclasses.fields(EngineConfig)}
    if weights != "bf16" and "quantization" not in fields:
        raise PeerError(f"this gllm has no --quantization: no {weights} weights")
    return work.model


def llama_sources(work: Workplace) -> Path:
    """Download the source package if necessary and return llama.cpp's folder in it."""
    folder = work.folder / "llama.cpp"
    sources = folder / "vendor" / "llama.cpp"
    if not (sources / "convert_hf_to_gguf.py").exists():
        downloads, log = work.folder / "downloads", work.log("install-llama")
        # pip chooses the file name; an older package must not match the pattern below.
        shutil.rmtree(downloads, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        run([*pip, "--no-binary", ":all:", "--dest", downloads, LLAMA_SOURCES], log)
        (archive,) = downloads.glob("*.tar.gz")
        folder.mkdir(parents=True, exist_ok=True)
        run(["tar", "xzf", archive, "-C", folder, "--strip-components=1"], log)
    return sources


def llama_binaries(work: Workplace) -> Path:
    """Return the folder of llama.cpp's programs; build missing ones.

    Raises:
        PeerError: The folder of --llama-bin lacks a binary, or the build failed.
    """
    folder = work.llama_bin or llama_sources(work) / "build" / "bin"
    absent = [name for name in LLAMA_BINARIES if not (folder / name).exists()]
    if absent and work.llama_bin:
        raise PeerError(f"--llama-bin {folder} has no {' and no '.join(absent)}")
    if absent:
        sources, log = llama_sources(work), work.log("build-llama")
        env = variables(work.python("llama"), {})
        run(["cmake", "-S", sources, "-B", sources / "build", *CMAKE_FLAGS], log, env)
        run(["cmake", "--build", sources / "build", "--target", *LLAMA_BINARIES], log, env)
    return folder


def gguf(work: Workplace, weights: str) -> Path:
    """Convert the model to a GGUF file and return its path.

    weights: a key of GGUF_TYPES, or a type of llama.cpp's quantizer, as q4_k_m.
    """
    programs = llama_binaries(work)
    kind = GGUF_TYPES.get(weights, weights)
    file = work.folder / f"{work.model.name}-{kind}.gguf"
    if file.exists():
        return file
    partial, log = file.with_suffix(".partial"), work.log("convert-gguf")
    if weights in GGUF_TYPES:
        command = [sys.executable, "-m", "benchmarks.cpu.gguf", llama_sources(work)]
        run([*command, work.model, partial, kind], log)
    else:
        run([programs / "llama-quantize", gguf(work, "bf16"), partial, kind], log)
    partial.rename(file)
    return file


def gptq_folder(work: Workplace, weights: str) -> Path:
    """Write the model as a 4-bit GPTQ folder, symmetric in groups of 128, and return its path."""
    folder = work.folder / "gptq"
    command = [sys.executable, "-m", "benchmarks.cpu.gptq", work.model, folder]
    run(command, work.log("write-gptq"))
    return folder


def openvino_ir(work: Workplace, weights: str) -> Path:
    """Export the model and its tokenizer to OpenVINO's intermediate representation."""
    folder = work.folder / f"openvino-{weights}"
    if not folder.exists():
        partial, python = folder.with_suffix(".partial"), work.python("openvino")
        shutil.rmtree(partial, ignore_errors=True)
        command = [python.parent / "optimum-cli", "export", "openvino", "--model", work.model]
        command += ["--task", "text-generation-with-past"]
        command += ["--weight-format", OPENVINO_FORMATS[weights], partial]
        run(command, work.log(f"export-openvino-{weights}"), variables(python, {}))
        partial.rename(folder)
    return folder
