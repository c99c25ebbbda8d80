"""Every series of /metrics is there from the start, so that the first increase is seen as one."""

from prometheus_client.parser import text_string_to_metric_families

from gllm.messages.kv_transfer import KvTransferTotals
from gllm.routing.lengths.accuracy import BUCKET_NAMES, LengthAccuracy
from gllm.scheduler.plan import SchedulerStats


async def series(server):
    async with server.client.get("/metrics") as response:
        text = await response.text()
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_all_buckets_of_all_histograms_are_there_before_the_first_step(server):
    server.engine.step_sizes, server.engine.stats = {}, SchedulerStats()
    fresh = await series(server)
    assert {value for (name, *_), value in fresh.items() if name.endswith("_bucket")} == {0}
    assert (await server.chat()).status == 200
    await server.complete(n=3)
    server.engine.step_sizes = {1: 4, 8: 2, 512: 1, 2**20: 5}
    later = await series(server)
    created = {key for key in later if key[0].endswith("_created")}
    assert later.keys() - created == fresh.keys() - created
    sizes = {
        dict(labels)["le"]: value
        for (name, *labels), value in later.items()
        if name == "gllm:iteration_tokens_total_bucket"
    }
    assert [sizes[bound] for bound in ("1.0", "4.0", "8.0", "256.0", "512.0", "16384.0")] == [
        4,
        4,
        6,
        6,
        7,
        7,
    ]
    assert sizes["+Inf"] == 12


async def test_state_slots_are_shown_for_models_with_recurrent_layers(server):
    server.engine.stats = SchedulerStats()
    names = {name for name, *_ in await series(server)}
    assert not any("state_slots" in name for name in names)
    server.engine.stats = SchedulerStats(state_slots=8, used_state_slots=3)
    values = {name: value for (name, *_), value in (await series(server)).items()}
    assert values["gllm:state_slots_total"] == 8
    assert values["gllm:state_slots_used"] == 3


async def test_guesses_are_shown_by_vllm_s_names_with_speculation(server):
    server.engine.stats = SchedulerStats()
    names = {name for name, *_ in await series(server)}
    assert not any("spec_decode" in name for name in names)
    server.engine.stats = SchedulerStats(
        drafts=9, draft_tokens=30, accepted_tokens=12, accepted_per_position=(8, 4)
    )
    found = await series(server)
    values = {name: value for (name, *_), value in found.items()}
    for prefix in ("gllm", "vllm"):
        start = f"{prefix}:spec_decode_num"
        assert values[f"{start}_drafts_total"] == 9
        assert values[f"{start}_draft_tokens_total"] == 30
        assert values[f"{start}_accepted_tokens_total"] == 12
        name = f"{start}_accepted_tokens_per_pos_total"
        positions = [dict(labels)["position"] for key, *labels in found if key == name]
        assert positions == ["0", "1"]


async def test_engines_count_the_blocks_that_they_fetch(server):
    server.engine.kv_transfers = KvTransferTotals(3, 1, 4096, 0.5, 7, 2)
    server.engine.stats = SchedulerStats(
        fetching=2, held_blocks=9, fetched_tokens=64, failed_fetches=5
    )
    values = {name: value for (name, *_), value in (await series(server)).items()}
    assert {
        name: values[f"gllm:kv_{name}"]
        for name in (
            "fetched_bytes_total",
            "fetch_seconds_total",
            "fetched_tokens_total",
            "computed_fetches_total",
            "served_tickets_total",
            "pushed_tickets_total",
            "fetches_running",
            "held_blocks",
        )
    } == {
        "fetched_bytes_total": 4096,
        "fetch_seconds_total": 0.5,
        "fetched_tokens_total": 64,
        "computed_fetches_total": 5,
        "served_tickets_total": 7,
        "pushed_tickets_total": 2,
        "fetches_running": 2,
        "held_blocks": 9,
    }
    outcomes = {
        dict(labels)["outcome"]: value
        for (name, *labels), value in (await series(server)).items()
        if name == "gllm:kv_fetches_total"
    }
    assert outcomes == {"complete": 3, "failed": 1}
    server.engine.kv_transfers = None
    assert not any(name.startswith("gllm:kv_fetch") for name, *_ in await series(server))


async def test_the_accuracy_of_predicted_lengths_is_shown_per_bucket(server):
    names = {name for name, *_ in await series(server)}
    assert not any("length_predict" in name for name in names)
    accuracy = LengthAccuracy()
    for predicted, actual in ((20, 30), (20, 40), (90, 30), (25, 17)):
        accuracy.record(predicted, actual)
    server.engine.length_predictor, server.engine.output_lengths = "nearest", accuracy.rows()
    found = await series(server)
    counts = {
        (dict(labels)["bucket"], dict(labels)["result"]): value
        for (name, *labels), value in found.items()
        if name == "gllm:length_predictions_total"
    }
    assert {key: value for key, value in counts.items() if value} == {
        ("17-32", "right"): 2,
        ("17-32", "long"): 1,
        ("33-64", "short"): 1,
    }
    # Every series is there from the start.
    assert len(counts) == 3 * len(BUCKET_NAMES)
    (info,) = [labels for name, *labels in found if name == "gllm:length_predictor_info"]
    assert dict(info)["predictor"] == "nearest"
