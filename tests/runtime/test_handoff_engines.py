"""Requests that one engine prefills and another one decodes: same text, whatever dies when."""

from functools import cache
from random import Random

import pytest

from gllm.messages.handoff import KvHandoff, make_ticket
from gllm.messages.requests import EngineOutputs
from gllm.messages.sampling import SequenceSamplingParams
from gllm.routing.handoff import HandoffState
from gllm.runtime.head.request_stream import RequestStream
from gllm.scheduler.plan import FinishedSequence, SchedulerStats, StepOutput
from tests.support.engines.epochs import Stages
from tests.support.engines.kv_engines import MAX_MODEL_LEN, KvCluster, load_stages
from tests.support.products import covers_pairs
from tests.support.text.grammar_writing import FOLDER

GREEDY = SequenceSamplingParams(temperature=0)
SAMPLED = SequenceSamplingParams(temperature=1, seed=11)
MAX_TOKENS = 6
STATES = [
    HandoffState.PREFILL,
    HandoffState.READY,
    HandoffState.TRANSFER,
    HandoffState.DECODE,
]


@cache
def stages_of(name: str, num_stages: int = 1, block_size: int = 8) -> Stages:
    """Weights are loaded once per engine; each cluster has new drivers over them."""
    return load_stages(FOLDER, num_stages, block_size)


def cluster(*names: str) -> KvCluster:
    return KvCluster({name: stages_of(name) for name in names or ("P", "D")})


def prompts(count: int, seed: int = 1) -> list[list[int]]:
    rng = Random(seed)
    return [[rng.randrange(3, 2048) for _ in range(rng.randint(1, 40))] for _ in range(count)]


def submit(
    rig: KvCluster, prompt: list[int], sampling: SequenceSamplingParams = GREEDY, n: int = 1
) -> RequestStream:
    return rig.client.submit(prompt, sampling, MAX_TOKENS, [], n)


def text(stream: RequestStream) -> list[list[int]]:
    return [stream.entry.outputs[choice] for choice in range(stream.entry.n)]


def expected(*prompts: list[int], sampling: SequenceSamplingParams = GREEDY) -> list[list[int]]:
    """Return the output of each prompt on one engine."""
    rig = cluster("one")
    streams = [submit(rig, prompt, sampling) for prompt in prompts]
    rig.run(streams)
    return [text(stream)[0] for stream in streams]


@pytest.mark.parametrize("count", [40, pytest.param(100, marks=pytest.mark.full)])
def test_prompts_through_a_pair_have_the_text_of_one_engine(count: int) -> None:
    given = prompts(count)
    one, pair = cluster("one"), cluster()
    for start in range(0, len(given), 20):
        some = given[start : start + 20]
        alone = [submit(one, prompt) for prompt in some]
        apart = [submit(pair, prompt) for prompt in some]
        one.run(alone)
        pair.run(apart)
        assert [*map(text, apart)] == [*map(text, alone)]
    assert pair.client.handoffs.num_ended == {"transferred": count}
    assert pair.client.num_resumed_requests == 0
    decode = pair.engines["D"].scheduler.stats()
    assert decode.failed_fetches == 0
    assert decode.fetched_tokens == sum(map(len, given))
    pair.check_empty()
    one.check_empty()


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ((1, 8), (2, 8)),
        ((2, 4), (1, 16)),
        pytest.param((2, 8), (1, 8), marks=pytest.mark.full),
        pytest.param((1, 16), (1, 8), marks=pytest.mark.full),
    ],
)
def test_stages_and_block_sizes_may_differ(
    prefill: tuple[int, int], decode: tuple[int, int]
) -> None:
    rig = KvCluster({"P": stages_of("P", *prefill), "D": stages_of("D", *decode)})
    given = prompts(8, seed=2)
    streams = [submit(rig, prompt) for prompt in given]
    rig.run(streams)
    assert [text(stream)[0] for stream in streams] == expected(*given)
    assert rig.engines["D"].scheduler.stats().fetched_tokens > 0
    rig.check_empty()


def test_numerics_may_differ_if_the_numbers_in_the_caches_do_not() -> None:
    """As they do for other numbers of ranks."""
    rig = KvCluster({})
    rig.attach("P", stages_of("P"), "x", lambda: "same")
    rig.attach("D", stages_of("D"), "x; 2 ranks", lambda: "same")
    given = prompts(8, seed=3)
    streams = [submit(rig, prompt) for prompt in given]
    rig.run(streams)
    assert [text(stream)[0] for stream in streams] == expected(*given)
    assert rig.client.handoffs.num_ended == {"transferred": 8}
    assert rig.client.numerics.num_inexact_migrations == 0
    rig.check_empty()


@pytest.mark.parametrize("state", STATES)
def test_tokens_stay_with_the_numerics_that_computed_them(state: HandoffState) -> None:
    """Of two decode engines of two ranks one is lost; the engine that prefills has one rank."""
    rig = KvCluster({})
    rig.attach("P", stages_of("P"), "x", lambda: "same")
    rig.attach("D", stages_of("D"), "x; 2 ranks", lambda: "same")
    rig.attach("E", stages_of("E"), "x; 2 ranks", lambda: "same")
    (whole,) = expected(list(range(5, 30)))
    stream = submit(rig, list(range(5, 30)))
    reach(rig, stream, state)
    rig.kill("D")
    rig.moves_kv = True
    rig.run([stream])
    assert text(stream)[0] == whole
    assert rig.client.numerics.num_inexact_migrations == 0
    has_computed = state in (HandoffState.TRANSFER, HandoffState.DECODE)
    assert rig.client.num_dispatched["E"] == has_computed
    rig.check_empty()


def test_blocks_that_nobody_fetches_delay_no_other_request() -> None:
    """As of a router of another project that has lost interest; no lease ends meanwhile."""
    rig = KvCluster({"one": load_stages(FOLDER, 1, 8, num_kv_tokens=MAX_MODEL_LEN)})
    given = [[3 + number] * 50 for number in range(4)]
    for prompt in given[:3]:
        handoff = KvHandoff(make_ticket(), is_ticket_foreign=True)
        rig.run([rig.client.submit(prompt, GREEDY, 1, [], handoff=handoff)])
    assert rig.engines["one"].scheduler.stats().held_blocks == 2 * 7, "the third took the blocks"
    stream = submit(rig, given[3])
    rig.run([stream])
    assert text(stream)[0] == expected(given[3])[0]
    assert rig.engines["one"].scheduler.stats().held_blocks <= 7


@pytest.mark.parametrize("digest", ["", "other"])
def test_no_blocks_of_other_numbers_are_fetched(digest: str) -> None:
    rig = KvCluster({})
    rig.attach("P", stages_of("P"), "x", lambda: "same")
    rig.attach("D", stages_of("D"), "y", lambda: digest)
    streams = [submit(rig, prompt) for prompt in prompts(3)]
    rig.run(streams)
    assert not rig.client.handoffs.num_ended
    rig.check_empty()


def reach(rig: KvCluster, stream: RequestStream, state: HandoffState) -> None:
    """Run until the hand-off of a request is in a state."""
    if state is HandoffState.TRANSFER:
        rig.moves_kv = False

    def has_state() -> bool:
        return rig.client.handoffs.state_of(stream) is state

    if state is HandoffState.READY:
        # Token 1 is not read.
        while not has_state():
            rig.step()
    else:
        rig.run([stream], until=has_state)
    assert has_state()


@covers_pairs(state=STATES, victim=["P", "D", "abort", "refuse"], sampling=[GREEDY, SAMPLED])
def test_a_death_at_each_state(
    state: HandoffState, victim: str, sampling: SequenceSamplingParams
) -> None:
    rig = cluster()
    (prompt,) = prompts(1, seed=3)
    stream = submit(rig, prompt, sampling)
    reach(rig, stream, state)
    hurt(rig, stream, victim)
    rig.run([stream])
    if victim != "abort":
        assert text(stream) == expected(prompt, sampling=sampling)
    rig.check_empty()


def test_the_text_of_token_1_may_end_the_request() -> None:
    rig = cluster()
    (prompt,) = prompts(1, seed=4)
    stream = submit(rig, prompt)
    reach(rig, stream, HandoffState.READY)
    rig.client.abort(stream, [0])
    for _ in range(5):
        rig.step()
    assert rig.client.num_dispatched == {"P": 1}
    assert rig.client.handoffs.num_ended == {"ended": 1}
    rig.check_empty()


def test_requests_that_stay_on_one_engine() -> None:
    """Several choices of one token's prompt, scored prompts, and requests of one token."""
    rig = cluster()
    scored = SequenceSamplingParams(temperature=0, prompt_logprobs=1)
    streams = [
        submit(rig, [5], SAMPLED, n=3),
        submit(rig, [5, 6, 7], scored),
        rig.client.submit([5, 6, 7], GREEDY, 1, []),
    ]
    rig.run(streams)
    assert not rig.client.handoffs.num_ended
    assert set(rig.client.num_dispatched) == {"D"}
    rig.check_empty()


@pytest.mark.parametrize("stop_ids", [[], list(range(2048))], ids=["on", "stop"])
def test_several_choices_share_one_prefill_and_one_fetch(stop_ids: list[int]) -> None:
    """C9: the last token of the prompt is computed by the engine that decodes, and forked there.

    With all ids as stop ids the engine that prefills holds nothing.
    """
    one, pair = cluster("one"), cluster()
    given = prompts(4, seed=5)
    streams = [
        [rig.client.submit(prompt, SAMPLED, MAX_TOKENS, stop_ids, 3) for prompt in given]
        for rig in (one, pair)
    ]
    one.run(streams[0])
    pair.run(streams[1])
    assert [*map(text, streams[1])] == [*map(text, streams[0])]
    assert len(set(map(tuple, text(streams[1][0])))) > 1
    figures = [pair.engines[name].scheduler.stats() for name in ("P", "D")]
    assert figures[1].fetched_tokens == (0 if stop_ids else sum(map(len, given)) - len(given))
    assert figures[0].prefill_tokens == sum(map(len, given))
    assert pair.client.handoffs.num_ended == {"transferred": 4}
    assert pair.client.num_resumed_requests == 0
    pair.check_empty()


def count_cached(rig: KvCluster, stream: RequestStream) -> list[int]:
    """Run a request; return the cached tokens that its choices report."""
    counts: dict[int, int] = {}
    while stream.alive or stream.deltas:
        rig.step()
        counts |= {
            choice: delta.first.num_cached_tokens
            for choice, delta in stream.pop_deltas().items()
            if delta.first is not None
        }
        rig.client.continue_handoffs()
    return [counts[choice] for choice in range(stream.entry.n)]


@pytest.mark.parametrize("n", [1, 3])
def test_cached_tokens_are_those_of_the_engine_that_prefills(n: int) -> None:
    rig = cluster()
    prompt = list(range(10, 45))
    assert count_cached(rig, submit(rig, prompt, n=n)) == [0] * n
    rig.engines["D"].scheduler.reset_prefix_cache()
    assert count_cached(rig, submit(rig, prompt, n=n)) == [32] * n
    assert rig.engines["P"].scheduler.stats().prefix_hits == 32
    rig.check_empty()


def test_cached_tokens_of_a_foreign_hand_off_are_those_of_its_grant() -> None:
    rig = cluster("one")
    handoff = KvHandoff(num_cached_tokens=17)
    stream = rig.client.submit(list(range(10, 45)), GREEDY, 4, [], handoff=handoff)
    assert count_cached(rig, stream) == [17]


@pytest.mark.parametrize("victim", ["P", "D", "abort", "refuse"])
@pytest.mark.parametrize("state", [HandoffState.PREFILL, HandoffState.TRANSFER])
def test_a_death_with_several_choices(state: HandoffState, victim: str) -> None:
    one, rig = cluster("one"), cluster()
    (prompt,) = prompts(1, seed=6)
    alone, stream = [submit(each, prompt, SAMPLED, n=2) for each in (one, rig)]
    one.run([alone])
    reach(rig, stream, state)
    hurt(rig, stream, victim)
    rig.run([stream])
    if victim != "abort":
        assert text(stream) == text(alone)
    rig.check_empty()


def test_an_error_of_the_prefill_ends_all_choices() -> None:
    rig = cluster()
    (prompt,) = prompts(1, seed=7)
    stream = submit(rig, prompt, SAMPLED, n=3)
    reach(rig, stream, HandoffState.PREFILL)
    failed = FinishedSequence(min(stream.entry.seqs.values()), "error", error="no memory")
    outcome = StepOutput([], [], [], [failed])
    rig.client.on_outputs("P", EngineOutputs(outcome, SchedulerStats()))
    ends = [delta.end for delta in stream.pop_deltas().values()]
    assert [end and end.error for end in ends] == ["no memory"] * 3
    assert not stream.alive
    rig.run([stream])


@pytest.mark.parametrize("n", [1, 3])
def test_blocks_are_fetched_again_after_the_death_of_their_receiver(n: int) -> None:
    pair, rig = cluster(), cluster("P", "D", "E")
    given = prompts(6, seed=8)
    undisturbed, streams = (
        [submit(each, prompt, SAMPLED, n) for prompt in given] for each in (pair, rig)
    )
    pair.run(undisturbed)
    for stream in streams:
        reach(rig, stream, HandoffState.TRANSFER)
    num_prefilled = rig.engines["P"].scheduler.stats().prefill_tokens
    rig.kill("D")
    rig.moves_kv = True
    rig.run(streams)
    assert [*map(text, streams)] == [*map(text, undisturbed)]
    stats = {name: engine.scheduler.stats() for name, engine in rig.engines.items()}
    assert stats["P"].prefill_tokens == num_prefilled == sum(map(len, given))
    expected_stats = pair.engines["D"].scheduler.stats()
    assert stats["E"].fetched_tokens == expected_stats.fetched_tokens > 0
    assert stats["E"].prefill_tokens == expected_stats.prefill_tokens
    assert stats["E"].failed_fetches == 0
    assert rig.client.handoffs.num_ended == {"transferred": len(given)}
    rig.check_empty()


def hurt(rig: KvCluster, stream: RequestStream, victim: str) -> None:
    """Kill an engine, abort a request or let its fetch fail."""
    match victim:
        case "abort":
            rig.client.abort_streams([stream])
        case "refuse":
            for engine in rig.engines.values():
                for fetch in list(engine.fetches):
                    engine.end_fetch(fetch, False)
        case _:
            rig.kill(victim)
    rig.moves_kv = True


@pytest.mark.parametrize("seed", range(4))
def test_deaths_aborts_and_refusals_in_any_order(seed: int) -> None:
    rng = Random(seed)
    rig = cluster("P", "D", "E")
    given = prompts(12, seed=100 + seed)
    streams = [submit(rig, prompt) for prompt in given]
    aborted = set()
    for _ in range(60):
        rig.moves_kv = rng.random() < 0.7
        rig.step()
        for stream in streams:
            if rng.random() < 0.7:
                stream.pop_deltas()
        rig.client.continue_handoffs()
        if rng.random() < 0.1:
            for engine in rig.engines.values():
                for fetch in list(engine.fetches):
                    engine.end_fetch(fetch, rng.random() < 0.5)
        if rng.random() < 0.05 and len(rig.engines) > 1:
            rig.kill(rng.choice(sorted(rig.engines)))
        if rng.random() < 0.05:
            number = rng.randrange(len(streams))
            aborted.add(number)
            rig.client.abort_streams([streams[number]])
    rig.moves_kv = True
    rig.run(streams)
    for number, (whole, stream) in enumerate(zip(expected(*given), streams, strict=True)):
        (tokens,) = text(stream)
        assert tokens == (whole[: len(tokens)] if number in aborted else whole)
    rig.check_empty()
