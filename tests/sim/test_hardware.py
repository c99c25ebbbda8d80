"""Simulated hardware: published sizes of models, memory of stages, unequal devices and links."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gllm.commands.simulate import main
from gllm.scheduler.stage_work import StageWork
from gllm.sim.costs.roofline import CollectiveTable, RooflineCostModel, all_reduce_seconds
from gllm.sim.deployment import roofline_deployment
from gllm.sim.hardware.devices import DEVICES, LINKS, NetworkLink, find_link, name_link
from gllm.sim.hardware.shapes import MODELS, ExpertsShape, LatentShape, ModelShape
from gllm.sim.hardware.stages import PipelineSpec, StageSpec, build_hardware

PUBLISHED = {
    "llama-2-7b": (6.74, 512),
    "llama-2-13b": (13.02, 800),
    "llama-2-70b": (68.98, 320),
    "llama-3-8b": (8.03, 128),
    "llama-3-70b": (70.55, 320),
    "llama-30b": (32.53, 1560),
    "codellama-34b": (33.74, 192),
    "qwen-72b": (72.29, 2560),
    "internlm-20b": (20.09, 1200),
    "opt-13b": (12.85, 800),
    "opt-30b": (29.97, 1344),
    "opt-66b": (65.7, 2304),
    "opt-175b": (174.6, 4608),
    "bloom-176b": (176.25, 3920),
    "mixtral-8x7b": (46.70, 128),
    "deepseek-v2-lite": (15.71, 30.375),
    "deepseek-v3": (671.03, 68.625),
}
"""Parameters in billions, as the model cards and papers state them, and KiB of KV cache per token:
800 KB for OPT-13B in vLLM (arXiv 2309.06180), 70.272 KB for DeepSeek-V3 (arXiv 2505.09343)."""


def decode(count: int, context: int) -> StageWork:
    return StageWork(0, count, (), count, count * context, count)


# Models.


@pytest.mark.parametrize("model", PUBLISHED)
def test_models_have_their_published_sizes(model: str) -> None:
    billions, kv_kibibytes = PUBLISHED[model]
    shape = MODELS[model]
    assert shape.parameters / 1e9 == pytest.approx(billions, rel=0.002)
    assert shape.layers * shape.kv_bytes == kv_kibibytes * 1024


@pytest.mark.parametrize(
    ("model", "billions"), [("mixtral-8x7b", 12.9), ("deepseek-v3", 37.0), ("llama-2-7b", 6.74)]
)
def test_a_token_passes_the_published_number_of_weights(model: str, billions: float) -> None:
    """A mixture sends each token to few of its experts; the LM head included."""
    shape = MODELS[model]
    flops = shape.step_flops(StageWork(0, 1, (), 0, 0, 1))
    # The embedding is a look-up.
    assert flops / 2e9 + shape.head_weights / 1e9 == pytest.approx(billions, rel=0.02)


def test_flops_of_a_step_by_hand() -> None:
    """Vidur's formula: two per token and weight, four per layer, head, dimension and pair."""
    shape = ModelShape(3, 8, 2, 1, 16, 10, head_dim=4)
    weights = 3 * (8 * 4 * (2 * 2 + 2 * 1) + 3 * 8 * 16)
    work = StageWork(0, 5, ((7, 4),), 1, 20, 2)
    pairs = 8 + 9 + 10 + 11 + 20
    expected = 2 * 5 * weights + 2 * 2 * 80 + 4 * 3 * 2 * 4 * pairs
    assert shape.step_flops(work) == pytest.approx(expected)
    ungated = replace(shape, gated=False)
    assert shape.step_flops(work) - ungated.step_flops(work) == 2 * 5 * 3 * 8 * 16


def test_latent_attention_by_hand() -> None:
    """Prefills expand keys and values, decodes attend to the compressed vectors."""
    latent = LatentShape(kv_rank=6, rope_dim=2, nope_dim=4, value_dim=4)
    shape = ModelShape(1, 8, 2, 2, 16, 10, head_dim=4, latent=latent)
    assert shape.kv_bytes == 2 * (6 + 2)
    # Queries of two heads; compression; keys and values of two heads; output.
    assert shape.attention_weights == 8 * 2 * 6 + 8 * 8 + 6 * 2 * 8 + 2 * 4 * 8
    assert shape.prefill_pair_flops == 2 * 2 * (6 + 4)
    assert shape.decode_pair_flops == 2 * 2 * (8 + 6)
    compressed = replace(shape, latent=replace(latent, query_rank=5))
    assert compressed.attention_weights - shape.attention_weights == 5 * (8 + 12) - 8 * 12


@given(st.integers(1, 64), st.data(), st.integers(1, 500))
def test_a_batch_reads_the_experts_that_its_tokens_pass(
    num_experts: int, data: st.DataObject, num_tokens: int
) -> None:
    num_active = data.draw(st.integers(1, num_experts))
    experts = ExpertsShape(num_experts, num_active, 16)
    read = experts.expected_experts(num_tokens)
    assert experts.expected_experts(1) == pytest.approx(num_active)
    assert num_active <= read * (1 + 1e-9)
    assert read <= min(num_experts, num_active * num_tokens) * (1 + 1e-9)
    assert experts.expected_experts(num_tokens + 1) >= read


def test_dense_layers_are_the_first_ones() -> None:
    shape = MODELS["deepseek-v3"]
    counts = [shape.count_dense_layers(first, 2) for first in (0, 2, 4)]
    assert counts == [2, 1, 0]
    cut = [2, 2, 57]
    assert sum(shape.stage_bytes(stage, cut) for stage in range(3)) == shape.parameters
    assert MODELS["llama-3-8b"].count_dense_layers(30, 2) == 2


def test_a_small_batch_of_a_mixture_reads_less() -> None:
    hardware = build_hardware("mixtral-8x7b", "H200", 1)
    cost = RooflineCostModel(hardware)
    one, eight, many = (cost.stage_seconds(0, decode(count, 100)) for count in (1, 8, 64))
    assert many - eight < eight - one


def test_fewer_bytes_per_weight_leave_more_cache_and_take_less_time() -> None:
    hardware = build_hardware("qwen2.5-32b", "L20", 4)
    halved = replace(hardware, model=replace(hardware.model, bytes_per_weight=1.0))
    assert halved.rank_weight_bytes(1) == hardware.rank_weight_bytes(1) / 2
    assert min(halved.stage_kv_blocks(16, 0.9)) > min(hardware.stage_kv_blocks(16, 0.9))
    seconds = [
        RooflineCostModel(each).stage_seconds(1, decode(1, 100)) for each in (hardware, halved)
    ]
    assert seconds[1] < 0.6 * seconds[0]
    # Four bits: a model of 70B on one device.
    quantized = roofline_deployment("llama-3-70b", "L40", 1, 2048, bytes_per_weight=0.5)
    weight_bytes = MODELS["llama-3-70b"].parameters / 2
    assert quantized.scheduler.num_blocks == (0.9 * 48e9 - weight_bytes) // (80 * 4096 * 16)


# Memory.


@pytest.mark.parametrize(
    ("model", "tp", "pp", "blocks"),
    [
        ("llama-3-8b", 1, 1, 26674),
        ("llama-3-8b", 1, 2, 61006),
        ("llama-3-8b", 2, 1, 61006),
        ("llama-3-8b", 2, 2, 129671),
        ("qwen2.5-14b", 1, 1, 13498),
        ("qwen2.5-14b", 1, 2, 36386),
        ("qwen2.5-14b", 2, 1, 36386),
        ("qwen2.5-14b", 2, 2, 82162),
        ("opt-13b", 1, 1, 3532),
        ("opt-13b", 1, 2, 8984),
        ("opt-13b", 2, 1, 9023),
        ("opt-13b", 2, 2, 19967),
    ],
)
def test_kv_blocks_are_those_by_hand(model: str, tp: int, pp: int, blocks: int) -> None:
    """Vidur's rule, with embedding and LM head: 90 % of 80 GB less the weights of the fuller stage.

    Llama-3-8B on one GPU: 72e9 bytes less 2 x (32 x 218,103,808 + 2 x 525,336,576) of weights, over
    4 x 1,024 x 32 x 16 per block. OPT's embedding is its LM head, which two stages store twice.
    """
    deployment = roofline_deployment(model, "A100-80G", pp, 2048, degrees=(tp,))
    assert deployment.scheduler.num_blocks == blocks


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "opt-66b", "stages": 1}, "opt-66b does not fit 1 x A100-80G: .* 131 GB"),
        ({"max_model_len": 10**6}, "max_model_len 1000000 needs .*lower --max-model-len"),
        ({"layers": (20, 10)}, r"30 layers in total \(num_layers: 20,10\), the model 32"),
        ({"layers": (16, 8, 8)}, "layers 16,8,8 has to be one number for each of the 2 stages"),
        ({"layers": (32, 0)}, "0 layers .*have to be at least 1"),
        ({"device": "L20,L40,A40"}, "device 'L20,L40,A40' has to be one name, or 2 separated by"),
        ({"link": "pcie,network"}, "link 'pcie,network' has to be one name, or 1 separated by"),
        ({"rank_link": "pcie,rope"}, "link 'rope' is none of pcie"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], message: str) -> None:
    usual: dict[str, Any] = {
        "model": "llama-3-8b", "device": "A100-80G", "stages": 2, "max_model_len": 2048,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        roofline_deployment(**usual | options)


def test_links_have_names_or_rates() -> None:
    hardware = build_hardware("llama-3-8b", "L20", 3, "pcie,25gbit+0.1ms", (1, 2, 1), "8gbit")
    assert hardware.links == (LINKS["pcie"], NetworkLink(25e9 / 8, 0.1e-3))
    assert hardware.stages[1].rank_link == NetworkLink(1e9, 0.0)
    for name, link in LINKS.items():
        assert find_link("link", name) == link
        found = find_link("link", name_link(link.bandwidth * 8 / 1e9, link.latency * 1e3))
        assert (found.bandwidth, found.latency) == (link.bandwidth, link.latency)
    assert name_link(25, 0.1) == "25gbit+0.1ms"
    for wrong in ("0gbit", "25gbit+ms", "25", "-1gbit", "1e3gbit", "25gbit+0.1ms,pcie"):
        with pytest.raises(ValueError, match=r"link '.*' is none of pcie, .* no rate with a delay"):
            find_link("link", wrong)


def test_a_pipeline_checks_its_parts() -> None:
    shape, device, link = MODELS["llama-3-8b"], DEVICES["L20"], LINKS["pcie"]
    half = StageSpec(16, device)
    with pytest.raises(ValueError, match=r"2 stages need 1 links between them \(links\), not 0"):
        PipelineSpec(shape, (half, half))
    with pytest.raises(ValueError, match="plan_links needs one link per stage: 2, not 1"):
        PipelineSpec(shape, (half, half), (link,), (link,))
    with pytest.raises(ValueError, match="a stage of 2 ranks needs a link between them"):
        StageSpec(16, device, tp=2)


# Unequal stages.


def test_stages_may_differ_in_devices_layers_ranks_and_links() -> None:
    hardware = build_hardware(
        "qwen2.5-32b", "L20,A100-40G,L20", 3, "pcie,network", (1, 2, 1), "pcie,nvlink,pcie",
        (12, 40, 12),
    )  # fmt: skip
    assert hardware.layer_counts == [12, 40, 12]
    assert hardware.peak_flops == 2 * 119.5e12 + 2 * 312e12
    assert hardware.power == 2 * 275 + 2 * 400
    assert hardware.price is None
    assert build_hardware("qwen2.5-32b", "A100-40G", 3).price == 3 * 2.21
    # The driver is beside the first stage; the result returns from the last one.
    assert hardware.plan_links == (None, LINKS["pcie"], LINKS["network"])
    assert hardware.return_link == LINKS["network"]
    cost, work = RooflineCostModel(hardware), decode(4, 100)
    sizes = 4 * 5120 * 2
    assert cost.activation_transfer(0, work) == (sizes / 20.79e9, 10e-6, sizes)
    assert cost.activation_transfer(1, work) == (sizes / (73.28e9 / 8), 50e-6, sizes)
    plan = 4 * (64 + 4)
    assert cost.plan_transfer(0, work) == (0, 0, 0)
    assert cost.plan_transfer(2, work) == (plan / (73.28e9 / 8), 50e-6, plan)
    assert cost.return_transfer(work) == (16 / (73.28e9 / 8), 50e-6, 16)
    # Each layer takes as long as in a pipeline of equal stages.
    alone = build_hardware("qwen2.5-32b", "A100-40G", 1, degrees=(2,), rank_link="nvlink")
    parts, all_parts = (
        RooflineCostModel(each).operator_seconds(stage, work)
        for each, stage in ((hardware, 1), (alone, 0))
    )
    for name in ("matrices", "attention", "elementwise", "launch"):
        assert parts[name] == pytest.approx(all_parts[name] * 40 / 64)


def test_the_smallest_stage_limits_the_cache() -> None:
    hardware = build_hardware("llama-3-8b", "L20,A100-80G", 2, layers=(20, 12))
    blocks = hardware.stage_kv_blocks(16, 0.9)
    assert blocks[0] < blocks[1]
    deployment = roofline_deployment("llama-3-8b", "L20,A100-80G", 2, 2048, layers=(20, 12))
    assert deployment.scheduler.num_blocks == blocks[0]
    assert deployment.layers == [20, 12]
    assert deployment.peak_flops == 119.5e12 + 312e12


@pytest.mark.parametrize("model", ["llama-3-8b", "mixtral-8x7b", "deepseek-v2-lite"])
def test_classes_of_operators_add_up(model: str) -> None:
    hardware = build_hardware(model, "A100-80G,H100", 2, degrees=(2, 1), rank_link="nvlink")
    cost = RooflineCostModel(hardware)
    for work in (decode(1, 10), StageWork(0, 700, ((100, 600),), 100, 9000, 101)):
        for stage in range(2):
            parts = cost.operator_seconds(stage, work)
            assert min(parts.values()) >= 0
            assert sum(parts.values()) == pytest.approx(cost.stage_seconds(stage, work))
            assert (parts["collectives"] > 0) == (stage == 0)
            assert ("lm_head" in parts) == (stage == 1)


def test_a_host_limits_small_layers() -> None:
    """A layer takes at least the time of its launches, however many ranks share it."""
    shape = MODELS["llama-2-7b"]
    hosts = [replace(DEVICES["H200"], launch_seconds=seconds) for seconds in (0.0, 1e-3)]
    fast, slow = (
        RooflineCostModel(PipelineSpec(shape, (StageSpec(32, device),))) for device in hosts
    )
    assert slow.stage_seconds(0, decode(1, 10)) > 32e-3 > fast.stage_seconds(0, decode(1, 10))
    chunk = StageWork(0, 8192, ((0, 8192),), 0, 0, 1)
    assert slow.stage_seconds(0, chunk) == pytest.approx(fast.stage_seconds(0, chunk))


def test_data_sheets_are_complete() -> None:
    assert {"H100", "H20", "A40", "A6000", "L40", "V100"} <= set(DEVICES)
    for name, device in DEVICES.items():
        assert device.power, name
        # FLOP per byte of memory traffic, hours of whole GPUs: no unit is wrong.
        assert 30 < device.flops / device.bandwidth < 350
        assert device.price is None or 0.2 < device.price < 10


# Collectives.


def test_measured_sums_follow_the_table() -> None:
    table = CollectiveTable({1024: [3e-6, 1e-6, 2e-6], 2048: [4e-6], 1 << 20: [8e-6], 8192: [1e-6]})
    # 4e-6 before 1e-6 is noise: both become their mean.
    assert table.seconds(1) == table.seconds(1024) == 2e-6
    assert table.seconds(2048) == table.seconds(8192) == pytest.approx(2.5e-6)
    assert table.seconds((8192 + (1 << 20)) / 2) == pytest.approx((2.5e-6 + 8e-6) / 2)
    assert table.seconds(1 << 22) == pytest.approx(4 * 8e-6)


@pytest.mark.parametrize("name", ["a100-dgx", "a100-pairs", "h100-dgx", "h100-pairs"])
def test_larger_sums_never_take_less_time(name: str) -> None:
    link = LINKS[name]
    for ranks in (2, 4):
        times = [all_reduce_seconds(2**power, ranks, link) for power in range(8, 34)]
        assert times == sorted(times)
        # No faster than the wire in the end: 900 GB/s of NVLink.
        assert times[-1] > 2**33 / 900e9


def test_links_without_measurements_take_the_formulas() -> None:
    measured, plain = LINKS["a100-dgx"], replace(LINKS["a100-dgx"], node=None)
    assert all_reduce_seconds(1 << 26, 8, measured) == pytest.approx(0.675e-3, rel=0.06)
    assert all_reduce_seconds(1 << 26, 16, measured) == all_reduce_seconds(1 << 26, 16, plain)
    assert all_reduce_seconds(1 << 20, 2, NetworkLink(1e9, 0.0)) == pytest.approx(2**20 / 1e9)


def test_nvlink_is_that_of_the_device() -> None:
    for device, node in (("A100-80G", "a100_dgx"), ("H200", "h100_dgx"), ("L20", None)):
        hardware = build_hardware("qwen2.5-32b", device, 1, degrees=(4,), rank_link="nvlink")
        (stage,) = hardware.stages
        assert stage.rank_link is not None
        assert stage.rank_link.node == node


# The command line.


def test_flags_of_unequal_stages(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "llama-3-8b", "--pp", "2", "--requests", "20", "--workload", "fixed:100,10"]
    unequal = ["--device", "L20,A100-40G", "--layers", "12,20", "--tp", "2,1", "--link", "network"]
    assert main([*flags, *unequal, "--tp-link", "nvlink,pcie"]) == 0
    capsys.readouterr()
    for wrong, words in (
        (["--device", "L20,B200"], "device 'B200' is none of L20"),
        (["--layers", "12,12"], "24 layers in total"),
        (["--profile", "vidur", "--bytes-per-weight", "1"], "--bytes-per-weight changes a model"),
        (["--link", "pcie,pcie"], "link 'pcie,pcie' has to be one name, or 1 separated"),
    ):
        assert main([*flags, *wrong]) == 2
        assert words in capsys.readouterr().err
