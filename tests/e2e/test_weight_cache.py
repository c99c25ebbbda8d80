"""Servers with a cache of packed weights: text as without, one copy of the weights for all."""

import os
import shutil
import signal
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gllm.config.sampling import SamplingParams
from gllm.engine.llm import LLM
from tests.support.servers.server import Server, serving, stages, wait_until

BODY: dict[str, Any] = {
    "prompt": "One copy",
    "max_tokens": 24,
    "temperature": 0,
    "ignore_eos": True,
}


def answers_ready(server: Server) -> bool:
    """Return True if a server is ready. Fails if it has ended."""
    assert server.process.poll() is None, server.log
    return server.status("/ready") == 200


def text_of(server: Server) -> str:
    """Return the text of a greedy completion."""
    status, answer = server.post("/v1/completions", BODY)
    assert status == 200
    text: str = answer["choices"][0]["text"]
    return text


def mapped_inodes(server: Server) -> set[int]:
    """Return the files of packed weights that the workers of a server map, each read-only."""
    lines = [
        line.split()
        for pid in stages(server.pid).values()
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines()
        if line.endswith(".weights")
    ]
    assert {line[1] for line in lines} == {"r--s"}
    return {int(line[4]) for line in lines}


def inodes(cache: Path) -> set[int]:
    """Return the files of the folder."""
    return {path.stat().st_ino for path in cache.iterdir()}


@pytest.mark.full
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_one_copy_for_restarts_deaths_cuts_and_other_engines(
    tiny_model: Path, tmp_path: Path, quantization: str
) -> None:
    cache = tmp_path / "cache"
    plain = ["--pp", "2", "--quantization", quantization]
    flags = [*plain, "--weight-cache", f"{cache}:1GiB"]
    with serving(tiny_model, *plain) as server:
        expected = text_of(server)
    with serving(tiny_model, *flags) as first:
        assert text_of(first) == expected
        files = inodes(cache)
        # Four layers, embedding and LM head.
        assert len(files) == 6
        assert mapped_inodes(first) == files
        with serving(tiny_model, *flags, "--layers", "1,3") as second:
            assert text_of(second) == expected
            assert mapped_inodes(second) == files
        os.kill(stages(first.pid)[1], signal.SIGKILL)
        # The request waits for the recovery.
        assert text_of(first) == expected
        assert mapped_inodes(first) == files
    with serving(tiny_model, *flags) as restarted:
        assert text_of(restarted) == expected
        assert mapped_inodes(restarted) == files
    assert inodes(cache) == files


@pytest.mark.full
def test_servers_that_start_at_once_map_the_same_files(tiny_model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    flags = ["--pp", "2", "--layers", "2,2", "--threads", "1", "--weight-cache", str(cache)]
    servers = [Server(str(tiny_model), *flags) for _ in range(3)]
    try:
        for server in servers:
            wait_until(partial(answers_ready, server))
        assert len({text_of(server) for server in servers}) == 1
        files = inodes(cache)
        assert len(files) == 6
        assert [mapped_inodes(server) for server in servers] == [files] * 3
    finally:
        for server in servers:
            server.process.kill()
            server.process.wait()


def save_larger_model(tiny_model: Path, folder: Path) -> int:
    """Write a random model of about 100 MB with the tokenizer of the tiny one; its bytes."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=402,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=2,
    )
    transformers.Qwen3ForCausalLM(config).bfloat16().save_pretrained(folder)
    for path in tiny_model.glob("*token*"):
        shutil.copy(path, folder)
    return (folder / "model.safetensors").stat().st_size


def pss_bytes(servers: list[Server]) -> int:
    """Return the memory of all workers of servers, in which shared pages count in equal parts."""
    pids = [pid for server in servers for pid in stages(server.pid).values()]
    lines = [
        line.split()
        for pid in pids
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    ]
    return sum(int(line[1]) * 1024 for line in lines if line[0] == "Pss:")


@pytest.mark.full
def test_three_engines_have_the_weights_in_memory_once(tiny_model: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    weight_bytes = save_larger_model(tiny_model, model)
    flags = ["--pp", "1", "--dtype", "bfloat16", "--kv-cache-memory", "32MiB"]
    sizes: dict[str, list[int]] = {}
    for name, more in (("off", []), ("on", ["--weight-cache", str(tmp_path / "cache")])):
        with ExitStack() as stack:
            servers: list[Server] = []
            sizes[name] = []
            for _ in range(3):
                servers.append(stack.enter_context(serving(model, *flags, *more)))
                text_of(servers[-1])
                sizes[name].append(pss_bytes(servers))
    saved = sizes["off"][-1] - sizes["on"][-1]
    # Less what the first engine has packed and not returned to the system.
    assert 1.5 * weight_bytes < saved < 2.3 * weight_bytes, sizes


@pytest.mark.full
def test_ranks_share_their_parts(tiny_model: Path, tmp_path: Path) -> None:
    plain = ["--pp", "2", "--tp", "2,1", "--layers", "2,2"]
    flags = [*plain, "--weight-cache", str(tmp_path / "cache")]
    with serving(tiny_model, *plain) as server:
        expected = text_of(server)
    for _ in range(2):
        with serving(tiny_model, *flags) as server:
            assert text_of(server) == expected
        # Two layers and the embedding of each rank, two layers and the LM head.
        assert len(inodes(tmp_path / "cache")) == 9


@pytest.mark.full
def test_an_embedded_engine_shares_the_weights_of_a_server(
    tiny_model: Path, tmp_path: Path
) -> None:
    cache = str(tmp_path / "cache")
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    with serving(tiny_model, "--weight-cache", cache) as server:
        expected = text_of(server)
        files = inodes(tmp_path / "cache")
        with LLM(str(tiny_model), progress=False, threads=1, weight_cache=cache) as llm:
            (output,) = llm.generate([BODY["prompt"]], greedy)
    assert output.outputs[0].text == expected
    assert inodes(tmp_path / "cache") == files


@pytest.mark.full
def test_a_server_without_room_says_so_once_and_serves(tiny_model: Path, tmp_path: Path) -> None:
    with serving(tiny_model, "--pp", "1") as server:
        expected = text_of(server)
    (tmp_path / "cache").mkdir(mode=0o500)
    flags = ["--weight-cache", f"{tmp_path / 'cache'}"]
    if not os.geteuid():
        # Nothing is forbidden to root: a file in place of the folder is.
        (tmp_path / "cache").rmdir()
        (tmp_path / "file").touch()
        flags = ["--weight-cache", "/proc/gllm"]
    with serving(tiny_model, *flags) as server:
        assert text_of(server) == expected
        assert server.log.count("the weights are read from the model") == 1
