"""Configurations: from flags, from keywords, and what cannot be."""

import argparse
import math
from typing import Any

import numpy as np
import pytest

from gllm.config.engine import EngineConfig
from gllm.config.sampling import SamplingParams
from gllm.config.server import ServerConfig
from gllm.options.field_types import FieldError
from gllm.options.flags import add_flags, config_from_flags, parse_bytes


def parse(line: str) -> tuple[EngineConfig, ServerConfig]:
    parser = argparse.ArgumentParser()
    add_flags(parser, EngineConfig)
    add_flags(parser, ServerConfig)
    values = parser.parse_args(line.split())
    return config_from_flags(EngineConfig, values), config_from_flags(ServerConfig, values)


def test_nothing_given_is_the_default() -> None:
    assert parse("") == (EngineConfig(), ServerConfig())


def test_every_flag_reaches_its_field() -> None:
    engine, server = parse(
        "--pp 2 --layers 10,14 --kv-cache-memory 1.5GiB --max-model-len 99 --policy throttle "
        "--device cuda --gpu-memory-utilization 0.5 "
        "--kv-threshold 0.25 --no-prefix-cache --phase-pure --max-in-flight 3 --port 1 --host ::1 "
        "--api-key a --api-key b --allowed-origins https://x.org --rate-limit 60 "
        "--ssl-certfile c --ssl-keyfile k"
    )
    assert (engine.pipeline_parallel_size, engine.layers) == (2, (10, 14))
    assert (engine.device, engine.gpu_memory_utilization) == ("cuda", 0.5)
    assert (engine.kv_cache_memory, engine.max_model_len) == (3 * 2**29, 99)
    assert (engine.scheduler.policy, engine.scheduler.kv_threshold) == ("throttle", 0.25)
    assert not engine.scheduler.prefix_cache
    assert engine.scheduler.phase_pure
    assert engine.scheduler.max_in_flight == 3
    assert (server.port, server.host) == (1, "::1")
    assert (server.api_key, server.allowed_origins) == (("a", "b"), ("https://x.org",))
    assert (server.rate_limit, server.ssl_certfile, server.ssl_keyfile) == (60, "c", "k")


def test_flat_keywords_find_their_place() -> None:
    config = EngineConfig.from_options(
        "m", pipeline_parallel_size=2, policy="sarathi", max_model_len=7
    )
    assert config.scheduler.policy == "sarathi"
    assert (config.model, config.pipeline_parallel_size, config.max_model_len) == ("m", 2, 7)
    with pytest.raises(TypeError, match="polici"):
        EngineConfig.from_options("m", polici="sarathi")


@pytest.mark.parametrize(
    ("line", "degrees"),
    [
        ("", (1,)),
        ("--pp 3", (1, 1, 1)),
        ("--tp 2", (2,)),
        ("-tp 2 --pp 2", (2, 2)),
        ("--tensor-parallel-size 2,1 --pp 2", (2, 1)),
        ("--tp=1,3,2 --pp 3", (1, 3, 2)),
    ],
)
def test_ranks_of_each_stage(line: str, degrees: tuple[int, ...]) -> None:
    config, _ = parse(line)
    assert config.stage_degrees == degrees
    assert config.num_workers == sum(degrees)


@pytest.mark.parametrize("degrees", [2, (2,), [2], np.int64(2), np.array([2])], ids=repr)
def test_a_degree_may_be_a_number(degrees: Any) -> None:
    config = EngineConfig.from_options("m", tensor_parallel_size=degrees)
    assert config == EngineConfig.from_options("m", tensor_parallel_size=(2,))
    assert [type(each) for each in config.tensor_parallel_size] == [int]


@pytest.mark.parametrize(
    ("text", "value"),
    [("7", 7), ("512MiB", 2**29), ("2GiB", 2**31), ("1.5GB", 15 * 10**8), ("3 kb", 3000)],
)
def test_bytes(text: str, value: int) -> None:
    assert parse_bytes(text) == value


@pytest.mark.parametrize(
    "options",
    [
        {"pipeline_parallel_size": 0},
        {"tensor_parallel_size": 0},
        {"tensor_parallel_size": (2, 1)},
        {"tensor_parallel_size": ()},
        {"tensor_parallel_size": (65,)},
        {"tensor_parallel_size": True},
        {"tensor_parallel_size": 2.0},
        {"layers": (1, 2)},
        {"layers": (0,)},
        {"max_model_len": 0},
        {"kv_cache_memory": -1},
        {"threads": 0},
        {"dtype": "int8"},
        {"quantization": "int2"},
        {"device": "tpu"},
        {"gpu_memory_utilization": 0.0},
        {"gpu_memory_utilization": 1.01},
        {"gpu_memory_utilization": math.nan},
        {"health_timeout": 0.0},
        {"health_timeout": math.nan},
        {"block_size": 0},
    ],
    ids=str,
)
def test_values_out_of_range_are_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        EngineConfig.from_options("m", **options)


@pytest.mark.parametrize(
    "options",
    [
        {"api_key": ("fine", "")},
        {"api_key": ("two words",)},
        {"api_key": ("schlüssel",)},
        {"api_key": ("line\n",)},
        {"allowed_origins": ("example.com",)},
        {"allowed_origins": ("https://example.com/",)},
        {"allowed_origins": ("https://a.org,https://b.org",)},
        {"allowed_origins": ("",)},
        {"ssl_certfile": "x"},
        {"ssl_keyfile": "x"},
        {"ssl_ca_certs": "x"},
        {"rate_limit": 0},
        {"read_timeout": 0.0},
        {"write_timeout": math.nan},
        {"write_timeout": math.inf},
    ],
    ids=str,
)
def test_a_server_that_cannot_be_names_the_field(options: dict[str, Any]) -> None:
    name, value = next(iter(options.items()))
    with pytest.raises(ValueError, match=name) as caught:
        ServerConfig(**options)
    if name == "api_key":
        assert f"api_key {len(value)}" in str(caught.value)
        assert not value[-1] or value[-1] not in str(caught.value)
    if name.startswith("ssl_"):
        other = {"ssl_certfile": "ssl_keyfile", "ssl_keyfile": "ssl_certfile"}
        assert other.get(name, "ssl_certfile") in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": 2.1},
        {"top_p": 0.0},
        {"top_k": -2},
        {"min_p": 1.1},
        {"seed": 2**63},
        {"n": 0},
        {"max_tokens": 0},
        {"max_tokens": 2**31},
        {"min_tokens": -1},
        {"stop": ("",)},
        {"stop": ("x",) * 33},
        {"stop_token_ids": (-1,)},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": math.inf},
        {"presence_penalty": 2.1},
        {"frequency_penalty": math.nan},
        {"logit_bias": {5: 101.0}},
        {"logit_bias": {5: math.nan}},
        {"allowed_token_ids": ()},
        {"bad_words": ("",)},
        {"logprobs": -1},
        {"logprobs": 21},
        {"prompt_logprobs": 21},
        {"truncate_prompt_tokens": 0},
    ],
    ids=str,
)
def test_sampling_out_of_range_names_the_field(options: dict[str, Any]) -> None:
    with pytest.raises(FieldError) as caught:
        SamplingParams(**options)
    assert caught.value.param == next(iter(options))
