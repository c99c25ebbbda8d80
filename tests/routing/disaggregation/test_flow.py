"""Pair policy `flow`: shares of the plan, short runs, and engines that come and go (H8)."""

from collections import Counter
from itertools import groupby
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.config.router import RouterConfig
from gllm.routing.disaggregation.flow import FlowPairPolicy, format_routes, parse_routes
from gllm.routing.disaggregation.policy import EnginePair
from gllm.routing.disaggregation.policy_registry import make_pair_policy
from tests.support.examples import num_examples
from tests.support.routing.pair_engines import engine, pair_request

ROUTES = {"p0": {"d0": 3.0, "d1": 1.0}, "p1": {"d1": 2.5}}
ENGINES = [engine(name, "prefill") for name in ("p0", "p1")] + [
    engine(name, "decode") for name in ("d0", "d1")
]


def dispatch(policy: FlowPairPolicy, engines, count: int) -> list[EnginePair]:
    pairs = [policy.choose(pair_request(key), engines, 0.0) for key in range(count)]
    return [pair for pair in pairs if pair is not None]


flows = st.dictionaries(
    st.sampled_from(["p0", "p1", "p2"]),
    st.dictionaries(st.sampled_from(["d0", "d1", "d2"]), st.floats(0.01, 10), min_size=1),
    min_size=1,
)


@settings(max_examples=num_examples(10, 500), deadline=None)
@given(routes=flows)
def test_frequencies_are_the_shares_of_the_flow_and_runs_are_short(routes) -> None:
    names = {*routes, *(name for targets in routes.values() for name in targets)}
    engines = [engine(name, "prefill" if name[0] == "p" else "decode") for name in names]
    pairs = dispatch(FlowPairPolicy(Random(0), routes), engines, 1000)
    total = sum(sum(targets.values()) for targets in routes.values())
    counts = Counter(pairs)
    for prefill, targets in routes.items():
        for decode, flow in targets.items():
            assert counts[EnginePair(prefill, decode)] / 1000 == pytest.approx(
                flow / total, abs=0.01
            )
        share = sum(targets.values()) / total
        runs = [
            len(list(run))
            for name, run in groupby(pair.prefill for pair in pairs)
            if name == prefill
        ]
        # No engine gets more requests in a row than its share of the turns explains.
        assert max(runs, default=0) <= 2 + 2 * share / max(1 - share, 1e-3)


def test_shares_survive_the_loss_of_an_engine() -> None:
    policy = FlowPairPolicy(Random(0), ROUTES)
    left = [each for each in ENGINES if each.name != "d0"]
    assert {pair.decode for pair in dispatch(policy, left, 20)} == {"d1"}
    left = [each for each in ENGINES if each.name != "p0"]
    pairs = dispatch(policy, left, 20)
    assert {pair.prefill for pair in pairs} == {"p1"}
    # Without any decode engine of its routes, a prefill engine uses those of others.
    policy = FlowPairPolicy(Random(0), {"p0": {"d0": 1.0}, "p1": {"d1": 1.0}})
    assert dispatch(policy, ENGINES[:3], 20)[1] == EnginePair("p1", "d0")


def test_engines_that_the_plan_does_not_name_serve_when_nobody_else_is_left() -> None:
    policy = FlowPairPolicy(Random(0), ROUTES)
    others = [engine("x", "prefill"), engine("y", "decode")]
    assert set(dispatch(policy, [*ENGINES, *others], 50)) <= {
        ("p0", "d0"),
        ("p0", "d1"),
        ("p1", "d1"),
    }
    assert set(dispatch(policy, others, 5)) == {("x", "y")}


def test_routes_are_read_as_they_are_written() -> None:
    text = format_routes(ROUTES)
    assert text == "p0:d0=3,p0:d1=1,p1:d1=2.5"
    assert parse_routes(text.split(",")) == ROUTES
    config = RouterConfig(preset="flow", routes=tuple(text.split(",")))
    assert config.flows == ROUTES
    policy = make_pair_policy("flow", Random(0), config.flows)
    assert dispatch(policy, ENGINES, 1)[0].prefill == "p0"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "route", ["p0", "p0:d0", "p0:d0=x", "p0:d0=0", ":d0=1", "p0:=1", "p:d=inf"]
)
def test_a_route_of_another_form_is_refused_with_an_example(route: str) -> None:
    with pytest.raises(ValueError, match=r"as in p0:d1=2\.5"):
        RouterConfig(preset="flow", routes=(route,))


def test_routes_need_the_preset_and_appear_once() -> None:
    with pytest.raises(ValueError, match="set preset to flow"):
        RouterConfig(routes=("p0:d0=1",))
    with pytest.raises(ValueError, match="appears twice"):
        RouterConfig(preset="flow", routes=("p0:d0=1", "p0:d0=2"))
    with pytest.raises(ValueError, match="choose flow"):
        make_pair_policy("tetri", Random(0), ROUTES)
