"""A plan is refused before it is written if its engines or its router would refuse to start."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from gllm.commands.plan.command import main
from gllm.config.engine import EngineConfig
from gllm.plan.engine_checks import check_engines, count_kv_tokens, engine_hardware
from gllm.plan.processes import check_configurations
from gllm.plan.serving_plan import (
    EnginePlan,
    NodePlan,
    PlanError,
    RouterPlan,
    ServingPlan,
    StagePlan,
    read_plan,
)


def make_plan(
    model: str = "llama-3.1-8b", device: str = "RTX4090", ranks: int = 1, layers: int = 32
) -> ServingPlan:
    stage = StagePlan("x", layers, list(range(ranks)))
    return ServingPlan(
        model,
        {"x": NodePlan("127.0.0.1", [device] * 8)},
        {"e": EnginePlan([stage])},
        router=RouterPlan("x"),
    )


def with_flags(plan: ServingPlan, engine: dict[str, Any], router: dict[str, Any]) -> ServingPlan:
    assert plan.router is not None
    return msgspec.structs.replace(
        plan,
        engines={"e": msgspec.structs.replace(plan.engines["e"], flags=engine)},
        router=msgspec.structs.replace(plan.router, flags=router),
    )


def test_engines_and_router_get_the_context_that_the_memory_holds() -> None:
    """Llama-3.1's context is 131,072 tokens; a 24 GB card has KV memory for a third of it."""
    plan = check_engines(make_plan())
    length = plan.engines["e"].flags["max-model-len"]
    # By hand: 0.9 x 24 GB, 16.06 GB of weights, 131,072 bytes per token; activations take a part.
    assert 0.85 * 42256 < length < 42256
    assert plan.router is not None
    # A router refuses engines with less than its own.
    assert plan.router.flags == {"max-model-len": length}
    assert check_engines(plan) == plan


def test_a_context_that_fits_is_the_model_s() -> None:
    plan = make_plan(device="H100", model="llama-3-8b")
    assert check_engines(plan) == plan


def test_unknown_models_and_devices_keep_their_flags() -> None:
    for plan in (make_plan("Qwen/Qwen2.5-7B"), make_plan(device="B300")):
        assert check_engines(plan) == plan
    plan = with_flags(make_plan("Qwen/Qwen2.5-7B"), {"max_model_len": 900}, {})
    router = check_engines(plan).router
    assert router is not None
    assert router.flags == {"max-model-len": 900}


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (make_plan("opt-13b", layers=40), r"engines\.e: .* too little memory for 25\.7 GB"),
        (make_plan(ranks=3), r"engines\.e\.stages: .* do not divide into 3 ranks"),
        (make_plan(layers=31), r"engines\.e\.stages: 31 layers, but llama-3\.1-8b has 32"),
        (
            with_flags(make_plan(), {"max-model-len": 200_000}, {}),
            r"engines\.e\.flags\.max-model-len: 200000, but the context of llama-3\.1-8b is 131072",
        ),
        (
            with_flags(make_plan(), {"max-model-len": 50_000}, {}),
            "one sequence of max_model_len 50000 needs 3125",
        ),
        (
            with_flags(make_plan(), {"max-model-len": 9000}, {"max_model_len": 9001}),
            r"router\.flags\.max-model-len: 9001, but an engine serves 9000",
        ),
    ],
)
def test_what_an_engine_refuses_is_said_before(plan: ServingPlan, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        check_engines(plan)


def test_more_of_the_memory_holds_more_tokens() -> None:
    plan = make_plan()
    hardware = engine_hardware(plan, "e", check_configurations(plan)["e"])
    assert hardware is not None

    def count(**options: Any) -> int:
        return count_kv_tokens(EngineConfig.from_options("llama-3.1-8b", **options), hardware)

    assert count(gpu_memory_utilization=0.95) > count() > count(max_num_batched_tokens=32768)
    assert count(gpu_memory_utilization=0.5) == 0


@pytest.mark.parametrize("name", ["capacity", "search"])
@pytest.mark.parametrize(
    ("flags", "flag"),
    [
        (["--link", "network"], "--link"),
        (["--link", "network", "--tp-link", "nvlink"], "--link"),
        (["--tp-link", "nvlink"], "--tensor-parallel-link"),
    ],
)
def test_a_link_that_joins_nothing_is_refused(
    name: str, flags: list[str], flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([name, "--model", "qwen2.5-0.5b", "--pp", "1", "--tp", "1", *flags]) == 2
    assert f"gllm plan {name}: {flag}: " in capsys.readouterr().err


def test_a_checkpoint_is_read_before_the_plan_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The demo has 6 layers, Qwen2.5-0.5B has 24."""
    path = tmp_path / "plan.yaml"
    argv = ["search", "--model", "qwen2.5-0.5b", "--devices", "L20", "--closed-form"]
    argv += ["--pp", "1", "--tp", "1", "--max-num-seqs", "8", "--policies", "vllm"]
    argv += ["--objective", "goodput-per-gpu", "--workload", "fixed:64,8", "--output", str(path)]
    assert main([*argv, "--checkpoint", "demo"]) == 2
    assert "gllm serve refuses engine engine-0: layers 24 has to" in capsys.readouterr().err
    assert not path.exists()
    assert main(argv) == 0
    assert read_plan(path).model == "qwen2.5-0.5b"
