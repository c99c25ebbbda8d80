"""What peers need besides their packages: the model in their format, binaries.

Owns how each is made in the work folder, once. Knows nothing of how peers are run. What is there
already is taken as it is; what is half made when something fails lies under another name.
"""

import dataclasses
import shutil
import sys
from pathlib import Path

from benchmarks.cpu.environments import LLAMA_SOURCES
from benchmarks.cpu.workplace import PeerError, Workplace, run, variables
from gllm.config.engine import EngineConfig

LLAMA_BINARIES = ("llama-server", "llama-batched-bench")
CMAKE_FLAGS = (
    *("-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=OFF", "-DGGML_NATIVE=ON"),
    # What else the sources would download or build.
    *("-DLLAMA_BUILD_UI=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_OPENSSL=OFF"),
    *("-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF"),
)
GGUF_TYPES = {"bf16": "bf16", "int8": "q8_0"}
OPENVINO_FORMATS = {"bf16": "fp16", "int8": "int8"}
"""It keeps 16 bits as fp16 and makes bfloat16 of them when it loads them."""


def model_folder(work: Workplace, weights: str) -> Path:
    """The model as it is."""
    return work.model


def our_model(work: Workplace, weights: str) -> Path:
    """The model as it is, where gllm can serve it with such weights."""
    fields = {field.name for field in dataclasses.fields(EngineConfig)}
    if weights != "bf16" and "quantization" not in fields:
        raise PeerError(f"this gllm has no --quantization: no {weights} weights")
    return work.model


def llama_sources(work: Workplace) -> Path:
    """llama.cpp's folder in the source package."""
    folder = work.folder / "llama.cpp"
    sources = folder / "vendor" / "llama.cpp"
    if not (sources / "convert_hf_to_gguf.py").exists():
        downloads, log = work.folder / "downloads", work.log("install-llama")
        # pip names what it downloaded by itself; an older package must not be in the way.
        shutil.rmtree(downloads, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        run([*pip, "--no-binary", ":all:", "--dest", downloads, LLAMA_SOURCES], log)
        (archive,) = downloads.glob("*.tar.gz")
        folder.mkdir(parents=True, exist_ok=True)
        run(["tar", "xzf", archive, "-C", folder, "--strip-components=1"], log)
    return sources


def llama_binaries(work: Workplace) -> Path:
    """The folder with llama.cpp's server and benchmark, built for this processor if need be."""
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
    """The model as a GGUF file."""
    llama_binaries(work)
    kind = GGUF_TYPES[weights]
    file = work.folder / f"model-{kind}.gguf"
    if not file.exists():
        sources, partial = llama_sources(work), file.with_suffix(".partial")
        command = [sys.executable, "-m", "benchmarks.cpu.gguf", sources, work.model, partial, kind]
        run(command, work.log("convert-gguf"))
        partial.rename(file)
    return file


def openvino_ir(work: Workplace, weights: str) -> Path:
    """The model as OpenVINO's intermediate representation, and its tokenizer."""
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
