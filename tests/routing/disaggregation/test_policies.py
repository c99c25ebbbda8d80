"""Rules that every pair policy keeps."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.routing.disaggregation.policy import DecodeChoice, EnginePair, PairPolicy
from gllm.routing.disaggregation.policy_registry import PAIR_POLICIES, make_pair_policy
from gllm.routing.state import EngineSnapshot
from tests.support.examples import num_examples
from tests.support.routing.pair_engines import engine, fleet, pair_request

ALL = pytest.mark.parametrize("name", PAIR_POLICIES)


def choose_both(
    policy: PairPolicy, engines: list[EngineSnapshot], key: int, prompt: int, output: int
) -> EnginePair:
    """Choose both engines of a request, as a caller does."""
    request = pair_request(key, prompt, output)
    pair = policy.choose(request, engines, 0.0)
    assert pair is not None
    if pair.decode is None:
        return EnginePair(pair.prefill, policy.choose_decode(request, engines, 0.0))
    return pair


def test_unknown_pair_policy_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'best' is none of distserve, splitwise, tetri, flow"):
        make_pair_policy("best", Random(0))


def test_decode_engines_are_chosen_when_the_papers_say() -> None:
    moments = {name: make_pair_policy(name, Random(0)).decode_choice for name in PAIR_POLICIES}
    assert moments == {
        "distserve": DecodeChoice.PREFILL_END,
        "splitwise": DecodeChoice.ARRIVAL,
        "tetri": DecodeChoice.FIRST_CHUNK,
        "flow": DecodeChoice.ARRIVAL,
    }
    for name, moment in moments.items():
        pair = make_pair_policy(name, Random(0)).choose(pair_request(1), fleet(1, 1), 0.0)
        assert pair == EnginePair("p0", "d0" if moment is DecodeChoice.ARRIVAL else None)


@ALL
def test_without_engines_nothing_is_chosen(name: str) -> None:
    policy = make_pair_policy(name, Random(0))
    assert policy.choose(pair_request(1), [], 0.0) is None
    assert policy.choose_decode(pair_request(1), [], 0.0) is None
    assert len(policy.loads) == 0


@ALL
@pytest.mark.parametrize("role", ["prefill", "decode", "mixed"])
def test_a_fleet_of_one_role_still_serves(name: str, role: str) -> None:
    policy = make_pair_policy(name, Random(0))
    assert choose_both(policy, [engine("a", role)], 1, 100, 50) == ("a", "a")


@ALL
def test_idle_engines_are_preferred_and_lost_ones_are_forgotten(name: str) -> None:
    policy = make_pair_policy(name, Random(0))
    first = choose_both(policy, fleet(2, 2), 1, 100, 50)
    second = choose_both(policy, fleet(2, 2), 2, 100, 50)
    assert {first.prefill, second.prefill} == {"p0", "p1"}
    assert {first.decode, second.decode} == {"d0", "d1"}
    assert first.decode is not None
    left = [each for each in fleet(2, 2) if each.name != first.decode]
    policy.on_engine_lost(first.decode)
    assert policy.choose_decode(pair_request(1), left, 1.0) == second.decode


class Course:
    """Requests with random engines and ends; the loads are compared with a plain count."""

    def __init__(self, name: str, seed: int) -> None:
        self.policy = make_pair_policy(name, Random(seed))
        self.requests: dict[int, list[str | None]] = {}
        self.sizes: dict[int, tuple[int, int]] = {}

    def submit(self, key: int, prompt: int, output: int, engines: list[EngineSnapshot]) -> None:
        pair = choose_both(self.policy, engines, key, prompt, output)
        assert {pair.prefill, pair.decode} <= {each.name for each in engines}
        self.requests[key] = [pair.prefill, pair.decode]
        self.sizes[key] = prompt, output

    def end_prefill(self, key: int) -> None:
        self.policy.on_prefill_ended(key, 0.0)
        if key in self.requests:
            self.requests[key][0] = None

    def end(self, key: int) -> None:
        self.policy.on_ended(key, 0.0)
        self.requests.pop(key, None)

    def lose(self, name: str) -> None:
        self.policy.on_engine_lost(name)
        for places in self.requests.values():
            places[:] = [None if place == name else place for place in places]

    def check(self, engines: list[EngineSnapshot]) -> None:
        for each in engines:
            load = self.policy.loads.of(each.name)
            prefills = [key for key, places in self.requests.items() if places[0] == each.name]
            decodes = [key for key, places in self.requests.items() if places[1] == each.name]
            heavy = [key for key in decodes if self.sizes[key][1] > 128]
            assert load.num_prefills == len(prefills)
            assert load.prefill_tokens == sum(self.sizes[key][0] for key in prefills)
            assert (load.num_decodes, load.num_heavy_decodes) == (len(decodes), len(heavy))
            assert load.decode_tokens == sum(sum(self.sizes[key]) for key in decodes)


@ALL
@settings(max_examples=num_examples(8, 400), deadline=None)
@given(data=st.data())
def test_loads_are_those_of_the_unfinished_requests(name: str, data: st.DataObject) -> None:
    course = Course(name, data.draw(st.integers(0, 1000)))
    engines = [*fleet(2, 2, num_tokens=4096), engine("m", "mixed", 4096)]
    for _ in range(data.draw(st.integers(1, 30))):
        key = data.draw(st.integers(0, 9))
        match data.draw(st.sampled_from(["submit", "submit", "prefilled", "end", "lose"])):
            case "submit":
                size = data.draw(st.integers(1, 5000)), data.draw(st.integers(1, 600))
                course.submit(key, *size, engines)
            case "prefilled":
                course.end_prefill(key)
            case "end":
                course.end(key)
            case "lose":
                course.lose(data.draw(st.sampled_from(engines)).name)
        course.check(engines)
    for key in range(10):
        course.end(key)
    course.check(engines)
    assert len(course.policy.loads) == 0
