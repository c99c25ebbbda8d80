"""Values that a caller passes: converted to exactly the field's type, or refused by its name."""

import dataclasses
import math
from decimal import Decimal
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.commands.bench.options import ServeConfig
from gllm.config.engine import EngineConfig
from gllm.config.sampling import SamplingParams, StructuredOutput
from gllm.config.server import ServerConfig
from gllm.engine.request import build_sequence_params
from gllm.messages.codec import decode_for_worker, encode
from gllm.messages.requests import SubmitRequest
from gllm.options.field_types import FieldError, shorten_repr
from gllm.scheduler.config import SchedulerConfig
from tests.support.engines.ready import create_engine
from tests.support.examples import num_examples

CONVERTED: list[tuple[str, Any, Any]] = [
    ("seed", np.int64(3), 3),
    ("max_tokens", np.int32(3), 3),
    ("max_tokens", torch.tensor(3), 3),
    ("n", np.uint8(2), 2),
    ("top_k", np.int64(-1), -1),
    ("logprobs", np.int64(0), 0),
    ("temperature", np.float32(0.5), 0.5),
    ("temperature", 1, 1.0),
    ("temperature", np.int64(1), 1.0),
    ("ignore_eos", np.bool_(True), True),
    ("stop", "ab", ("ab",)),
    ("stop", None, ()),
    ("stop", ["a", np.str_("b")], ("a", "b")),
    ("stop_token_ids", [7, 8], (7, 8)),
    ("stop_token_ids", np.array([7, 8]), (7, 8)),
    ("stop_token_ids", {7}, (7,)),
    ("allowed_token_ids", range(3), (0, 1, 2)),
    ("allowed_token_ids", torch.tensor([4]), (4,)),
    ("logit_bias", None, {}),
    ("logit_bias", {np.int64(5): np.float32(0.5)}, {5: 0.5}),
    ("bad_words", ["a"], ("a",)),
]


@pytest.mark.parametrize(("name", "value", "converted"), CONVERTED, ids=shorten_repr)
def test_equivalent_types_are_converted(name: str, value: Any, converted: Any) -> None:
    found = getattr(SamplingParams(**{name: value}), name)
    assert found == converted
    assert repr(found) == repr(converted)


REFUSED: list[tuple[str, Any]] = [
    ("seed", 3.0),
    ("seed", True),
    ("seed", "3"),
    ("seed", np.float64(3.0)),
    ("seed", 10**5000),
    ("max_tokens", 3.0),
    ("max_tokens", True),
    ("max_tokens", np.array([3])),
    ("n", 2.0),
    ("n", None),
    ("n", 2**31 - 1),
    ("top_k", 50.0),
    ("top_k", None),
    ("logprobs", ()),
    ("n", ()),
    ("logprobs", True),
    ("logprobs", 1.0),
    ("prompt_logprobs", np.bool_(True)),
    ("temperature", True),
    ("temperature", "1"),
    ("temperature", None),
    ("temperature", 1j),
    ("temperature", math.nan),
    ("temperature", 10**400),
    ("top_p", Decimal(1)),
    ("repetition_penalty", math.inf),
    ("min_p", np.float32("nan")),
    ("ignore_eos", 1),
    ("skip_special_tokens", None),
    ("stop", 5),
    ("stop", ["a", 5]),
    ("stop", b"ab"),
    ("stop", ["\ud800"]),
    ("stop_token_ids", (7.0,)),
    ("stop_token_ids", [True]),
    ("stop_token_ids", "7"),
    ("stop_token_ids", b"7"),
    ("stop_token_ids", 7),
    ("stop_token_ids", {7: 1}),
    ("stop_token_ids", np.array([7.0])),
    ("stop_token_ids", np.array([[7]])),
    ("allowed_token_ids", np.array([True])),
    ("allowed_token_ids", [[4]]),
    ("logit_bias", {5.0: 1.0}),
    ("logit_bias", {True: 1.0}),
    ("logit_bias", {"5": 1.0}),
    ("logit_bias", {5: "1"}),
    ("logit_bias", {5: True}),
    ("logit_bias", [5]),
    ("bad_words", [7]),
    ("shown_tokens", (3,)),
    ("structured", {"regex": "a"}),
    ("truncate_prompt_tokens", 4.0),
    ("min_tokens", False),
]


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=shorten_repr)
def test_other_types_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(FieldError, match=f"^{name}") as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("name", "value"),
    [("regex", 5), ("choice", 5), ("choice", [5]), ("json", 5), ("grammar", b"x")],
)
def test_structured_outputs_of_other_types_are_refused(name: str, value: Any) -> None:
    with pytest.raises(FieldError, match=f"^{name}"):
        StructuredOutput(**{name: value})
    assert StructuredOutput(choice=["a", "b"]).choice == ("a", "b")  # type: ignore[arg-type]


NUMBERS = st.one_of(st.booleans(), st.integers(), st.floats(), st.sampled_from([0, 1, 3, 3.0]))
NUMPY = st.one_of(
    NUMBERS.map(np.asarray),
    st.lists(st.integers(0, 9), max_size=3).map(np.array),
    st.lists(st.floats(), max_size=3).map(np.array),
    st.integers(0, 99).map(np.int16),
    st.floats(width=32).map(np.float32),
    st.booleans().map(np.bool_),
)
SCALARS = st.one_of(
    NUMBERS, NUMPY, st.none(), st.text(max_size=3), st.binary(max_size=3), st.just(object())
)
VALUES = st.one_of(
    SCALARS,
    st.lists(SCALARS, max_size=3),
    st.lists(SCALARS, max_size=3).map(tuple),
    st.dictionaries(
        st.one_of(st.integers(-1, 3), st.floats(), st.booleans(), st.text()), SCALARS, max_size=2
    ),
)
FIELDS = [field.name for field in dataclasses.fields(SamplingParams)]


@settings(max_examples=num_examples(40, 1000), deadline=None)
@given(st.sampled_from(FIELDS), VALUES)
def test_any_value_is_refused_by_name_or_survives_the_wire(name: str, value: Any) -> None:
    """What one caller passes must never reach a worker as something that it cannot decode."""
    refused = ""
    try:
        params = SamplingParams(**{name: value})
    except FieldError as error:
        refused = error.param
    if refused:
        assert refused == name
        return
    sampling = build_sequence_params(params, {*params.stop_token_ids, 2}, ((3,),), "", Random(0))
    stops = sorted(params.stop_token_ids)
    message = SubmitRequest(0, [5], sampling, params.max_tokens or 9, stops, params.n)
    assert decode_for_worker(encode(message)) == message


@pytest.fixture
async def engine() -> Any:
    """An engine without workers, and what it sends."""

    made: Any
    made, backend = create_engine(EngineConfig("demo"))
    made.sent = backend.sent
    yield made
    await made.stop()


PROMPTS: list[Any] = [
    [[3.0, 4.0]],
    [[True, 4]],
    [["a"]],
    [[np.float32(3)]],
    [b"ab"],
    [np.array([3.0])],
    [np.array([[3]])],
    ["ab"],
    [7],
    [None],
    [{3: 4}],
    [[-1]],
    [[2**70]],
]


async def test_prompts_of_other_types_are_refused(engine: Any) -> None:
    for prompts in PROMPTS:
        with pytest.raises(FieldError, match="prompt"):
            await engine.submit(prompts, SamplingParams())
        if not isinstance(prompts[0], str):
            with pytest.raises(FieldError, match="prompt"):
                await engine.embed(prompts[0])
        assert engine.sent == [], shorten_repr(prompts)


@pytest.mark.parametrize(
    "prompt",
    [np.array([3, 4]), torch.tensor([3, 4]), (3, 4), [np.int64(3), np.uint8(4)]],
    ids=shorten_repr,
)
async def test_prompts_may_be_arrays(engine: Any, prompt: Any) -> None:
    (request,) = await engine.submit([prompt], SamplingParams(), priority=np.int64(2))
    (message,) = engine.sent
    assert (message.prompt, message.priority) == ([3, 4], 2)
    assert decode_for_worker(encode(message)) == message
    request.close()


@pytest.mark.parametrize(
    "options",
    [
        {"priority": 1.0},
        {"priority": True},
        {"priority": 2**63},
        {"cache_salt": 5},
        {"cache_salt": "\ud800"},
        {"request_id": 5},
    ],
    ids=shorten_repr,
)
async def test_options_of_other_types_are_refused(engine: Any, options: dict[str, Any]) -> None:
    with pytest.raises(FieldError, match=f"^{next(iter(options))}"):
        await engine.submit([[5]], SamplingParams(), **options)
    with pytest.raises(FieldError, match=f"^{next(iter(options))}"):
        await engine.embed([5], **options)


async def test_parameters_of_another_class_are_refused(engine: Any) -> None:
    with pytest.raises(FieldError, match=r"^params.*SamplingParams"):
        await engine.submit([[5]], {"temperature": 0})
    with pytest.raises(FieldError, match="prompt"):
        await engine.embed("\ud800")


@pytest.mark.parametrize(
    ("config", "options", "rule"),
    [
        (
            SamplingParams,
            {"temperature": 3},
            "is 3.0, but has to be a number in [0, 2]",
        ),
        (SamplingParams, {"seed": 2**63}, "in [-2^63, 2^63 - 1]"),
        (SamplingParams, {"stop_token_ids": (5, -1, 7)}, "stop_token_ids is (5, -1, 7)"),
        (SchedulerConfig, {"policy": "best"}, "policy is 'best', but has to be one of auto, "),
        (ServerConfig, {"log_level": "loud"}, "log_level is 'loud', but has to be one of debug"),
        (ServeConfig, {"metric_percentiles": (math.nan, 5)}, "metric_percentiles is (nan, 5.0)"),
        (ServeConfig, {"metric_percentiles": (5, math.nan)}, "metric_percentiles is (5.0, nan)"),
    ],
)
def test_declared_ranges_and_choices_are_checked(
    config: type, options: dict[str, Any], rule: str
) -> None:
    with pytest.raises(FieldError) as caught:
        config(**options)
    assert rule in str(caught.value)
    assert caught.value.param == next(iter(options))


@pytest.mark.parametrize("key", [b"sk-1234", ("sk-1234\ud800",)], ids=["bytes", "surrogate"])
def test_errors_of_secret_fields_do_not_show_the_value(key: Any) -> None:
    with pytest.raises(FieldError, match=r"^api_key") as caught:
        ServerConfig(api_key=key)
    assert "1234" not in str(caught.value)
    assert "1234" not in repr(ServerConfig(api_key=("sk-1234",)))


def test_configurations_convert_their_fields_too() -> None:
    config = EngineConfig.from_options(
        "m", max_model_len=np.int64(9), layers=[1], max_num_seqs=np.int32(4)
    )
    found = config.max_model_len, config.layers, config.scheduler.max_num_seqs
    assert repr(found) == "(9, (1,), 4)"
    for options in ({"max_model_len": 9.0}, {"max_num_seqs": True}, {"block_size": "16"}):
        with pytest.raises(ValueError, match=f"^{next(iter(options))}"):
            EngineConfig.from_options("m", **options)
