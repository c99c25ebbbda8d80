"""Request pipelines in simulated time: each request travels through the stages by itself.

Source: Helix (arXiv 2406.01566, section 3 "per-request pipelines", and the runtime that its authors
published, Thesys-lab/Helix-ASPLOS25). Its coordinator starts a prompt when it arrives, and the next
decode of a request as soon as the last token of this very request is back: there are no
micro-batches that wait for each other. Each stage of that runtime computes whatever has arrived:
all whole prompts up to a number of tokens, then the decodes; the output of each request is a
message of its own, sent first come, first served. On a line of stages all flow takes the one path
there is, so that nothing is left of its max-flow placement.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from gllm.pacing.traffic import TrafficClass
from gllm.scheduler.sequence import SchedulerRequest
from gllm.scheduler.stage_work import StageWork
from gllm.sim.costs.base import CostModel, TransferCost
from gllm.sim.event_loop import ARRIVAL, COMMIT, PIPELINE, EventLoop
from gllm.sim.link import MessageLink
from gllm.sim.pipeline import make_pipeline_links

MAX_PROMPT_TOKENS = 4096
"""Prompt tokens that a stage computes together: `max_num_batched_tokens` of Helix's workers."""
MAX_KV_SHARE = 0.9
"""Share of the KV cache that admitted requests may fill: Helix's high-water mark when serving."""


class TravelingRequest:
    """A request on its way: its prompt at first, then one decode after the other."""

    __slots__ = ("num_context_tokens", "num_generated", "request")

    def __init__(self, request: SchedulerRequest) -> None:
        self.request = request
        self.num_context_tokens = 0
        """Tokens in the KV cache of each stage that has computed the present round."""
        self.num_generated = 0

    @property
    def num_new_tokens(self) -> int:
        """Tokens that each stage computes in the present round."""
        return 1 if self.num_generated else len(self.request.prompt_token_ids)

    @property
    def num_kv_tokens(self) -> int:
        """Tokens for which the request needs KV cache in the end."""
        return len(self.request.prompt_token_ids) + self.request.max_tokens


def measure_work(batch: Sequence[TravelingRequest]) -> StageWork:
    """Return the work of requests that a stage computes together."""
    single = [each for each in batch if each.num_new_tokens == 1]
    chunks = [
        (each.num_context_tokens, each.num_new_tokens) for each in batch if each.num_new_tokens > 1
    ]
    return StageWork(
        0,
        sum(each.num_new_tokens for each in batch),
        tuple(chunks),
        len(single),
        sum(each.num_context_tokens + 1 for each in single),
        len(batch),
    )


class RequestStage:
    """Stage that computes the requests that have arrived: prompts, then decodes.

    Args:
        index: Number of the stage.
        loop: Clock.
        cost: Predictor of its times.
        on_computed: Called with the stage, the time and the requests of a batch.
    """

    def __init__(
        self,
        index: int,
        loop: EventLoop,
        cost: CostModel,
        on_computed: Callable[["RequestStage", float, list[TravelingRequest]], None],
    ) -> None:
        self.index = index
        self._loop, self._cost, self._on_computed = loop, cost, on_computed
        self._prompts: deque[TravelingRequest] = deque()
        self._decodes: list[TravelingRequest] = []
        self._forced_decodes: list[TravelingRequest] = []
        """Decodes that had arrived when the present batch of prompts began; they go next."""
        self._is_busy = False

    def receive(self, now: float, request: TravelingRequest) -> None:
        """Receive the token or the activations of a request."""
        if request.num_generated:
            self._decodes.append(request)
        else:
            self._prompts.append(request)
        if not self._is_busy:
            self._start_next(now)

    def _start_next(self, now: float) -> None:
        batch = self._forced_decodes
        self._forced_decodes = []
        if not batch:
            batch = self._pop_prompts()
            # Decodes that arrive while prompts are computed wait for a later round.
            decodes, self._decodes = self._decodes, []
            if batch:
                self._forced_decodes = decodes
            else:
                batch = decodes
        if not batch:
            return
        self._is_busy = True
        seconds = self._cost.stage_seconds(self.index, measure_work(batch), now)
        self._loop.push(now + seconds, PIPELINE, self._end, batch)

    def _pop_prompts(self) -> list[TravelingRequest]:
        """Remove and return prompts, the oldest first, up to MAX_PROMPT_TOKENS but at least one."""
        batch: list[TravelingRequest] = []
        num_tokens = 0
        while self._prompts:
            num_tokens += self._prompts[0].num_new_tokens
            if batch and num_tokens > MAX_PROMPT_TOKENS:
                break
            batch.append(self._prompts.popleft())
        return batch

    def _end(self, now: float, batch: list[TravelingRequest]) -> None:
        self._is_busy = False
        self._on_computed(self, now, batch)
        if not self._is_busy:
            self._start_next(now)


class RequestPipelines:
    """Coordinator and stages; the coordinator is beside the first stage.

    Args:
        num_stages: Number of stages.
        num_kv_tokens: Tokens that the KV cache of each stage holds.
        cost: Predictor of all times.
        on_added: Called with each request that arrives, and the time.
        on_token: Called with the id of a sequence that has a new token, and the time.
        link_policy: An argument of `make_link_policy`, for every link.

    Raises:
        ValueError: The link policy is unknown.
    """

    def __init__(
        self,
        num_stages: int,
        num_kv_tokens: int,
        cost: CostModel,
        on_added: Callable[[SchedulerRequest, float], None],
        on_token: Callable[[int, float], None],
        link_policy: str = "serial",
    ) -> None:
        self.loop = EventLoop()
        self._cost, self._on_added, self._on_token = cost, on_added, on_token
        links = make_pipeline_links(self.loop, num_stages, link_policy)
        self._links: Sequence[MessageLink] = [*links.activations, links.results]
        self._stages = [
            RequestStage(index, self.loop, cost, self._on_computed) for index in range(num_stages)
        ]
        self._max_kv_tokens = int(MAX_KV_SHARE * num_kv_tokens)
        self._num_kv_tokens = 0
        """Tokens of the admitted requests, output included."""
        self._waiting: deque[TravelingRequest] = deque()

    def submit_each(self, requests: Iterable[tuple[float, SchedulerRequest]]) -> None:
        """Submit requests at their times in seconds, sorted by time.

        Raises:
            ValueError: From the loop: a request never fits into the KV cache.
        """
        self.loop.push_each(requests, ARRIVAL, self._on_arrival)

    def _on_arrival(self, now: float, request: SchedulerRequest) -> None:
        traveling = TravelingRequest(request)
        if traveling.num_kv_tokens > self._max_kv_tokens:
            raise ValueError(
                f"a request of {traveling.num_kv_tokens} tokens never fits into a KV cache of "
                f"which {self._max_kv_tokens} may be filled: raise num_kv_tokens"
            )
        self._on_added(request, now)
        self._waiting.append(traveling)
        self._admit(now)

    def _admit(self, now: float) -> None:
        """Start requests in their order, as far as the KV cache has room for all their tokens."""
        while self._waiting:
            num_tokens = self._num_kv_tokens + self._waiting[0].num_kv_tokens
            if num_tokens > self._max_kv_tokens:
                return
            self._num_kv_tokens = num_tokens
            self._launch(now, self._waiting.popleft())

    def _launch(self, now: float, request: TravelingRequest) -> None:
        """Start a round of a request at the first stage."""
        seconds = self._cost.plan_seconds(measure_work([request]))
        self.loop.push(now + seconds, PIPELINE, self._stages[0].receive, request)

    def _on_computed(self, stage: RequestStage, now: float, batch: list[TravelingRequest]) -> None:
        """Send the output of each request by itself."""
        is_last = stage.index == len(self._stages) - 1
        seconds = self._cost.return_seconds(measure_work(batch)) if is_last else 0.0
        for request in batch:
            work = measure_work([request])
            if is_last:
                transfer = self._cost.return_transfer(work)
                item = request, stage.index, transfer
                self.loop.push(now + seconds, PIPELINE, self._send, item)
            else:
                transfer = self._cost.activation_transfer(stage.index, work)
                self._send(now, (request, stage.index, transfer))

    def _send(self, now: float, item: tuple[TravelingRequest, int, TransferCost]) -> None:
        """Send a request from a stage to the next one, or its token to the coordinator."""
        request, index, transfer = item
        is_last = index == len(self._stages) - 1
        receive = self._on_returned if is_last else self._stages[index + 1].receive
        rank = COMMIT if is_last else PIPELINE
        if transfer.is_free:
            self.loop.push(now, rank, receive, request)
            return
        is_decode = request.num_new_tokens == 1
        traffic_class = TrafficClass.DECODE if is_decode or is_last else TrafficClass.PREFILL
        self._links[index].send(traffic_class, transfer, receive, request, rank=rank)

    def _on_returned(self, now: float, request: TravelingRequest) -> None:
        """Receive a token, and start the next decode of its request."""
        request.num_context_tokens += request.num_new_tokens
        request.num_generated += 1
        self._on_token(request.request.seq, now)
        if request.num_generated < request.request.max_tokens:
            self._launch(now, request)
        else:
            self._num_kv_tokens -= request.num_kv_tokens
            self._admit(now)
