"""Structured output over real processes: every kind, streamed and whole, beside plain requests."""

import json
import os
import re
import signal
import threading
from dataclasses import replace
from typing import Any

import jsonschema
import openai
import pytest

from gllm.config.sampling import SamplingParams, StructuredOutput
from gllm.engine.llm import LLM
from gllm.kernels.native.builds import BUILD_VARIABLE, OFF, select_build
from gllm.options.field_types import FieldError
from tests.support.servers.pool import DEMO_TWO_STAGES, share
from tests.support.servers.server import Server, alive, children_titled, serving, wait_until
from tests.text.grammar.test_compiler import HANGS

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "color": {"enum": ["red", "green", "blue"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "friends": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 2},
    },
    "required": ["name", "color", "age", "friends"],
    "additionalProperties": False,
}
MESSAGES = [{"role": "user", "content": "Tell me about Otto the fox."}]
FORMAT = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA}}
KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "regex": ({"regex": "(Otto|Molly) is [0-9]{1,2} years old\\."}, "(Otto|Molly) is \\d+ years.*"),
    "choice": ({"choice": ["the fox", "the owl", "the hedgehog"]}, "the (fox|owl|hedgehog)"),
    "lark": ({"grammar": 'start: "Otto" (" and " NAME)+\nNAME: /[A-Z][a-z]{1,5}/'}, "Otto and .*"),
    "gbnf": ({"grammar": 'root ::= "a fox of " [1-9] " years"'}, "a fox of \\d years"),
    "json": ({"json": {"type": "array", "items": {"type": "boolean"}, "maxItems": 4}}, "\\[.*]"),
    "json as text": ({"json": '{"const": {"a": [1, "b"]}}'}, '{"a":\\[1,"b"]}'),
}


server = share(DEMO_TWO_STAGES)


def ask(server: Server, path: str, **fields: Any) -> Any:
    prompt = {"messages": MESSAGES} if path == CHAT else {"prompt": "Once upon a time"}
    status, answer = server.post(path, {**prompt, "seed": 5, "max_tokens": 120, **fields})
    assert status == 200, answer
    return answer


def test_a_schema_in_openais_shape_streamed_and_whole(server: Server) -> None:
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    given: Any = {"model": "demo", "messages": MESSAGES, "response_format": FORMAT, "seed": 3}
    whole = client.chat.completions.create(**given).choices[0]
    assert whole.finish_reason == "stop"
    value = json.loads(whole.message.content or "")
    jsonschema.validate(value, SCHEMA)
    assert list(value) == list(SCHEMA["properties"]), "in the order of the schema"
    chunks = list(client.chat.completions.create(**given, stream=True))
    parts = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(parts) == whole.message.content
    assert '{"name":"' in parts, "what is forced comes in one piece"
    assert chunks[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_every_kind(server: Server, kind: str, path: str) -> None:
    wanted, pattern = KINDS[kind]
    for choice in ask(server, path, structured_outputs=wanted, n=2)["choices"]:
        text = choice["text"] if path == TEXT else choice["message"]["content"]
        assert re.fullmatch(pattern, text), text
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)


@pytest.mark.full
def test_any_object(server: Server) -> None:
    found = []
    for seed in range(4):
        fields = {"response_format": {"type": "json_object"}, "seed": seed, "max_tokens": 300}
        choice = ask(server, CHAT, **fields)["choices"][0]
        text = choice["message"]["content"]
        assert text.startswith("{")
        if choice["finish_reason"] == "stop":
            found.append(json.loads(text))
    assert all(isinstance(value, dict) for value in found)


def test_the_end_comes_whatever_else_is_asked(server: Server) -> None:
    fixed = {"structured_outputs": {"regex": "one two three four"}, "return_token_ids": True}
    plain = ask(server, TEXT, **fixed)
    tokens = plain["choices"][0]["token_ids"]
    assert plain["usage"]["completion_tokens"] == len(tokens)
    eos = ask(server, TEXT, **fixed, ignore_eos=True)["choices"][0]
    assert (eos["text"], eos["finish_reason"]) == ("one two three four", "stop")
    short = ask(server, TEXT, **{**fixed, "max_tokens": 2})["choices"][0]
    assert (short["token_ids"], short["finish_reason"]) == (tokens[:2], "length")
    cut = ask(server, TEXT, **fixed, stop="thr")["choices"][0]
    assert (cut["text"], cut["stop_reason"]) == ("one two ", "thr")
    stopped = ask(server, TEXT, **fixed, stop_token_ids=[tokens[1]])["choices"][0]
    assert (stopped["token_ids"], stopped["stop_reason"]) == (tokens[:2], tokens[1])


def test_log_probabilities_are_those_of_every_token(server: Server) -> None:
    given = {"structured_outputs": {"choice": ["the fox", "the owl"]}, "return_token_ids": True}
    choice = ask(server, TEXT, **given, logprobs=3)["choices"][0]
    assert choice["text"] in ("the fox", "the owl")
    assert len(choice["logprobs"]["token_logprobs"]) == len(choice["token_ids"])
    assert all(value <= 0 for value in choice["logprobs"]["token_logprobs"])


BAD: list[tuple[str, dict[str, Any]]] = [
    ("response_format", {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}),
    ("response_format", {"type": "json_schema", "json_schema": {"schema": {"type": "text"}}}),
    ("structured_outputs", {"regex": "(a"}),
    ("structured_outputs", {"grammar": "start: nowhere"}),
    ("structured_outputs", {"regex": "(((a{100}){100}){100}){100}"}),
    ("structured_outputs", {"json": {"$ref": "#"}}),
]


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_bad_is_refused_before_the_headers(server: Server, stream: bool) -> None:
    for name, value in BAD:
        body = {"messages": MESSAGES, "stream": stream, name: value}
        status, answer = server.post(CHAT, body)
        assert (status, answer["error"]["param"]) == (400, name), value
    both = {"response_format": FORMAT, "structured_outputs": {"regex": "a"}}
    status, answer = server.post(CHAT, {"messages": MESSAGES, **both})
    assert (status, answer["error"]["param"]) == (400, "structured_outputs")


@pytest.mark.full
def test_a_grammar_that_hangs_holds_nobody_up(server: Server) -> None:
    answers: list[tuple[int, Any]] = []

    def hang() -> None:
        body = {"messages": MESSAGES, "structured_outputs": {"grammar": HANGS}}
        answers.append(server.post(CHAT, body))

    thread = threading.Thread(target=hang)
    thread.start()
    ask(server, TEXT, max_tokens=5)
    thread.join()
    assert answers[0][0] == 400
    assert "too complex" in answers[0][1]["error"]["message"]
    ask(server, TEXT, structured_outputs={"choice": ["next"]})


def test_plain_requests_beside_structured_ones_get_what_they_get_alone(server: Server) -> None:
    alone = [ask(server, TEXT, seed=seed, max_tokens=30)["choices"][0] for seed in range(3)]
    structured = ask(server, CHAT, response_format=FORMAT)["choices"][0]["message"]
    together: dict[int, Any] = {}

    def run(seed: int) -> None:
        if seed < 3:
            together[seed] = ask(server, TEXT, seed=seed, max_tokens=30)["choices"][0]
        else:
            together[seed] = ask(server, CHAT, response_format=FORMAT)["choices"][0]["message"]

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[seed] for seed in range(3)] == alone
    assert all(together[seed] == structured for seed in range(3, 8))


def compiler(server: Server) -> int | None:
    """Process id of the grammar compiler; None if there is none at present."""
    return next(iter(children_titled(server.pid, "gllm-grammar")), None)


def test_a_compiling_process_that_is_killed_is_replaced(server: Server) -> None:
    """No request is lost: one that runs has its grammar, and the next one waits."""
    ask(server, TEXT, structured_outputs={"choice": ["the fox"]})
    killed = compiler(server)
    assert killed is not None
    running = {"structured_outputs": {"regex": "(ab){60}"}, "max_tokens": 200}
    events = server.stream(TEXT, {"prompt": "x", **running})
    text = next(events)["choices"][0]["text"]
    os.kill(killed, signal.SIGKILL)
    (choice,) = ask(server, TEXT, structured_outputs={"choice": ["the owl"]})["choices"]
    assert choice["text"] == "the owl"
    assert text + "".join(event["choices"][0]["text"] for event in events) == "ab" * 60
    assert compiler(server) not in (None, killed)


@pytest.mark.full
def test_the_compiling_process_ends_with_the_server() -> None:
    with serving("demo", "--threads", "1", "--kv-cache-memory", "64MiB") as started:
        ask(started, TEXT, structured_outputs={"choice": ["a"]}, max_tokens=2)
        workers = started.workers()
        assert len(workers) == 2
        started.process.kill()
        wait_until(lambda: not any(alive(pid) for pid in workers))


PROMPTS = [f"Story {i} of Otto the fox. " * 4 for i in range(6)]


@pytest.mark.full
def test_forced_tokens_take_no_steps_and_survive_preemption(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    build = select_build()
    is_batch_invariant = build.name != OFF
    if is_batch_invariant:
        # Named, a build computes everything; otherwise a measurement may prefer torch.
        monkeypatch.setenv(BUILD_VARIABLE, build.name)
    forced = SamplingParams(seed=2, max_tokens=150, structured=StructuredOutput(json=SCHEMA))
    options: dict[str, Any] = {"progress": False, "threads": 1}
    options |= {"max_model_len": 256, "prefix_cache": False}
    with LLM("demo", **options, kv_cache_memory=2**25) as llm:
        engine = llm.engine
        begin = engine.status().stats.steps
        alone = [llm.generate(prompt, forced)[0] for prompt in PROMPTS]
        steps = engine.status().stats.steps - begin
        for output in alone:
            jsonschema.validate(json.loads(output.outputs[0].text), SCHEMA)
        tokens = sum(len(output.outputs[0].token_ids) for output in alone)
        assert steps < 0.8 * tokens
        # Where every token is drawn, each takes a step.
        drawn = [llm.generate(prompt, replace(forced, logprobs=0))[0] for prompt in PROMPTS]
        count = sum(len(output.outputs[0].token_ids) for output in drawn)
        assert engine.status().stats.steps - begin - steps >= count
        with pytest.raises(FieldError, match="contains"):
            llm.generate("x", SamplingParams(structured=StructuredOutput(json={"contains": {}})))
        block = engine.status().kv_cache_bytes // engine.status().num_kv_blocks
    options["expected_output_tokens"] = 0
    with LLM("demo", **options, kv_cache_memory=20 * block) as small:
        crowd = small.generate(PROMPTS, forced)
        assert small.engine.status().stats.preemptions > 0
    for output in crowd:
        jsonschema.validate(json.loads(output.outputs[0].text), SCHEMA)
    if is_batch_invariant:
        assert [one.outputs for one in crowd] == [one.outputs for one in alone]
