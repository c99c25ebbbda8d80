"""Table of the peers: the server's command line, its request format and the driver of each."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cpu.model import DENSE, KV_BYTES, SHAPES
from benchmarks.cpu.prepare import (
    gguf,
    gptq_folder,
    llama_binaries,
    model_folder,
    openvino_ir,
    our_model,
)
from benchmarks.cpu.workplace import OURS, Workplace

CONTEXT_SERVED = 4096
"""Maximum tokens per request, for which vLLM must find room in its KV cache."""
BATCHED_TOKENS = 2048
"""Maximum tokens per step: the default of vLLM and gllm, set for peers with another default."""
TRANSFORMERS_BLOCK = 256
"""Tokens per KV cache block."""


@dataclass(frozen=True)
class Server:
    """A server's command and the format of its requests."""

    command: tuple[object, ...]
    model: str | None = None
    """Name of the model in requests; None: the name that the server lists."""
    extra_body: Mapping[str, Any] | None = None
    takes_ids: bool = True
    """The server accepts token ids; otherwise prompts are words that it tokenizes into the same
    ids.
    """
    ignores_eos: bool = True
    """The server supports ignore_eos; otherwise outputs may end early, and their lengths are
    checked.
    """


Serve = Callable[[Workplace, Path, int, int], Server]
"""Build a server from the workplace, the model's path, a port and the maximum concurrent requests.
"""
Variables = Callable[[Workplace], Mapping[str, str]]


def no_variables(work: Workplace) -> dict[str, str]:
    """Return no variables: flags configure these peers completely."""
    return {}


def transformers_variables(work: Workplace) -> dict[str, str]:
    """Return the thread count and the model cache, which must exist because the server lists it."""
    cache = work.folder / "hub"
    cache.mkdir(exist_ok=True)
    return {"OMP_NUM_THREADS": str(work.threads), "HF_HUB_CACHE": str(cache)}


def llama_variables(work: Workplace) -> dict[str, str]:
    """Return the PATH with llama.cpp's binaries."""
    return {"PATH": f"{llama_binaries(work)}:{os.environ.get('PATH', '')}"}


def vllm_variables(work: Workplace) -> dict[str, str]:
    """Return the cores to use, for which vLLM for CPUs has no flag."""
    return {"VLLM_CPU_OMP_THREADS_BIND": f"0-{work.threads - 1}"}


@dataclass(frozen=True)
class Peer:
    """A server or library that is compared with gllm."""

    name: str
    environment: str
    weights: str
    """bf16, int8, int4, or a type of GGUF, as q4_0."""
    prepare: Callable[[Workplace, str], Path]
    """Function that creates the peer's model files, from the workplace and `weights`."""
    serve: Serve | None = None
    driver: str | None = None
    """Module of benchmarks.cpu.drivers that measures the peer in process."""
    variables: Variables = no_variables
    """Function that returns the environment variables of the peer's server and driver."""
    shape: str = DENSE
    """Shape of the model, a key of SHAPES."""


def serve_gllm(*quantization: str) -> Serve:
    """Return the function that starts gllm with these additional flags."""

    def serve(work: Workplace, source: Path, port: int, slots: int) -> Server:
        command = [work.python(OURS), "-m", "gllm.serve", source, "--port", port]
        command += ["--threads", work.threads, "--dtype", "bfloat16", "--no-prefix-cache"]
        command += ["--kv-cache-memory", work.kv_bytes, "--log-level", "warning"]
        return Server((*command, *quantization))

    return serve


def serve_llama(work: Workplace, source: Path, port: int, slots: int) -> Server:
    """Return llama.cpp's own server; that of llama-cpp-python serves one request at a time."""
    command = [llama_binaries(work) / "llama-server", "-m", source, "--port", port]
    command += ["-t", work.threads, "-tb", work.threads, "-np", slots]
    command += ["-c", work.kv_bytes // KV_BYTES, "--no-cache-prompt", "--cache-ram", 0]
    return Server((*command, "--no-ui"), extra_body={"cache_prompt": False})


def serve_vllm(work: Workplace, source: Path, port: int, slots: int) -> Server:
    """Return the server of vLLM's build for CPUs."""
    command = [work.python("vllm"), "-m", "vllm.entrypoints.openai.api_server", "--model", source]
    command += ["--host", "127.0.0.1", "--port", port, "--dtype", "bfloat16"]
    command += ["--max-model-len", CONTEXT_SERVED, "--no-enable-prefix-caching"]
    command += ["--kv-cache-memory-bytes", work.kv_bytes]
    return Server(tuple(command))


def serve_transformers(work: Workplace, source: Path, port: int, slots: int) -> Server:
    """Return `transformers serve` with continuous batching."""
    python = work.python("transformers")
    command = [python.parent / "transformers", "serve", source, "--continuous-batching"]
    command += ["--host", "127.0.0.1", "--port", port, "--device", "cpu", "--dtype", "bfloat16"]
    command += ["--cb-num-blocks", work.kv_bytes // (TRANSFORMERS_BLOCK * KV_BYTES)]
    command += ["--cb-max-batch-tokens", BATCHED_TOKENS]
    return Server(tuple(command), model=str(source), takes_ids=False, ignores_eos=False)


PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer("gllm", OURS, "bf16", our_model, serve_gllm(), "gllm_engine"),
        Peer("llama.cpp", "llama", "bf16", gguf, serve_llama, "llama_bench", llama_variables),
        Peer("vllm", "vllm", "bf16", model_folder, serve_vllm, "vllm_llm", vllm_variables),
        Peer(
            "transformers",
            "transformers",
            "bf16",
            model_folder,
            serve_transformers,
            "transformers_generate",
            transformers_variables,
        ),
        Peer("openvino", "openvino", "bf16", openvino_ir, None, "openvino_pipeline"),
        Peer(
            "gllm-int8",
            OURS,
            "int8",
            our_model,
            serve_gllm("--quantization", "int8"),
            "gllm_engine",
        ),
        Peer("llama.cpp-q8", "llama", "int8", gguf, serve_llama, "llama_bench", llama_variables),
        Peer("openvino-int8", "openvino", "int8", openvino_ir, None, "openvino_pipeline"),
        Peer("gllm-q4_0", OURS, "q4_0", gguf, serve_gllm(), "gllm_engine"),
        Peer("llama.cpp-q4_0", "llama", "q4_0", gguf, serve_llama, "llama_bench", llama_variables),
        Peer("gllm-q4_k_m", OURS, "q4_k_m", gguf, serve_gllm(), "gllm_engine"),
        Peer(
            "llama.cpp-q4_k_m",
            "llama",
            "q4_k_m",
            gguf,
            serve_llama,
            "llama_bench",
            llama_variables,
        ),
        Peer(
            "gllm-int4",
            OURS,
            "int4",
            our_model,
            serve_gllm("--quantization", "int4"),
            "gllm_engine",
        ),
        Peer("vllm-int4", "vllm", "int4", gptq_folder, serve_vllm, "vllm_llm", vllm_variables),
        Peer("openvino-int4", "openvino", "int4", openvino_ir, None, "openvino_pipeline"),
        *(
            peer
            for shape in SHAPES
            if shape != DENSE
            for peer in (
                Peer(f"gllm-{shape}", OURS, "bf16", our_model, None, "gllm_engine", shape=shape),
                Peer(
                    f"llama.cpp-{shape}",
                    "llama",
                    "bf16",
                    gguf,
                    None,
                    "llama_bench",
                    llama_variables,
                    shape,
                ),
                Peer(
                    f"gllm-int8-{shape}", OURS, "int8", our_model, None, "gllm_engine", shape=shape
                ),
                Peer(
                    f"llama.cpp-q8-{shape}",
                    "llama",
                    "int8",
                    gguf,
                    None,
                    "llama_bench",
                    llama_variables,
                    shape,
                ),
            )
        ),
    )
}
"""Peers by name, in the order of the tables."""


def is_four_bit(peer: Peer) -> bool:
    """Return True for weights of 4 bits, which are compared in a mode of their own."""
    return peer.weights not in ("bf16", "int8")


DENSE_PEERS = ("gllm", "llama.cpp", "gllm-int8", "llama.cpp-q8")
"""Peers that hybrids are compared with; theirs have the shape's name behind these names."""


def is_usual(peer: Peer, mode: str) -> bool:
    """Return True if a mode measures the peer unless peers are named."""
    if mode == "hybrid" or peer.shape != DENSE:
        return mode == "hybrid" and (peer.shape != DENSE or peer.name in DENSE_PEERS)
    return is_four_bit(peer) == (mode == "four-bit")


def select_peers(names: tuple[str, ...] | None, mode: str) -> list[Peer]:
    """Return the peers of these names, or all peers of the mode's weights, that support the mode.

    Raises:
        ValueError: A name is not in the table, or its peer has no server or no driver.
    """
    for name in names or ():
        if name not in PEERS:
            raise ValueError(f"peers: {name!r} is none of {', '.join(PEERS)}")
    is_served = mode in ("server", "poisson")
    able = {p.name: p for p in PEERS.values() if (p.serve if is_served else p.driver)}
    for name in names or ():
        if name not in able:
            how = "as a server" if is_served else "in process"
            raise ValueError(f"peers: {name} is not measured {how}; these are: {', '.join(able)}")
    usual = {name for name, p in able.items() if is_usual(p, mode)}
    return [peer for name, peer in able.items() if name in (names or usual)]
