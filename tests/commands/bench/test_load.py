"""Loads: arrivals as their parameters say, exact lengths, prompts apart, errors that help."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import pytest

from gllm.commands.bench.load import PlannedRequest, jobs_of, plan_load, warmup_requests
from gllm.commands.bench.options import LoadConfig, ServeConfig
from gllm.options.flags import parse_floats
from gllm.sim.workloads.traces import load_trace

MANY = 20_000
SHORT = LoadConfig("fixed:1,1", MANY)


def gaps(config: ServeConfig) -> list[float]:
    times = [planned.arrival for planned in plan_load(config, 10)]
    return [after - before for before, after in pairwise(times)]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_rate_and_the_burstiness(burstiness: float) -> None:
    values = gaps(ServeConfig(load=SHORT, request_rate=5.0, burstiness=burstiness))
    assert fmean(values) == pytest.approx(0.2, rel=0.05)
    assert pstdev(values) / fmean(values) == pytest.approx(burstiness**-0.5, rel=0.05)


def test_poisson_gaps_are_exponential() -> None:
    values = gaps(ServeConfig(load=SHORT, request_rate=1.0))
    for limit, share in ((0.5, 0.3935), (1.0, 0.6321), (2.0, 0.8647)):
        assert fmean(value < limit for value in values) == pytest.approx(share, abs=0.01)


def test_all_at_once_and_in_bursts() -> None:
    load = LoadConfig("fixed:1,1", 7)
    once = plan_load(ServeConfig(load=load), 10)
    assert [planned.arrival for planned in once] == [0.0] * 7
    bursts = plan_load(ServeConfig(load=load, request_rate=6.0, arrivals="burst:3"), 10)
    assert [planned.arrival for planned in bursts] == [0.0] * 3 + [0.5] * 3 + [1.0]


def test_a_replay_keeps_the_trace_s_times_and_lengths() -> None:
    load = LoadConfig("azure-code", 50, scale_length=0.5, max_length=1000)
    planned = plan_load(ServeConfig(load=load, arrivals="replay", scale_time=2.0), 10)
    trace = load_trace("azure_llm_2023_code")
    assert [p.arrival for p in planned] == [2 * time for time in trace.arrivals[:50]]
    for ours, (prompt, output) in zip(planned, trace.lengths, strict=False):
        assert ours.prompt_tokens + ours.output_tokens <= 1000
        if prompt + output < 1900:
            assert ours.prompt_tokens == len(ours.prompt) == max(1, round(prompt / 2))
            assert ours.output_tokens == max(1, round(output / 2))


def test_prompts_are_drawn_by_the_seed_below_the_vocabulary_and_apart() -> None:
    config = ServeConfig(load=LoadConfig("fixed:40,3", 20))
    planned = plan_load(config, 50)
    assert planned == plan_load(config, 50)
    assert planned != plan_load(replace(config, load=replace(config.load, seed=1)), 50)
    ids = [planned.prompt for planned in planned]
    assert {id for prompt in ids for id in prompt} <= set(range(50))
    assert len({tuple(prompt) for prompt in ids}) == 20


@pytest.mark.parametrize("flags", [{"prompt_kind": "text"}, {"endpoint": "/v1/chat/completions"}])
def test_text_has_as_many_words_as_tokens_are_asked(flags: dict[str, Any]) -> None:
    planned = plan_load(ServeConfig(load=LoadConfig("fixed:40,3", 5), **flags), 50)
    assert [len(str(p.prompt).split()) for p in planned] == [40] * 5
    assert len({p.prompt for p in planned}) == 5


def test_warm_ups_are_as_long_but_say_something_else() -> None:
    config = ServeConfig(load=LoadConfig("fixed:40,3", 5), num_warmups=2)
    planned = plan_load(config, 50)
    warm = warmup_requests(config, planned, 50)
    assert [len(each.prompt) for each in warm] == [40, 40]
    assert not {tuple(each.prompt) for each in warm} & {tuple(each.prompt) for each in planned}


# Files.

JSON_LINES = """{"prompt": "Tell me a story", "output_tokens": 7, "arrival_s": 1.5}

{"prompt": [3, 1, 2], "output_tokens": 8, "arrival_s": 0.5}
{"prompt_tokens": 4, "output_tokens": 9, "arrival_s": 2}
"""


def test_json_lines(tmp_path: Path) -> None:
    file = tmp_path / "load.jsonl"
    file.write_text(JSON_LINES)
    config = ServeConfig(load=LoadConfig(str(file)), arrivals="replay")
    planned = plan_load(config, 10)
    assert planned[:2] == [
        PlannedRequest(0.0, [3, 1, 2], 3, 8),
        PlannedRequest(1.0, "Tell me a story", 4, 7),
    ]
    assert (len(planned[2].prompt), planned[2].output_tokens) == (4, 9)
    with pytest.raises(ValueError, match="only `gllm bench serve`"):
        jobs_of(config.load)
    with pytest.raises(ValueError, match="chat takes text"):
        plan_load(replace(config, endpoint="/v1/chat/completions"), 10)


def test_csv(tmp_path: Path) -> None:
    file = tmp_path / "load.csv"
    file.write_text("prompt_tokens,output_tokens\n10,3\n20,6\n30,9\n")
    load = LoadConfig(str(file), num_prompts=2, scale_length=0.5)
    assert [(job.num_prompt_tokens, job.num_output_tokens) for job in jobs_of(load)] == [
        (5, 2),
        (10, 3),
    ]
    with pytest.raises(ValueError, match="no arrival_s"):
        plan_load(ServeConfig(load=load, arrivals="replay"), 10)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.jsonl", "", "has no requests"),
        ("a.jsonl", '{"prompt_tokens": 3}', "request 1.*output_tokens"),
        ("a.jsonl", '{"prompt_tokens": 3, "output_tokens": 1}\n[]', "request 2"),
        ("a.jsonl", "nothing", "request 1"),
        ("a.jsonl", '{"prompt": 1.5, "output_tokens": 1}', "neither text nor a list of ids"),
        ("a.jsonl", '{"prompt_tokens": 0, "output_tokens": 1}', "below 1"),
        ("a.csv", "prompt_tokens,output_tokens\n3,x\n", "request 1"),
    ],
)
def test_a_bad_file_is_named_with_its_line(
    name: str, text: str, words: str, tmp_path: Path
) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(ValueError, match=words):
        jobs_of(LoadConfig(str(file)))


# Options.


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"request_rate": 0.0}, "request_rate is 0"),
        ({"burstiness": -1.0}, "burstiness is -1"),
        ({"max_concurrency": 0}, "max_concurrency is 0"),
        ({"arrivals": "poisson"}, "must be burst:SIZE or replay"),
        ({"endpoint": "/v1/chat/completions", "prompt_kind": "ids"}, "chat takes only text"),
        ({"base_url": "127.0.0.1:8000"}, "base_url is 127.0.0.1:8000"),
        ({"num_warmups": -1}, "num_warmups is -1"),
        ({"scale_time": -1.0}, "scale_time is -1"),
    ],
)
def test_options_that_cannot_be(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ServeConfig(**flags)


def test_the_server_is_named_by_a_url_or_by_host_and_port() -> None:
    assert ServeConfig().server_url == "http://127.0.0.1:8000"
    assert ServeConfig(host="::1", port=8001).server_url == "http://[::1]:8001"
    assert ServeConfig(base_url="https://h.example", port=1).server_url == "https://h.example"
    with pytest.raises(ValueError, match="port"):
        ServeConfig(port=0)


def test_a_burst_needs_a_rate() -> None:
    with pytest.raises(ValueError, match="rate is inf"):
        plan_load(ServeConfig(load=LoadConfig("fixed:1,1", 3), arrivals="burst:3"), 10)


def test_values_of_flags() -> None:
    assert parse_floats("50,99.9") == (50.0, 99.9)
    with pytest.raises(ValueError, match=r"metric_percentiles.*100"):
        ServeConfig(metric_percentiles=parse_floats("101"))
