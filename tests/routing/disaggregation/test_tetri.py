"""TetriInfer's dispatcher: free memory, power of two choices, no herding (T5)."""

from collections.abc import Callable
from random import Random
from statistics import mean

from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.routing.disaggregation.tetri import TetriPairPolicy
from tests.support.examples import num_examples
from tests.support.routing.pair_engines import engine, fleet, pair_request

REQUESTS_PER_ENGINE = 32
SEEDS = range(20)


def place(num_engines: int, seed: int, choose: Callable[[int, bool, Random], str]) -> int:
    """Return the most heavy decodes of an engine, of a stream of which half are heavy."""
    rng = Random(seed)
    kinds = [rng.random() < 0.5 for _ in range(REQUESTS_PER_ENGINE * num_engines)]
    heavy: dict[str, int] = {}
    for key, is_heavy in enumerate(kinds):
        name = choose(key, is_heavy, rng)
        heavy[name] = heavy.get(name, 0) + is_heavy
    return max(heavy.values())


def place_by_policy(num_engines: int, seed: int) -> int:
    policy, engines = TetriPairPolicy(Random(seed)), fleet(1, num_engines, num_tokens=10**6)

    def choose(key: int, is_heavy: bool, rng: Random) -> str:
        request = pair_request(key, 100, 400 if is_heavy else 50)
        policy.choose(request, engines, 0.0)
        policy.on_prefill_ended(key, 0.0)
        return policy.choose_decode(request, engines, 0.0) or ""

    return place(num_engines, seed, choose)


def place_at_random(num_engines: int, seed: int) -> int:
    return place(num_engines, seed, lambda key, heavy, rng: str(rng.randrange(num_engines)))


def place_heavy_together(num_engines: int, seed: int) -> int:
    """The paper's worst case: heavy requests fill one engine, then the next one."""
    placed = [0]

    def choose(key: int, is_heavy: bool, rng: Random) -> str:
        placed[0] += is_heavy
        if is_heavy:
            return str((placed[0] - 1) // REQUESTS_PER_ENGINE)
        return str(rng.randrange(num_engines))

    return place(num_engines, seed, choose)


def test_heavy_decodes_are_spread() -> None:
    """T5: 16 heavy decodes per engine would be ideal."""
    for num_engines in (2, 4, 8):
        policy = mean(place_by_policy(num_engines, seed) for seed in SEEDS)
        assert policy <= 18
        assert policy < mean(place_at_random(num_engines, seed) for seed in SEEDS)
        assert mean(place_heavy_together(num_engines, seed) for seed in SEEDS) >= 30


def test_light_decodes_are_spread_too() -> None:
    policy, engines = TetriPairPolicy(Random(0)), fleet(1, 2)
    for key in range(20):
        policy.choose_decode(pair_request(key, 10, 400), engines[1:2], 0.0)
    names = [policy.choose_decode(pair_request(20 + i, 10, 5), engines, 0.0) for i in range(10)]
    # The heavy ones on d0 do not matter: both engines get as many light ones.
    assert names.count("d0") == names.count("d1") == 5


@settings(max_examples=num_examples(50, 1000), deadline=None)
@given(
    used=st.lists(st.integers(0, 20), min_size=1, max_size=6),
    num_tokens=st.integers(1, 2500),
    seed=st.integers(0, 100),
)
def test_a_decode_goes_where_it_fits(used: list[int], num_tokens: int, seed: int) -> None:
    engines = [
        engine(f"d{i}", "decode", num_tokens=1600, kv_usage=n / 20) for i, n in enumerate(used)
    ]
    policy = TetriPairPolicy(Random(seed))
    name = policy.choose_decode(pair_request(1, num_tokens, 100), engines, 0.0)
    assert name is not None
    free = [1600 - 80 * n for n in used]
    chosen = free[int(name[1:])]
    if any(each >= num_tokens + 100 for each in free):
        assert chosen >= num_tokens + 100
    else:
        assert chosen == max(free)


def test_memory_of_assigned_decodes_is_not_free() -> None:
    policy, engines = TetriPairPolicy(Random(0)), fleet(1, 2, num_tokens=1600)
    first = policy.choose_decode(pair_request(1, 900, 50), engines, 0.0)
    second = policy.choose_decode(pair_request(2, 900, 500), engines, 0.0)
    assert {first, second} == {"d0", "d1"}


def test_the_prefill_engine_with_the_fewest_tokens_is_chosen() -> None:
    policy = TetriPairPolicy(Random(0))
    engines = [engine(f"p{i}", "prefill", waiting_tokens=n) for i, n in enumerate([50, 20, 90])]
    assert policy.choose(pair_request(1, 60), engines, 0.0) == ("p1", None)
    assert policy.choose(pair_request(2, 60), engines, 0.0) == ("p0", None)
