"""The peers: one row each, with how its server is started and asked and which driver runs it.

Owns the table and the servers' command lines. Knows nothing of loads and of figures.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cpu.model import KV_BYTES
from benchmarks.cpu.prepare import gguf, llama_binaries, model_folder, openvino_ir, our_model
from benchmarks.cpu.workplace import OURS, Workplace

CONTEXT_SERVED = 4096
"""Tokens of a request at most: what vLLM has to find room for in its cache."""
BATCHED_TOKENS = 2048
"""In a step at most, as vLLM and gllm have it, for those that would have it otherwise."""
TRANSFORMERS_BLOCK = 256
"""Tokens."""


@dataclass(frozen=True)
class Server:
    """A server's command, and what its requests have to be like."""

    command: tuple[object, ...]
    model: str | None = None
    """The name clients ask for; None: as the server lists it."""
    extra_body: Mapping[str, Any] | None = None
    takes_ids: bool = True
    """Whether prompts may be token ids; else they are words that are tokenized into the same."""
    ignores_eos: bool = True
    """Whether it knows ignore_eos; else outputs are hoped not to end early, and counted."""


Serve = Callable[[Workplace, Path, int, int], Server]
"""From the workplace, what the peer loads, a port, and requests at once at most."""
Variables = Callable[[Workplace], Mapping[str, str]]


def no_variables(work: Workplace) -> dict[str, str]:
    """For those that are told everything by flags."""
    return {}


def transformers_variables(work: Workplace) -> dict[str, str]:
    """Threads, and a cache of models, which its server lists: it has to be there."""
    cache = work.folder / "hub"
    cache.mkdir(exist_ok=True)
    return {"OMP_NUM_THREADS": str(work.threads), "HF_HUB_CACHE": str(cache)}


def llama_variables(work: Workplace) -> dict[str, str]:
    """Where its binaries are."""
    return {"PATH": f"{llama_binaries(work)}:{os.environ.get('PATH', '')}"}


def vllm_variables(work: Workplace) -> dict[str, str]:
    """Cores, which vLLM for CPUs has no flag for."""
    return {"VLLM_CPU_OMP_THREADS_BIND": f"0-{work.threads - 1}"}


@dataclass(frozen=True)
class Peer:
    """A server or library that does what gllm does."""

    name: str
    environment: str
    weights: str
    """bf16 or int8."""
    prepare: Callable[[Workplace, str], Path]
    """Makes what the peer loads, from the workplace and `weights`."""
    serve: Serve | None = None
    driver: str | None = None
    """Module of benchmarks.cpu.drivers that measures it in process."""
    variables: Variables = no_variables
    """Of the environment of its server and its driver."""


def serve_gllm(*quantization: str) -> Serve:
    """gllm, with these more flags."""

    def serve(work: Workplace, source: Path, port: int, slots: int) -> Server:
        command = [work.python(OURS), "-m", "gllm.serve", source, "--port", port]
        command += ["--threads", work.threads, "--dtype", "bfloat16", "--no-prefix-cache"]
        command += ["--kv-cache-memory", work.kv_bytes, "--log-level", "warning"]
        return Server((*command, *quantization))

    return serve


def serve_llama(work: Workplace, source: Path, port: int, slots: int) -> Server:
    """llama.cpp's own server: that of llama-cpp-python serves one request at a time."""
    command = [llama_binaries(work) / "llama-server", "-m", source, "--port", port]
    command += ["-t", work.threads, "-tb", work.threads, "-np", slots]
    command += ["-c", work.kv_bytes // KV_BYTES, "--no-cache-prompt", "--cache-ram", 0]
    return Server((*command, "--no-ui"), extra_body={"cache_prompt": False})


def serve_vllm(work: Workplace, source: Path, port: int, slots: int) -> Server:
    """vLLM's build for CPUs."""
    command = [work.python("vllm"), "-m", "vllm.entrypoints.openai.api_server", "--model", source]
    command += ["--host", "127.0.0.1", "--port", port, "--dtype", "bfloat16"]
    command += ["--max-model-len", CONTEXT_SERVED, "--no-enable-prefix-caching"]
    command += ["--kv-cache-memory-bytes", work.kv_bytes]
    return Server(tuple(command))


def serve_transformers(work: Workplace, source: Path, port: int, slots: int) -> Server:
    """`transformers serve` with its continuous batching."""
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
            *("transformers", "transformers", "bf16", model_folder),
            *(serve_transformers, "transformers_generate", transformers_variables),
        ),
        Peer("openvino", "openvino", "bf16", openvino_ir, None, "openvino_pipeline"),
        Peer(
            *("gllm-int8", OURS, "int8", our_model),
            *(serve_gllm("--quantization", "int8"), "gllm_engine"),
        ),
        Peer("llama.cpp-q8", "llama", "int8", gguf, serve_llama, "llama_bench", llama_variables),
        Peer("openvino-int8", "openvino", "int8", openvino_ir, None, "openvino_pipeline"),
    )
}
"""By name, in the order of the tables."""


def chosen(names: tuple[str, ...] | None, in_process: bool) -> list[Peer]:
    """The peers of these names, or all, that can be measured so.

    Raises ValueError for a name that is not in the table, or that has no server or no driver.
    """
    for name in names or ():
        if name not in PEERS:
            raise ValueError(f"peers: {name!r} is none of {', '.join(PEERS)}")
    able = {p.name: p for p in PEERS.values() if (p.driver if in_process else p.serve)}
    for name in names or ():
        if name not in able:
            what = "in process" if in_process else "as a server"
            raise ValueError(f"peers: {name} is not measured {what}; these are: {', '.join(able)}")
    return [peer for name, peer in able.items() if not names or name in names]
