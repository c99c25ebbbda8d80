"""KV that is fetched while its prompt is computed: same bytes and text, whatever dies when."""

import time
from collections.abc import Callable
from functools import cache
from random import Random
from typing import Any

import pytest
import torch

from gllm.messages.kv_transfer import CancelKvFetch, FetchKv, ServeKv
from gllm.messages.sampling import SequenceSamplingParams
from gllm.routing.handoff import HandoffState
from gllm.runtime.head.request_stream import RequestStream
from tests.support.engines.moving_engines import (
    CHUNKED,
    WAIT_SECONDS,
    MappedStages,
    MovingCluster,
    MovingEngine,
    closing,
)
from tests.support.text.grammar_writing import FOLDER

GREEDY = SequenceSamplingParams(temperature=0)
SAMPLED = SequenceSamplingParams(temperature=1, seed=11)
MAX_TOKENS, THETA = 6, 16
PROMPT = Random(1).choices(range(3, 2048), k=100)


@cache
def stages_of(
    name: str, kv_push: str = "layer", num_stages: int = 1, block_size: int = 8
) -> MappedStages:
    """Weights are loaded once per engine; each cluster has new drivers and movers over them."""
    return MappedStages(
        FOLDER, num_stages, block_size, kv_push=kv_push, kv_push_threshold=THETA, **CHUNKED
    )


def pair(kv_push: str = "layer", backend: str = "auto") -> MovingCluster:
    return MovingCluster({"P": stages_of("P", kv_push), "D": stages_of("D", kv_push)}, backend)


def submit(
    rig: MovingCluster,
    prompt: list[int],
    sampling: SequenceSamplingParams = GREEDY,
    n: int = 1,
) -> RequestStream:
    return rig.client.submit(prompt, sampling, MAX_TOKENS, [], n)


def text(stream: RequestStream) -> list[list[int]]:
    return [stream.entry.outputs[choice] for choice in range(stream.entry.n)]


@cache
def expected(prompt: tuple[int, ...], is_sampled: bool = False) -> list[list[int]]:
    """Return the output of a prompt on one engine."""
    with closing(MovingCluster({"one": stages_of("D")})) as rig:
        stream = submit(rig, list(prompt), SAMPLED if is_sampled else GREEDY)
        rig.run([stream])
        return text(stream)


def find_command(rig: MovingCluster, engine: str, kind: type[FetchKv] | type[ServeKv]) -> list:
    return [each for each in rig.engines[engine].commands if isinstance(each, kind)]


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_all_modes_give_identical_bytes(backend: str) -> None:
    """S6, with a prompt of three chunks."""
    contents = set()
    for mode in ("off", "chunk", "layer"):
        with closing(pair(mode, backend)) as rig:
            stream = submit(rig, PROMPT)
            rig.run([stream])
            assert text(stream) == expected(tuple(PROMPT))
            (fetch,) = find_command(rig, "D", FetchKv)
            assert fetch.is_per_layer == (mode != "off")
            assert (fetch.first_token, fetch.num_tokens) == (0, len(PROMPT))
            held = find_command(rig, "P", ServeKv)[-1]
            contents.add(rig.engines["P"].read_cache(held.block_ids, len(PROMPT)))
            contents.add(rig.engines["D"].read_cache(fetch.block_ids, len(PROMPT)))
            assert bool(rig.engines["P"].pushed) == (mode != "off")
            decode = rig.engines["D"].scheduler.stats()
            assert (decode.prefill_tokens, decode.failed_fetches) == (0, 0)
            assert decode.fetched_tokens == len(PROMPT)
            rig.check_empty()
    assert len(contents) == 1


@pytest.mark.parametrize(
    ("prefill", "decode"), [((1, 8), (2, 8)), ((2, 8), (1, 8)), ((1, 16), (1, 8))]
)
def test_stages_and_block_sizes_may_differ(
    prefill: tuple[int, int], decode: tuple[int, int]
) -> None:
    engines = {"P": stages_of("P", "layer", *prefill), "D": stages_of("D", "layer", *decode)}
    with closing(MovingCluster(engines)) as rig:
        stream = submit(rig, PROMPT)
        rig.run([stream])
        assert text(stream) == expected(tuple(PROMPT))
        assert rig.engines["D"].scheduler.stats().fetched_tokens == len(PROMPT)
        rig.check_empty()


@pytest.mark.parametrize(("num_tokens", "is_pushed"), [(THETA - 1, False), (THETA, True)])
def test_mode_follows_the_threshold(num_tokens: int, is_pushed: bool) -> None:
    """S7."""
    with closing(pair()) as rig:
        stream = submit(rig, PROMPT[:num_tokens])
        rig.run([stream])
        (fetch,) = find_command(rig, "D", FetchKv)
        assert fetch.is_per_layer == is_pushed == bool(rig.engines["P"].pushed)
        assert text(stream) == expected(tuple(PROMPT[:num_tokens]))
        rig.check_empty()


class WaitingStage:
    """Stage that goes on once the other engine has the layers before.

    All chunks but the last one have as many tokens as a step takes.
    """

    def __init__(self, rig: MovingCluster) -> None:
        stages = rig.engines["P"].stages
        assert isinstance(stages, MappedStages)
        (executor,), (layout,) = stages.executors, stages.layouts
        self.rig = rig
        self.num_layers = len(layout.layers)
        self.layer_bytes = layout.bytes_per_token // self.num_layers
        self.num_chunks = self.num_waits = 0
        self._stage, self._forward = executor.stage, executor.stage.forward
        self._stage.forward = self.forward  # type: ignore[method-assign]

    def restore(self) -> None:
        """Let the stage compute without waiting, as others use it."""
        del self._stage.forward

    def forward(
        self, inputs: Any, hidden: Any, kv: Any, on_layer: Callable[[int], None] | None = None
    ) -> torch.Tensor:
        """Compute a chunk; the last one is counted as a whole: see COUNTED_TOKENS."""
        first = CHUNKED["max_num_batched_tokens"] * self.num_chunks
        self.num_chunks += 1

        def record(num_layers: int) -> None:
            assert on_layer is not None
            on_layer(num_layers)
            self.wait(first, num_layers)

        return self._forward(inputs, hidden, kv, record if on_layer else None)

    def wait(self, first: int, num_layers: int) -> None:
        """Wait for layers of a chunk, which begins with this token, unless it is complete."""
        if num_layers == self.num_layers:
            return
        decode, chunk = self.rig.engines["D"], CHUNKED["max_num_batched_tokens"]
        least = (first * self.num_layers + chunk * num_layers) * self.layer_bytes
        end = time.monotonic() + WAIT_SECONDS
        while decode.count_fetched_bytes() < least:
            assert time.monotonic() < end, "no layer arrives before the next one"
            time.sleep(0.001)
        assert decode.count_fetched_bytes() == least
        self.num_waits += 1


def test_layers_arrive_while_the_next_ones_are_computed() -> None:
    """Before a layer of any chunk is computed, the layers before it are at the other engine."""
    with closing(pair()) as rig:
        waiting = WaitingStage(rig)
        try:
            stream = submit(rig, PROMPT)
            rig.run([stream])
        finally:
            waiting.restore()
        assert text(stream) == expected(tuple(PROMPT))
        assert waiting.num_waits == 2 * (waiting.num_layers - 1)
        total = len(PROMPT) * waiting.num_layers * waiting.layer_bytes
        assert [each.num_bytes for each in rig.fetched] == [total]
        rig.check_empty()


def test_many_prompts_have_the_text_of_one_engine() -> None:
    """With prompts on both sides of the threshold, and prefixes that are cached."""
    rng = Random(5)
    prompts = [PROMPT[: rng.randint(1, 30)] + PROMPT[rng.randint(30, 99) :] for _ in range(16)]
    with closing(pair()) as rig:
        streams = [submit(rig, prompt, SAMPLED) for prompt in prompts]
        rig.run(streams)
        assert [text(each) for each in streams] == [
            expected(tuple(prompt), True) for prompt in prompts
        ]
        assert rig.client.handoffs.num_ended == {"transferred": 16}
        assert 0 < len(rig.engines["P"].pushed) < 16
        rig.check_empty()


def test_several_choices_are_fetched_after_the_prompt() -> None:
    with closing(pair()) as rig:
        stream = submit(rig, PROMPT, SAMPLED, n=3)
        rig.run([stream])
        assert len({tuple(tokens) for tokens in text(stream)}) > 1
        (fetch,) = find_command(rig, "D", FetchKv)
        assert not fetch.is_per_layer
        rig.check_empty()


def reach(rig: MovingCluster, stream: RequestStream, is_there: Callable[[], bool]) -> None:
    rig.run([stream], until=is_there)
    assert is_there()


def cancel_fetches(engine: MovingEngine) -> None:
    """Cancel the fetches of an engine that have not ended."""
    for command in engine.commands:
        if isinstance(command, FetchKv):
            engine.mover.handle(CancelKvFetch(command.fetch))


@pytest.mark.parametrize(
    ("chunk", "victim"),
    [(1, "P"), (2, "D"), (2, "abort"), (1, "cancel"), (3, "cancel"), (2, "revoke")]
    + [
        pytest.param(*each, marks=pytest.mark.full)
        for each in [
            (2, "P"),
            (3, "P"),
            (1, "D"),
            (3, "D"),
            (1, "abort"),
            (3, "abort"),
            (2, "cancel"),
            (1, "revoke"),
            (3, "revoke"),
        ]
    ],
)
def test_a_death_while_the_prompt_is_pushed(chunk: int, victim: str) -> None:
    """S9 and D14: identical text after a death or a failure in any chunk, and no block is left."""
    with closing(pair()) as rig:
        stream = submit(rig, PROMPT)
        prefill, decode = rig.engines["P"], rig.engines["D"]
        reach(rig, stream, lambda: prefill.scheduler.stats().steps >= chunk)
        assert rig.client.handoffs.state_of(stream) in (
            HandoffState.PREFILL,
            HandoffState.TRANSFER,
            HandoffState.READY,
        )
        match victim:
            case "abort":
                rig.client.abort_streams([stream])
            case "cancel":
                cancel_fetches(decode)
            case "revoke":
                decode.scheduler.transfers.release(list(prefill.pushed))
            case _:
                rig.kill(victim)
        rig.run([stream])
        if victim != "abort":
            assert text(stream) == expected(tuple(PROMPT))
        rig.check_empty()


@pytest.mark.parametrize("kv_push", [pytest.param("off", marks=pytest.mark.full), "layer"])
def test_blocks_are_fetched_again_after_the_death_of_their_reader(kv_push: str) -> None:
    """P5: it dies in a transfer of 0.3 s; a pushed prompt's first chunk has been read by then."""
    engines = {name: stages_of(name, kv_push) for name in ("P", "D", "E")}
    with closing(MovingCluster(engines, "mock:0.001")) as rig:
        stream = submit(rig, PROMPT)
        decode, num_read = rig.engines["D"], 0
        if kv_push == "layer":
            layout = engines["P"].layouts[0]
            num_read = layout.bytes_per_token * CHUNKED["max_num_batched_tokens"]
        reach(rig, stream, lambda: decode.count_fetched_bytes() > num_read)
        rig.kill("D")
        rig.run([stream])
        assert text(stream) == expected(tuple(PROMPT))
        first, second = (rig.engines[name].scheduler.stats() for name in ("P", "E"))
        assert first.prefill_tokens == second.fetched_tokens == len(PROMPT)
        assert second.prefill_tokens == second.failed_fetches == 0
        assert rig.client.handoffs.num_ended == {"transferred": 1}
        rig.check_empty()


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(each, marks=pytest.mark.full) for each in (1, 2))]
)
def test_deaths_aborts_and_failures_in_any_order(seed: int) -> None:
    rng = Random(seed)
    engines = {name: stages_of(name) for name in ("P", "D", "E")}
    with closing(MovingCluster(engines)) as rig:
        prompts = [PROMPT[: rng.randint(1, 99)] for _ in range(8)]
        streams = [submit(rig, prompt) for prompt in prompts]
        aborted = set()
        for _ in range(60):
            rig.step()
            for stream in streams:
                if rng.random() < 0.7:
                    stream.pop_deltas()
            rig.client.continue_handoffs()
            if rng.random() < 0.1:
                for engine in rig.engines.values():
                    cancel_fetches(engine)
            if rng.random() < 0.03 and len(rig.engines) > 1:
                rig.kill(rng.choice(sorted(rig.engines)))
            if rng.random() < 0.05:
                number = rng.randrange(len(streams))
                aborted.add(number)
                rig.client.abort_streams([streams[number]])
        rig.run(streams)
        for number, (prompt, stream) in enumerate(zip(prompts, streams, strict=True)):
            (whole,), (tokens,) = expected(tuple(prompt)), text(stream)
            assert tokens == (whole[: len(tokens)] if number in aborted else whole)
        rig.check_empty()
