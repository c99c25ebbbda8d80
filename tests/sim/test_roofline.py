"""The roofline against numbers by hand, its bounds, and what Vidur measured."""

from dataclasses import replace
from math import hypot
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.stage_work import StageWork
from gllm.sim.costs import operators
from gllm.sim.costs.roofline import DeviceEfficiency, RooflineCostModel
from gllm.sim.deployment import roofline_deployment
from gllm.sim.hardware.devices import DEVICES, DeviceSpec, NetworkLink
from gllm.sim.hardware.shapes import MODELS, ModelShape, RecurrentShape
from gllm.sim.hardware.stages import PipelineSpec, StageSpec, build_hardware, split_layers_evenly

PEAK = DeviceEfficiency(1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0)
TINY = ModelShape(layers=4, hidden=8, heads=2, kv_heads=1, mlp=16, vocabulary=10, head_dim=4)
SLOW = DeviceSpec(flops=1000.0, bandwidth=100.0, memory=1e6)
LAYER = 8 * 4 * (2 * 2 + 2 * 1) + 3 * 8 * 16
"""Weights of a layer of TINY: Q and O of two heads, K and V of one, gate, up and down."""
ELEMENTWISE = 2 * (10 * 8 + 3 * 16 + 2 * 3 * 4) + 2 * 2 * 4 * 2
"""Bytes per token that element-wise operators of a layer of TINY read and write."""
ATTENTION = operators.ATTENTION[:2]


def prefill(*chunks: tuple[int, int], samples: int = 0) -> StageWork:
    return StageWork(0, sum(tokens for _, tokens in chunks), chunks, 0, 0, samples)


def decode(count: int, context: int) -> StageWork:
    return StageWork(0, count, (), count, count * context, count)


def tiny(*layers: int, efficiency: DeviceEfficiency = PEAK) -> RooflineCostModel:
    stages = tuple(StageSpec(count, SLOW) for count in layers)
    links = (NetworkLink(50.0, 0.25),) * (len(layers) - 1)
    shape = replace(TINY, layers=sum(layers))
    return RooflineCostModel(PipelineSpec(shape, stages, links), efficiency)


# By hand.


def test_a_chunk_by_hand() -> None:
    """Three tokens after five: 6 + 7 + 8 pairs, eight keys and values read."""
    matrices = hypot(2 * 3 * LAYER / 1000, 2 * LAYER / 100)
    attention = hypot(21 * 2 * (4 + 4) * 2 / 1000, 8 * 2 * 4 * 2 / 100)
    layer = matrices + attention + 3 * ELEMENTWISE / 100
    assert tiny(2, 2).stage_seconds(0, prefill((5, 3))) == pytest.approx(2 * layer)


def test_decodes_by_hand() -> None:
    """Two decodes attend to ten tokens each; the last stage has the LM head."""
    matrices = hypot(2 * 2 * LAYER / 1000, 2 * LAYER / 100)
    attention = hypot(20 * 2 * (4 + 4) * 2 / 1000, 20 * 2 * 4 * 2 / 100)
    head = hypot(2 * 2 * 80 / 1000, 2 * 80 / 100)
    layer = matrices + attention + 2 * ELEMENTWISE / 100
    cost = tiny(3, 1)
    assert cost.stage_seconds(0, decode(2, 10)) == pytest.approx(3 * layer)
    assert cost.stage_seconds(1, decode(2, 10)) == pytest.approx(layer + head)


def test_decodes_and_chunks_share_the_weights() -> None:
    """Of what both take alone, only the matrices are common."""
    both = StageWork(0, 5, ((5, 3),), 2, 20, 0)
    cost = tiny(1, 1)
    alone = [cost.stage_seconds(0, work) for work in (prefill((5, 3)), decode(2, 10))]
    matrices = [hypot(2 * rows * LAYER / 1000, 2 * LAYER / 100) for rows in (3, 2, 5)]
    expected = sum(alone) - matrices[0] - matrices[1] + matrices[2]
    assert cost.stage_seconds(0, both) == pytest.approx(expected)


def test_recurrences_by_hand() -> None:
    """Three of four layers have states: each is read and written once per sequence and step."""
    recurrent = RecurrentShape(num_layers=3, state_bytes=400, flops=700)
    shape = replace(TINY, recurrent=recurrent, kv_share=1.0)
    stages = StageSpec(4, SLOW), StageSpec(4, SLOW)
    layers = replace(TINY, layers=8), replace(shape, layers=8)
    links = (NetworkLink(50.0, 0.25),)
    costs = [RooflineCostModel(PipelineSpec(each, stages, links), PEAK) for each in layers]
    for work, sequences in ((decode(2, 10), 2), (prefill((5, 3)), 1), (prefill((0, 3), (5, 4)), 2)):
        without, found = (cost.stage_seconds(0, work) for cost in costs)
        # Means over the eight layers.
        compute = work.num_tokens * (700 * 3 // 8) / 1000
        traffic = 2 * sequences * (400 * 3 // 8) / 100
        assert found - without == pytest.approx(4 * hypot(compute, traffic))
        more = layers[1].step_flops(work) - layers[0].step_flops(work)
        assert more == 8 * work.num_tokens * (700 * 3 // 8)
    halves = replace(shape, kv_heads=2).shard(2)
    assert (halves.state_bytes, halves.state_flops) == (200 * 3 // 4, 350 * 3 // 4)


def test_efficiencies_scale_the_device() -> None:
    half = tiny(2, 2, efficiency=replace(PEAK, compute=0.5, memory=0.5, attention=0.5))
    assert half.stage_seconds(0, prefill((5, 3))) == pytest.approx(
        2 * tiny(2, 2).stage_seconds(0, prefill((5, 3)))
    )
    overheads = {"stage_overhead": 3.0, "plan_overhead": 5.0, "return_overhead": 7.0}
    late = tiny(2, 2, efficiency=replace(PEAK, **overheads))
    work = decode(2, 10)
    assert late.stage_seconds(0, work) == pytest.approx(tiny(2, 2).stage_seconds(0, work) + 3)
    assert (late.plan_seconds(work), late.sample_seconds(work), late.return_seconds(work)) == (
        5,
        7,
        7,
    )


def test_a_link_carries_one_tensor() -> None:
    assert tiny(2, 2).activation_transfer(0, prefill((5, 3))) == (3 * 8 * 2 / 50, 0.25, 48)


def test_the_lm_head_is_on_the_last_stage_over_sampled_rows() -> None:
    cost = tiny(1, 1, 1)
    for samples in (1, 4):
        work = prefill((0, 6), samples=samples)
        first, middle, last = (cost.stage_seconds(stage, work) for stage in range(3))
        assert first == middle
        assert last - first == pytest.approx(hypot(2 * samples * 80 / 1000, 2 * 80 / 100))
    assert len({cost.stage_seconds(stage, prefill((0, 6))) for stage in range(3)}) == 1


# Bounds and order.


@pytest.mark.parametrize("device", ["L20", "L40", "RTX4090", "V100"])
@pytest.mark.parametrize("model", MODELS)
def test_no_step_is_faster_than_the_device(model: str, device: str) -> None:
    shape, hardware = MODELS[model], DEVICES[device]
    one, chunk = decode(1, 1000), prefill((0, 4096))
    weights = shape.weights_of_layers(0, shape.layers) + shape.head_weights
    if shape.experts:
        # A single token reads the experts that it is sent to.
        unread = shape.experts.num_experts - shape.experts.num_active
        num_sparse = shape.layers - shape.num_dense_layers
        weights -= num_sparse * unread * shape.expert_weights
    read = shape.bytes_per_weight * weights + shape.layers * 1000 * shape.kv_bytes
    for efficiency in (None, PEAK):
        cost = RooflineCostModel(build_hardware(model, device, 4), efficiency)
        one_seconds = sum(cost.stage_seconds(stage, one) for stage in range(4))
        assert one_seconds >= read / hardware.bandwidth
        chunk_seconds = sum(cost.stage_seconds(stage, chunk) for stage in range(4))
        assert chunk_seconds >= shape.step_flops(chunk) / hardware.flops
    # At the peaks a long prefill is arithmetic and a decode is memory traffic, or nearly.
    # A mixture has no dense layers, or few.
    elementwise = max(map(shape.elementwise_bytes, (False, True))) * 4096 * shape.layers
    limit = 1.25 * shape.step_flops(chunk) / hardware.flops + elementwise / hardware.bandwidth
    assert chunk_seconds <= limit
    assert one_seconds <= 1.05 * read / hardware.bandwidth


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("model", MODELS)
def test_no_micro_batch_undercuts_the_least(model: str, degree: int) -> None:
    cost = RooflineCostModel(build_hardware(model, "H100", 2, degrees=(degree,)))
    works = [
        decode(1, 1),
        decode(2, 1),
        decode(64, 500),
        prefill((0, 2)),
        prefill((9, 512)),
        prefill((0, 2), samples=0),
    ]
    for stage in range(2):
        least = cost.min_stage_seconds(stage)
        assert 0 < least <= min(cost.min_stage_seconds(stage, work) for work in works)
        assert all(
            cost.min_stage_seconds(stage, work) <= cost.stage_seconds(stage, work) for work in works
        )


CHUNKS = st.lists(st.tuples(st.integers(0, 4000), st.integers(2, 2000)), min_size=1, max_size=4)


@given(CHUNKS, st.integers(0, 60), st.integers(1, 4000), st.integers(1, 500), st.integers(0, 1))
def test_more_work_takes_longer(
    chunks: list[tuple[int, int]], decodes: int, context: int, more: int, stage: int
) -> None:
    cost = RooflineCostModel(build_hardware("qwen2.5-14b", "L20", 2))

    def seconds(chunks: list[tuple[int, int]], decodes: int, context: int) -> float:
        tokens = decodes + sum(tokens for _, tokens in chunks)
        return cost.stage_seconds(
            stage, StageWork(0, tokens, tuple(chunks), decodes, decodes * context, 1)
        )

    now = seconds(chunks, decodes, context)
    assert cost.min_stage_seconds(stage) < now
    (start, tokens), rest = chunks[0], chunks[1:]
    assert seconds([(start, tokens + more), *rest], decodes, context) > now
    assert seconds([(start + more, tokens), *rest], decodes, context) > now
    assert seconds([*chunks, (start, tokens)], decodes, context) > now
    assert seconds(chunks, decodes + more, context) > now
    assert (seconds(chunks, decodes, context + more) > now) == (decodes > 0)


# Shapes and deployments.


@pytest.mark.parametrize(
    ("model", "billions", "kv_kilobytes"),
    [
        ("qwen2.5-0.5b", 0.494, 12),
        ("qwen2.5-7b", 7.62, 56),
        ("qwen2.5-14b", 14.77, 192),
        ("qwen2.5-32b", 32.76, 256),
        ("llama-3.1-8b", 8.03, 128),
        ("llama-3.1-70b", 70.55, 320),
        ("llama-100b", 100, 120),
    ],
)
def test_models_have_their_known_sizes(model: str, billions: float, kv_kilobytes: int) -> None:
    shape = MODELS[model]
    assert shape.parameters / 1e9 == pytest.approx(billions, rel=0.005)
    assert shape.layers * shape.kv_bytes == kv_kilobytes * 1024


def test_stages_hold_all_weights() -> None:
    shape = MODELS["qwen2.5-14b"]
    for stages in (1, 3, 4):
        layers = split_layers_evenly(shape.layers, stages)
        held = [shape.stage_bytes(stage, layers) for stage in range(stages)]
        assert sum(held) == 2 * shape.parameters


@pytest.mark.parametrize(
    ("layers", "stages", "expected"),
    [
        (48, 4, [12, 12, 12, 12]),
        (30, 4, [7, 8, 8, 7]),
        (7, 3, [2, 3, 2]),
        (29, 4, [7, 8, 7, 7]),
        (31, 4, [8, 8, 8, 7]),
        (5, 2, [3, 2]),
        (24, 1, [24]),
        (3, 3, [1, 1, 1]),
    ],
)
def test_layers_are_cut_evenly(layers: int, stages: int, expected: list[int]) -> None:
    assert split_layers_evenly(layers, stages) == expected


@given(st.integers(1, 100), st.integers(1, 100))
def test_no_layer_is_lost(layers: int, stages: int) -> None:
    if stages > layers:
        with pytest.raises(ValueError, match=f"{layers} layers cannot be cut into {stages} stages"):
            split_layers_evenly(layers, stages)
        return
    counts = split_layers_evenly(layers, stages)
    assert (len(counts), sum(counts)) == (stages, layers)
    assert max(counts) - min(counts) <= 1


def test_the_cache_is_what_the_fullest_stage_leaves() -> None:
    deployment = roofline_deployment("llama-3.1-8b", "L20", 2, 4096)
    assert deployment.layers == [16, 16]
    room = 0.9 * 48e9 - 2 * (16 * MODELS["llama-3.1-8b"].layer_weights + 4096 * 128256)
    assert deployment.scheduler.num_blocks == room // (16 * 16 * 4096)
    assert deployment.scheduler.stages == 2
    larger = SchedulerConfig(block_size=32, policy="sarathi")
    halved = roofline_deployment("llama-3.1-8b", "L20", 2, 4096, scheduler=larger).scheduler
    assert halved.num_blocks == deployment.scheduler.num_blocks // 2
    assert halved.policy == "sarathi"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "gpt-5"}, "model 'gpt-5' is none of qwen2.5-0.5b, .*llama-100b"),
        ({"device": "B200"}, "device 'B200' is none of L20, .*H200"),
        ({"link": "rope"}, "link 'rope' is none of pcie, network, nvlink"),
        ({"model": "llama-100b"}, "llama-100b does not fit 4 x L20: .* 200 GB, .*; raise --pp"),
        ({"stages": 49}, "48 layers cannot be cut into 49 stages"),
        ({"stages": 0}, "cannot be cut into 0 stages"),
        ({"max_model_len": 10**7}, "max_model_len 10000000 needs .*lower --max-model-len"),
    ],
)
def test_what_cannot_be_deployed_says_why(options: dict[str, Any], message: str) -> None:
    known: dict[str, Any] = {
        "model": "qwen2.5-14b",
        "device": "L20",
        "stages": 4,
        "max_model_len": 8192,
    }
    with pytest.raises(ValueError, match=message):
        roofline_deployment(**known | options)


# Against measurements.


def test_the_rounded_corner_is_closer_to_vidurs_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """All token-level operators of a layer of Llama-2-70B, 1 to 4,096 tokens."""
    samples = operators.token_samples(*ATTENTION, 1)
    samples.pop("emb")
    # Two residuals in each layer, one of each other operator.
    measured = sum(sample.milliseconds for sample in samples.values()) + samples["add"].milliseconds
    tokens = samples["add"].features[:, 0]
    assert (tokens.min(), tokens.max()) == (1, 4096)
    device = replace(DEVICES["A100-80G"], launch_seconds=0.0)
    shape = replace(MODELS["llama-2-70b"], layers=1)
    efficiency = DeviceEfficiency(stage_overhead=0.0)
    cost = RooflineCostModel(PipelineSpec(shape, (StageSpec(1, device),)), efficiency)

    def error() -> float:
        works = [StageWork(0, int(count), (), 0, 0, 0) for count in tokens]
        predicted = np.array([cost.stage_seconds(0, work) * 1e3 for work in works])
        return float(np.mean(np.abs(predicted - measured) / measured))

    rounded = error()
    assert rounded < 0.08
    monkeypatch.setattr("gllm.sim.costs.roofline.hypot", max)
    assert rounded < error() - 0.02
