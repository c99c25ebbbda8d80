"""An engine without a model: it says what a test tells it to.

Owns the scripted behaviour. Knows nothing of HTTP.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from msgspec.structs import replace

from gllm.config.sampling import SamplingParams
from gllm.engine.fleet_control import FleetControl
from gllm.engine.interface import (
    EngineStatus,
    KvParticipant,
    ModelInfo,
    OutputDelta,
    ProfileError,
    RoleSwitchError,
)
from gllm.engine.request_checks import check_request, truncate_prompt
from gllm.messages.handoff import KvHandoff
from gllm.messages.kv_disk import KvDiskTotals
from gllm.messages.kv_transfer import KvTransferTotals
from gllm.messages.node_report import NodeReport
from gllm.messages.nodes import LinkState, NodeLoad
from gllm.messages.reports import BubbleReport, StageUtilization
from gllm.messages.requests import ErrorKind
from gllm.messages.sampling import TokenLogprobs
from gllm.options.slo import Slo
from gllm.routing.lengths.accuracy import BucketAccuracy
from gllm.scheduler.plan import SchedulerStats
from gllm.text.detokenizer import IncrementalDetokenizer, StopStrings
from gllm.text.grammar.sources.structured_output import to_grammar_source
from gllm.text.tokenizer import Tokenizer


@dataclass
class Call:
    """What it was asked to generate."""

    prompt: list[int]
    params: SamplingParams
    priority: int
    cache_salt: str
    request_id: str = ""
    slo: Slo | None = None
    session: str = ""
    handoff: KvHandoff | None = None
    client: str = ""
    aborted: bool = False
    closed: bool = False
    finished: bool = False


def scored(token: int, top: int | None) -> list[TokenLogprobs]:
    """A made-up log-probability of -token / 8, behind `top` others; none without `top`."""
    if top is None:
        return []
    others = [(token + i) % 250 + 5 for i in range(1, top + 1)]
    return [TokenLogprobs(token, -token / 8, 50, others, [-i / 8 for i in range(top)])]


class FakeRequest:
    """Runs a script of deltas, each in a turn of the loop of its own."""

    def __init__(
        self, engine: "FakeEngine", call: Call, script: AsyncGenerator[OutputDelta, None]
    ) -> None:
        self._engine, self._call, self._script = engine, call, script
        self._left = set(range(call.params.n))
        self._deltas: dict[int, list[OutputDelta]] = {}
        self._error: Exception | None = None
        self._news: Callable[[], object] = bool
        engine.num_requests += 1
        self._task = asyncio.create_task(self._run())

    def set_listener(self, listener: Callable[[], None]) -> None:
        self._news = listener

    @property
    def num_resumptions(self) -> int:
        return self._engine.num_resumptions

    def pop_deltas(self) -> list[OutputDelta]:
        if self._error is not None:
            raise self._error
        taken, self._deltas = self._deltas, {}
        return [joined(deltas) for deltas in taken.values()]

    def close(self) -> None:
        self._task.cancel()
        self._call.closed = True
        self._engine.num_requests -= 1

    async def _run(self) -> None:
        try:
            async for delta in self._script:
                self._bring(self._with_hold(delta))
                self._left -= {delta.index} if delta.finish_reason else set()
                if self._call.aborted:
                    for index in self._left:
                        self._bring(OutputDelta(index, "", [], "abort"))
                    return
                self._call.finished = not self._left
                await asyncio.sleep(0)
        except RuntimeError as error:
            self._error = error
            self._news()

    def _with_hold(self, delta: OutputDelta) -> OutputDelta:
        """A delta that says what is held, as a scheduler does at an end by length."""
        handoff = self._call.handoff
        if handoff is None or not handoff.ticket or delta.finish_reason != "length":
            return delta
        return replace(delta, num_held_tokens=len(self._call.prompt))

    def _bring(self, delta: OutputDelta) -> None:
        was_empty = not self._deltas
        self._deltas.setdefault(delta.index, []).append(delta)
        if was_empty:
            self._news()


def joined(deltas: list[OutputDelta]) -> OutputDelta:
    """Consecutive deltas of one choice as one."""
    return replace(
        deltas[-1],
        text="".join(delta.text for delta in deltas),
        token_ids=[token for delta in deltas for token in delta.token_ids],
        cached_tokens=deltas[0].cached_tokens,
        logprobs=[entry for delta in deltas for entry in delta.logprobs],
        prompt_logprobs=deltas[0].prompt_logprobs,
    )


def node_report(name: str = "head", **fields: Any) -> NodeReport:
    """A machine of which everything is known."""
    load = NodeLoad(0.5, 2**30, [0.25, None], 150.0, 60.0)
    known: dict[str, Any] = {
        "state": "member", "rank": 0, "host_name": name, "system": "Linux 6", "version": "1",
        "address": "10.0.0.1", "devices": ["A", "B"], "load": load, "stages": [0],
        "round_trip_seconds": 0.002, "clock_offset_seconds": -1.5,
        "links": [
            LinkState(0, "other", "tcp+tls", True, 1000, "", 0, True, "molink", 1e6, 0.01)
        ],
    }  # fmt: skip
    return NodeReport(name=name, **(known | fields))


@dataclass
class FakeEngine:
    """Answers every choice with `reply`, one token at a time."""

    tokenizer: Tokenizer
    reply: str = "Hello wörld 🎉, how are you?"
    delay: float = 0.0
    fail_after: int | None = None
    """Tokens after which every choice ends with an error."""
    raises: Exception | None = None
    """Raised by whatever it is asked to do."""
    raises_after: int | None = None
    """Tokens after which the request raises."""
    cached_tokens: int = 3
    guesses: tuple[int, int] = (0, 0)
    """Draft tokens of each choice that were right, and that were not used."""
    fail_text: str = "logits are not finite"
    """Error with which choices end."""
    fail_kind: ErrorKind = ""
    """Kind of the error with which choices end."""
    state: str = "ready"
    is_asleep: bool = False
    """It sleeps, whatever the state."""
    cause: str = ""
    recovering_since: float | None = None
    recovery_cause: str = ""
    is_recovery_overdue: bool = False
    recoveries: dict[str, int] = field(default_factory=dict)
    recovery_seconds: list[float] = field(default_factory=list)
    recovery_phase_seconds: dict[str, float] = field(default_factory=dict)
    num_resumed_requests: int = 0
    num_stale_frames: int = 0
    num_resumptions: int = 0
    """As often every request says it was resumed."""
    well: bool = True
    stats: SchedulerStats = field(
        default_factory=lambda: SchedulerStats(running=2, waiting=1, kv_usage=0.25)
    )
    step_sizes: Mapping[int, int] = field(default_factory=lambda: {1: 4, 8: 2})
    rank_loads: Mapping[tuple[int, int], StageUtilization] = field(
        default_factory=lambda: {
            (0, 0): StageUtilization(0, 10, 3.0),
            (1, 0): StageUtilization(1, 10, 2.0, 0.5, 7),
        }
    )
    bubbles: BubbleReport = field(default_factory=lambda: BubbleReport([0.5, 1.0], 4.0))
    calls: list[Call] = field(default_factory=list)
    defaults: dict[str, float] = field(default_factory=dict)
    num_requests: int = 0
    drain_answers: dict[str, str | Exception] = field(default_factory=dict)
    """Answer to the drain of each machine."""
    asked: list[str] = field(default_factory=list)
    """What it was asked besides generating."""
    profile_error: str = ""
    max_model_len: int = 256
    fleet: FleetControl | None = None
    role: str = "mixed"
    has_routers: bool = False
    root: str = ""
    """Path of the model, which is an alias of its name."""
    tensor_parallel_size: int | None = 1
    node_reports: list[NodeReport] = field(default_factory=lambda: [node_report()])
    num_node_losses: int = 0
    num_malformed_frames: int = 0
    refused_peers: dict[str, int] = field(default_factory=dict)
    num_routers: int | None = None
    unattached_cause: str = ""
    kv_disk: KvDiskTotals | None = None
    length_predictor: str = ""
    output_lengths: Sequence[BucketAccuracy] = ()
    kv_transfers: KvTransferTotals | None = field(default_factory=KvTransferTotals)
    participant: KvParticipant | None = None
    """Its part in hand-offs."""
    released: list[int] = field(default_factory=list)
    """Tickets that were released."""

    @property
    def model(self) -> ModelInfo:
        vocab = self.tokenizer.vocab_size
        return ModelInfo(
            "fake/model",
            self.max_model_len,
            vocab,
            (0,),
            self.defaults,
            1_700_000_000,
            self.root,
            "LlamaForCausalLM",
            bool(self.root),
        )

    @property
    def accepts_requests(self) -> bool:
        is_parking = self.state == "recovering" and not self.is_recovery_overdue
        is_parking &= not self.is_asleep
        return self.state == "ready" or is_parking

    def status(self) -> EngineStatus:
        return EngineStatus(
            state=self.state,
            is_sleeping=self.is_asleep or self.state == "sleeping",
            cause_of_death=self.cause,
            is_healthy=self.well and self.state != "dead",
            num_requests=self.num_requests,
            stats=self.stats,
            step_sizes=self.step_sizes,
            stage_loads={stage: load for (stage, r), load in self.rank_loads.items() if r == 0},
            rank_loads=self.rank_loads,
            bubbles=self.bubbles,
            num_kv_blocks=64,
            kv_cache_bytes=2**20,
            block_size=16,
            epoch=1 + sum(self.recoveries.values()),
            num_routers=self.num_routers,
            unattached_cause=self.unattached_cause,
            recovering_since=self.recovering_since,
            recovery_cause=self.recovery_cause,
            is_recovery_overdue=self.is_recovery_overdue,
            recoveries=self.recoveries,
            recovery_seconds=self.recovery_seconds,
            recovery_phase_seconds=self.recovery_phase_seconds,
            num_resumed_requests=self.num_resumed_requests,
            num_stale_frames=self.num_stale_frames,
            num_node_losses=self.num_node_losses,
            num_malformed_frames=self.num_malformed_frames,
            kv_transfers=self.kv_transfers,
            kv_disk=self.kv_disk,
            length_predictor=self.length_predictor,
            output_lengths=self.output_lengths,
            tensor_parallel_size=self.tensor_parallel_size,
            refused_peers=self.refused_peers,
        )

    async def start(self) -> None:
        if self.raises is not None:
            raise self.raises
        self.state = "ready"

    async def wait_until_dead(self) -> None:
        while self.state != "dead":
            await asyncio.sleep(0.005)

    async def drain(self, seconds: float) -> None:
        self.state = "draining"

    async def stop(self) -> None:
        self.state = "dead"

    async def submit(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        request_id: str = "",
        slo: Slo | None = None,
        session: str = "",
        client: str = "",
        handoffs: Sequence[KvHandoff] = (),
    ) -> "list[FakeRequest]":
        prompts = [truncate_prompt(prompt, params, self.model) for prompt in prompts]
        for prompt in prompts:
            check_request(prompt, params, self.model)
        if params.structured is not None:
            to_grammar_source(params.structured)
        given = (params, priority, cache_salt, request_id, slo, session)
        parts = zip_longest(prompts, handoffs)
        calls = [Call(prompt, *given, handoff, client) for prompt, handoff in parts]
        self.calls += calls
        if self.raises is not None:
            for call in calls:
                call.closed = True
            raise self.raises
        return [FakeRequest(self, call, self.script(call.prompt, params)) for call in calls]

    async def embed(
        self,
        prompt: str | list[int],
        *,
        priority: int = 0,
        cache_salt: str = "",
        request_id: str = "",
    ) -> list[float]:
        """Eight numbers that the first token decides."""
        if self.raises is not None:
            raise self.raises
        self.num_requests += 1
        try:
            await asyncio.sleep(self.delay)
        finally:
            self.num_requests -= 1
        return [float(prompt[0]), 3.0, 4.0, 0.0, 0.0, 0.0, 0.0, 12.0]

    def abort(self, request_id: str | None) -> int:
        named = [call for call in self.calls if request_id in (None, call.request_id)]
        running = [call for call in named if not call.closed]
        for call in running:
            call.aborted = True
        return len(running)

    async def sleep(self, keeps_prefix_cache: bool = False) -> None:
        self.state = "sleeping"
        while self.num_requests and self.state == "sleeping":
            await asyncio.sleep(0.005)
        self.asked.append("sleep 0" if keeps_prefix_cache else "sleep 1")

    def wake_up(self) -> None:
        self.state = "ready"
        self.asked.append("wake_up")

    async def reset_prefix_cache(self) -> None:
        self.asked.append("reset_prefix_cache")

    async def start_profile(self, folder: str) -> None:
        if self.profile_error:
            raise ProfileError(self.profile_error)
        self.asked.append(f"start_profile {folder}")

    async def stop_profile(self) -> None:
        if self.profile_error:
            raise ProfileError(self.profile_error)
        self.asked.append("stop_profile")

    def nodes(self) -> list[NodeReport]:
        return self.node_reports

    def drain_node(self, name: str) -> str:
        if isinstance(answer := self.drain_answers[name], Exception):
            raise answer
        self.asked.append(f"drain {name}")
        return answer

    def set_role(self, role: str) -> str:
        if not self.has_routers:
            raise RoleSwitchError("the engine has no routers")
        before, self.role = self.role, role
        return before

    def kv_participant(self) -> KvParticipant | None:
        return self.participant

    def release_kv(self, tickets: list[int]) -> None:
        self.released += tickets

    def describe(self) -> dict[str, Any]:
        return {"state": self.state}

    async def script(
        self, prompt: list[int], params: SamplingParams
    ) -> AsyncGenerator[OutputDelta, None]:
        """The choices' tokens in turn, as a pipeline would bring them."""
        ids = self.tokenizer.encode(self.reply)
        limit = min(params.max_tokens or self.max_model_len, len(ids))
        shown: tuple[Any, ...] = (
            StopStrings(params.stop),
            params.skip_special_tokens,
            params.include_stop_str_in_output,
        )
        shown += (params.shown_tokens, 0, prompt if params.continues_prompt else ())
        streams = {i: IncrementalDetokenizer(self.tokenizer, *shown) for i in range(params.n)}
        before = [entry for token in prompt[1:] for entry in scored(token, params.prompt_logprobs)]
        for at in range(limit):
            while self.state == "recovering":
                await asyncio.sleep(0.005)
            if self.delay:
                await asyncio.sleep(self.delay)
            if at == self.raises_after:
                raise RuntimeError("a secret of the inside")
            for index in list(streams):
                cached = self.cached_tokens if at == 0 else 0
                if at == self.fail_after:
                    failed = OutputDelta(index, "", [], "error", None, self.fail_text)
                    yield replace(failed, error_kind=self.fail_kind, cached_tokens=cached)
                    return
                text, _, stop = streams[index].push([ids[at]])
                reason = "stop" if stop is not None or at + 1 == len(ids) else None
                reason = reason or ("length" if at + 1 == limit else None)
                if reason is not None:
                    text += "" if stop is not None else streams[index].finish()
                    del streams[index]
                logprobs = scored(ids[at], params.logprobs)
                told = (logprobs, [] if at else before)
                delta = OutputDelta(index, text, [ids[at]], reason, stop, "", cached, 0.0, *told)
                if reason is not None:
                    right, unused = self.guesses
                    delta = replace(delta, num_accepted_guesses=right, num_rejected_guesses=unused)
                yield delta
