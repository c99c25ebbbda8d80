"""The policies' equations, number by number."""

import inspect
import math
import sys
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gllm.scheduler.policy as scheduler_policy
from gllm.scheduler.config import POLICY_NAMES, SchedulerConfig
from gllm.scheduler.policy import SchedulerLoad
from gllm.scheduler.policy_registry import POLICIES
from gllm.scheduler.stage_work import count_query_key_pairs


def resolved(stages: int = 4, **options: Any) -> SchedulerConfig:
    return SchedulerConfig(**options).resolve(stages, 1000, 1000)


def load(
    waiting: int = 0,
    decoding: int = 0,
    ready: int | None = None,
    free: float = 1.0,
    plans: int = 0,
    scheduled: int = 0,
    begun: int = 0,
    depth: int = 4,
    prompts: int = 1,
) -> SchedulerLoad:
    return SchedulerLoad(
        num_waiting_tokens=waiting,
        num_waiting_pairs=count_query_key_pairs(begun, waiting),
        num_waiting_prompts=prompts if waiting else 0,
        num_started_tokens=begun,
        num_started_pairs=count_query_key_pairs(0, begun),
        num_decoding=decoding,
        num_decode_context_tokens=100 * decoding,
        num_ready_decodes=decoding if ready is None else ready,
        num_scheduled_decodes=scheduled,
        scheduled_decode_cost=scheduled,
        kv_free=free,
        num_decode_plans=plans,
        depth=depth,
    )


@pytest.mark.parametrize(
    ("decoding", "shares"),
    [
        (1, [1, 1, 1, 1]),
        (3, [1, 1, 1, 1]),
        (5, [2, 1, 1, 1]),
        (7, [2, 2, 2, 1]),
        (10, [3, 3, 2, 2]),
        (33, [9, 8, 8, 8]),
    ],
)
def test_decodes_are_spread_over_the_depth(decoding: int, shares: list[int]) -> None:
    policy = POLICIES["throttle"](resolved(stages=4))
    assert [policy.decode_budget(load(decoding=decoding, plans=k)) for k in range(4)] == shares


def test_decodes_never_exceed_what_is_ready() -> None:
    policy = POLICIES["throttle"](resolved(stages=4))
    assert policy.decode_budget(load(decoding=40, ready=3)) == 3
    assert policy.decode_budget(load(decoding=40, ready=0)) == 0


@pytest.mark.parametrize(
    ("name", "given_load", "tokens"),
    [
        # Nothing decodes: waiting tokens alone, the cache's fill does not matter.
        ("throttle-paper", load(waiting=4000, free=0.01), 500),
        ("throttle-paper", load(waiting=4001), 501),
        ("throttle-paper", load(waiting=100), 32),
        ("throttle-paper", load(waiting=100_000), 2048),
        # Decodes run: suspended at and below the threshold, scaled above it.
        ("throttle-paper", load(waiting=100_000, decoding=9, free=0.05), 0),
        ("throttle-paper", load(waiting=100_000, decoding=9, free=0.24), 410),
        ("throttle-paper", load(waiting=800, decoding=9, free=0.24), 100),
        ("throttle-paper", load(waiting=8, decoding=9, free=0.06), 32),
        # Ours, before step times are known. Alone: equal chunks near the best for a lone prompt.
        ("throttle", load(waiting=4000, free=0.01), 308),
        ("throttle", load(waiting=1000, begun=3000), 308),
        # Smaller beside decodes, larger with more prompts, limited by the free cache.
        ("throttle", load(waiting=4000, decoding=9, scheduled=2), 72),
        ("throttle", load(waiting=4000, decoding=90, scheduled=22), 32),
        ("throttle", load(waiting=40_000, decoding=90, scheduled=22, prompts=20), 113),
        ("throttle", load(waiting=160_000, decoding=4, scheduled=1, prompts=80), 513),
        ("throttle", load(waiting=160_000, decoding=4, scheduled=1, prompts=80, free=0.1), 108),
        ("throttle", load(waiting=100_000, decoding=9, free=0.05), 0),
        ("sarathi", load(waiting=8000, decoding=9, free=0.01), 2048),
        ("prefill-first", load(waiting=8000, decoding=9, free=0.01), 2560),
        ("vllm", load(waiting=8000, decoding=9, free=0.01), 4096),
        ("distserve", load(waiting=8000, decoding=9, free=0.01), 512),
        ("splitwise", load(waiting=8000, decoding=9, scheduled=8, free=0.01), 2040),
        ("tetri", load(waiting=8000, decoding=9, free=0.01), 512),
    ],
)
def test_prefill_budget(name: str, given_load: SchedulerLoad, tokens: int) -> None:
    config = SchedulerConfig(policy=name).resolve(4, 1000, 1000)
    assert POLICIES[name](config).prefill_budget(given_load) == tokens


@given(
    waiting=st.integers(1, 10**6),
    decoding=st.integers(1, 500),
    free=st.floats(0, 1),
    threshold=st.floats(0, 0.99),
)
def test_the_papers_throttle_follows_equation_3(
    waiting: int, decoding: int, free: float, threshold: float
) -> None:
    config = resolved(kv_threshold=threshold)
    budget = POLICIES["throttle-paper"](config).prefill_budget(load(waiting, decoding, free=free))
    spare = 2048 * (free - threshold) / (1 - threshold)
    expected = 0 if free <= threshold else math.ceil(max(min(waiting / 8, spare), 32))
    assert abs(budget - expected) <= 1  # Rounding of the product may differ by one token.


def test_policies_are_short() -> None:
    """At most 150 lines per module; of the one with several policies, of its classes (V11)."""
    for name, create in POLICIES.items():
        num_lines: Counter[str] = Counter()
        for base in inspect.getmro(type(create(resolved()))):
            if base.__module__ == scheduler_policy.__name__:
                num_lines[base.__module__] += len(inspect.getsource(base).splitlines())
            elif base.__module__.startswith("gllm."):
                module = sys.modules[base.__module__]
                num_lines[base.__module__] = len(inspect.getsource(module).splitlines())
        assert num_lines, name
        assert max(num_lines.values()) <= 150, name


def test_auto_is_throttle_at_any_number_of_stages() -> None:
    for stages in (1, 2):
        assert resolved(stages=stages).policy == "throttle"
        assert resolved(stages=stages).max_num_batched_tokens == 2560
        assert resolved(stages=stages).prefill_batch_tokens == 2560
    assert set(POLICIES) == set(POLICY_NAMES) - {"auto"}


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"kv_threshold": 1.0}, "kv_threshold"),
        ({"kv_threshold": -0.1}, "kv_threshold"),
        ({"min_prefill_tokens": 4096}, "min_prefill_tokens"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"policy": "best"}, "policy"),
    ],
)
def test_values_out_of_range_are_refused_by_name(options: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        SchedulerConfig(**options)
