"""Fields that routers, gateways and autoscalers of other projects expect of an engine.

The tables name what they read, and who does. The values come from a server that has answered.
"""

from dataclasses import replace
from datetime import datetime

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gllm.frontend.metrics import ALIASES, VLLM_PREFIX, repeat_with_aliases
from gllm.frontend.routes.registry import ENDPOINTS
from gllm.messages.kv_disk import KvDiskTotals
from tests.frontend.test_plain_routes import get
from tests.support.http.endpoint_bodies import EXAMPLES

PATHS = {
    "GET": ["/v1/models", "/health", "/health/ready", "/metrics", "/version", "/is_sleeping",
            "/server_info", "/v1/loads"],
    "POST": ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages",
             "/v1/messages/count_tokens", "/v1/embeddings", "/v1/chat/completions/render",
             "/v1/completions/render", "/inference/v1/generate", "/tokenize", "/detokenize",
             "/sleep", "/wake_up"],
}  # fmt: skip
"""Paths that llm-d, SMG, production-stack, AIBrix and Dynamo request."""
NUMBER = (int, float)
MODEL_CARD = {"id": str, "object": str, "created": int, "owned_by": str, "root": str,
              "max_model_len": int}  # fmt: skip
"""Of llm-d, SMG and production-stack."""
LOADS = {"timestamp": str, "dp_rank_count": int, "loads": list}
LOAD = {"dp_rank": int, "num_running_reqs": int, "num_waiting_reqs": int,
        "num_waiting_uncached_tokens": int, "num_used_tokens": int, "max_total_num_tokens": int,
        "token_usage": NUMBER, "gen_throughput": NUMBER, "cache_hit_rate": NUMBER,
        "kv_transfer_latency_ms": NUMBER, "prefill_queue_reqs": int, "decode_queue_reqs": int,
        "disagg_mode": str}  # fmt: skip
"""Of SMG, for any engine that it does not know."""
SERVER_INFO = {"version": str, "model_path": str, "served_model_name": str, "tp_size": int,
               "dp_size": int, "max_total_num_tokens": int}  # fmt: skip
"""Of SMG."""
RENDERED = {"request_id": str, "token_ids": list, "sampling_params": dict, "model": str,
            "stream": bool, "priority": int, "features": type(None)}  # fmt: skip
"""Of llm-d's token producer and Dynamo's endpoint picker."""
GENERATED = {"request_id": str, "choices": list}
"""Of llm-d's coordinator and sidecar."""
GAUGES = ["num_requests_waiting", "num_requests_running", "kv_cache_usage_perc",
          "cache_config_info", "lora_requests_info", "gpu_cache_usage_perc"]  # fmt: skip
COUNTERS = ["gpu_prefix_cache_hits", "gpu_prefix_cache_queries", "prefix_cache_hits",
            "prefix_cache_queries", "request_success", "prompt_tokens", "generation_tokens",
            "num_preemptions"]  # fmt: skip
HISTOGRAMS = ["request_prompt_tokens", "request_generation_tokens", "time_to_first_token_seconds",
              "time_per_output_token_seconds", "inter_token_latency_seconds",
              "e2e_request_latency_seconds", "request_queue_time_seconds",
              "request_prefill_time_seconds", "request_decode_time_seconds",
              "request_inference_time_seconds"]  # fmt: skip
"""Metrics after `vllm:`, of llm-d, production-stack, AIBrix and autoscalers."""


def has(value, table):
    """Return the names of a table whose values are absent or of another type."""
    return {n: value.get(n, "absent") for n, t in table.items() if not isinstance(value.get(n), t)}


def test_paths():
    paths = {(one.method, one.path) for one in ENDPOINTS if not one.unsupported_reason}
    assert {(method, path) for method, some in PATHS.items() for path in some} <= paths


async def test_models(server):
    _, body = await get(server, "/v1/models")
    (card,) = body["data"]
    assert has(card, MODEL_CARD) == {}
    assert (card["root"], card["max_model_len"]) == ("fake/model", 256)


async def test_probes(server):
    assert await get(server, "/health/ready") == await get(server, "/ready")
    assert isinstance((await get(server, "/version"))[1]["version"], str)
    assert has((await get(server, "/server_info"))[1], SERVER_INFO) == {}
    server.engine.state = "loading"
    assert (await get(server, "/health/ready"))[0] == 503


async def test_loads(server):
    status, body = await get(server, "/v1/loads?include=core,disagg,queues,memory")
    assert (status, has(body, LOADS), body["dp_rank_count"]) == (200, {}, 1)
    assert datetime.fromisoformat(body["timestamp"]).tzinfo is not None
    (load,) = body["loads"]
    assert has(load, LOAD) == {}
    assert (load["num_running_reqs"], load["num_waiting_reqs"]) == (2, 1)
    assert (load["num_used_tokens"], load["max_total_num_tokens"]) == (256, 1024)
    assert load["token_usage"] == 0.25


async def test_rendered_requests_run_as_the_request_itself(server):
    for path, pick in (("/v1/chat/completions", dict), ("/v1/completions", lambda some: some[0])):
        body = {**EXAMPLES[path], "max_tokens": 5, "seed": 7, "temperature": 0.5, "n": 2}
        rendered = pick((await server.post(f"{path}/render", body)).json)
        assert has(rendered, RENDERED) == {}
        assert server.engine.calls == []
        generated = await server.post("/inference/v1/generate", rendered)
        assert (generated.status, has(generated.json, GENERATED)) == (200, {})
        direct = await server.post(path, {**body, "return_token_ids": True})
        first, second = server.engine.calls
        # Tokens are generated the same; only the text of a chat stands alone.
        params = replace(second.params, continues_prompt=True)
        assert (first.prompt, first.params) == (second.prompt, params)
        token_ids = [choice["token_ids"] for choice in direct.json["choices"]]
        assert [choice["token_ids"] for choice in generated.json["choices"]] == token_ids
        assert generated.json["request_id"] == rendered["request_id"]
        server.engine.calls.clear()


async def scrape(server):
    """Return the metric families with vLLM's prefix and without, by name."""
    async with server.client.get("/metrics") as response:
        families = list(text_string_to_metric_families(await response.text()))
    return {one.name: one for one in families}


async def test_metrics(server):
    await server.chat(n=2, max_tokens=5)
    families = await scrape(server)
    kinds = {"gauge": GAUGES, "counter": COUNTERS, "histogram": HISTOGRAMS}
    for kind, names in kinds.items():
        assert {n: families[VLLM_PREFIX + n].type for n in names} == dict.fromkeys(names, kind)
    assert all(
        sample.labels["model_name"] == "fake/model"
        for name, family in families.items()
        if name.startswith(VLLM_PREFIX)
        for sample in family.samples
    )
    (cache,) = families["vllm:cache_config_info"].samples
    assert (cache.labels["block_size"], cache.labels["num_gpu_blocks"]) == ("16", "64")
    (adapters,) = families["vllm:lora_requests_info"].samples
    labels = {"max_lora": "0", "running_lora_adapters": "", "waiting_lora_adapters": ""}
    assert adapters.labels == {**labels, "model_name": "fake/model"}
    assert adapters.value > 1.7e9


async def test_metrics_have_the_values_of_their_own_names(server):
    await server.chat(n=2, max_tokens=5)
    await server.complete(max_tokens=1)
    # With speculation: its metrics exist.
    server.engine.stats = server.engine.stats._replace(drafts=3, accepted_per_position=(2, 1))
    # As those of the disk tier do.
    server.engine.kv_disk = KvDiskTotals(num_queried_tokens=5, num_hit_tokens=3)
    families = await scrape(server)
    assert len(ALIASES) > 20

    def values(name):
        samples = families[name].samples
        return {
            (one.name.removeprefix(name), *sorted(one.labels.items())): one.value
            for one in samples
            if not one.name.endswith("_created")
        }

    for own, names in ALIASES.items():
        assert values(f"gllm:{own}"), own
        for name in names:
            assert values(f"vllm:{name}") == values(f"gllm:{own}")
    tokens = {key[0]: value for key, value in values("vllm:request_generation_tokens").items()}
    assert (tokens["_count"], tokens["_sum"]) == (3, 11)
    prompts = {key[0]: value for key, value in values("vllm:request_prompt_tokens").items()}
    assert prompts["_count"] == 2
    assert prompts["_sum"] == sum(len(call.prompt) for call in server.engine.calls)


def test_only_names_of_metrics_are_replaced():
    text = (
        "# HELP gllm:prompt_tokens_total Like gllm:prompt_tokens\n"
        "# TYPE gllm:prompt_tokens_total counter\n"
        'gllm:prompt_tokens_total{model_name="gllm:prompt_tokens"} 7.0\n'
        "# HELP gllm:prompt_tokens_created When\n"
        "# TYPE gllm:prompt_tokens_created gauge\n"
        'gllm:prompt_tokens_created{model_name="m"} 1.7e9\n'
        "# HELP gllm:epoch Not vLLM's\n"
        "gllm:epoch 1.0\n"
    )
    assert repeat_with_aliases(text) == (
        "# HELP vllm:prompt_tokens_total Like gllm:prompt_tokens\n"
        "# TYPE vllm:prompt_tokens_total counter\n"
        'vllm:prompt_tokens_total{model_name="gllm:prompt_tokens"} 7.0\n'
    )


@pytest.mark.parametrize("path", [path for path in PATHS["POST"] if path in EXAMPLES])
async def test_request_ids_are_echoed(server, path):
    answer = await server.post(path, EXAMPLES[path], headers={"x-request-id": "abc-1"})
    assert (answer.status, answer.headers["x-request-id"]) == (200, "abc-1")
