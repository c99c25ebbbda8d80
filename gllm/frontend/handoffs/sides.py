"""Prefill side and decode side of a request under the routers of vLLM and SGLang.

If the transfer of the KV blocks fails, the decode engine computes the prompt itself.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from gllm.config.sampling import SamplingParams
from gllm.engine.interface import EngineInterface, OutputDelta, RequestHandle
from gllm.frontend.handoffs.access import ControlAccess
from gllm.frontend.handoffs.grant import (
    VERSION,
    GrantError,
    GrantSealer,
    HeldPrompt,
    KvGrant,
    digest_tokens,
)
from gllm.frontend.handoffs.rooms import RoomClient, RoomTable
from gllm.frontend.metrics import LabeledCounter
from gllm.messages.handoff import KvHandoff, KvSource, make_ticket

log = logging.getLogger(__name__)

OUTCOMES = (
    ("prefill", "held"),
    ("prefill", "not_held"),
    ("decode", "granted"),
    ("decode", "no_grant"),
    ("decode", "unfit_grant"),
)
"""Sides of a hand-off and their outcomes. `granted`: the KV blocks may be fetched; with `no_grant`
and `unfit_grant` the decode engine computes the prompt."""


@dataclass
class HandoffContext:
    """State of an engine for disaggregated prefill under vLLM's or SGLang's router."""

    engine: EngineInterface
    access: ControlAccess
    sealer: GrantSealer
    client: RoomClient
    outcomes: LabeledCounter
    """Counter of requests by side (prefill or decode) and outcome, pairs of OUTCOMES."""
    rooms: RoomTable = field(default_factory=RoomTable)


class HandoffSubmitter(ABC):
    """Base class: submits a request to its engine as one side of disaggregated prefill.

    The prefill side computes the prompt; the decode side fetches its KV blocks and decodes.
    """

    def __init__(self, context: HandoffContext) -> None:
        self._context = context
        self._engine = context.engine

    def limit(self, params: SamplingParams) -> SamplingParams:
        """Return the sampling parameters with which this side runs the request."""
        return params

    @abstractmethod
    async def submit(
        self, prompts: Sequence[list[int]], params: SamplingParams, **options: Any
    ) -> Sequence[RequestHandle]:
        """Submit the requests to the engine, with permission to send or fetch their KV blocks.

        Like `EngineInterface.submit`. Without KV blocks to transfer they are ordinary requests.
        """

    def close(self) -> None:
        """Release the resources of this side, even if its prompts are still running."""
        return


class PrefillRequestHandle:
    """Wraps the engine's handle of a prompt on the prefill side, to report the end of the prefill.

    Args:
        handle: Handle of the engine's request.
        on_ended: Called with the number of prompt tokens whose KV blocks the engine keeps, and of
            those that were in its prefix cache.
    """

    def __init__(self, handle: RequestHandle, on_ended: Callable[[int, int], None]) -> None:
        self._handle = handle
        self._on_ended = on_ended
        self._num_cached_tokens = 0
        self.set_listener = handle.set_listener
        self.close = handle.close

    @property
    def num_resumptions(self) -> int:
        """Number of times that the request was resubmitted after a recovery of the engine."""
        return self._handle.num_resumptions

    def pop_deltas(self) -> list[OutputDelta]:
        """Return the new output deltas; call `on_ended` if the last one is among them."""
        deltas = self._handle.pop_deltas()
        for delta in deltas:
            self._num_cached_tokens += delta.cached_tokens
            if delta.finish_reason is not None:
                self._on_ended(delta.num_held_tokens, self._num_cached_tokens)
        return deltas


class PrefillHandoff(HandoffSubmitter):
    """Prefill side: computes one token per prompt and keeps the KV blocks for the decode engine.

    Args:
        context: State of the engine's KV transfers over HTTP.
        publish: Called once with the signed text that permits the decode engine to fetch the KV
            blocks, or with an empty text if no blocks are kept.
    """

    def __init__(self, context: HandoffContext, publish: Callable[[str], None]) -> None:
        super().__init__(context)
        self._publish = publish
        self._prompts: Sequence[list[int]] = ()
        self._tickets: list[int] = []
        self._held: dict[int, tuple[int, int]] = {}
        """Numbers of held and of cached tokens, by prompt."""
        self._num_ended = 0
        self._grant: str | None = None
        """None until all prompts have ended."""

    def limit(self, params: SamplingParams) -> SamplingParams:
        """Return parameters for one choice of one token: only the prompt's KV cache is needed."""
        return replace(params, n=1, max_tokens=1, min_tokens=min(params.min_tokens, 1))

    async def submit(
        self, prompts: Sequence[list[int]], params: SamplingParams, **options: Any
    ) -> Sequence[RequestHandle]:
        """Submit the requests; the engine keeps the KV blocks of their prompts."""
        participant = self._engine.kv_participant()
        if participant is None or not participant.endpoint:
            return await self._engine.submit(prompts, params, **options)
        self._prompts = prompts
        self._tickets = [make_ticket() for _ in prompts]
        handoffs = [KvHandoff(ticket, is_ticket_foreign=True) for ticket in self._tickets]
        handles = await self._engine.submit(prompts, params, handoffs=handoffs, **options)
        return [
            PrefillRequestHandle(handle, partial(self._on_ended, prompt))
            for prompt, handle in enumerate(handles)
        ]

    def close(self) -> None:
        """Free the KV blocks and publish an empty grant, unless all prompts have ended."""
        if self._grant is None:
            self._end("")
            # Also those of prompts that end before the engine knows of their abort.
            self._engine.release_kv(self._tickets)

    def _on_ended(self, prompt: int, num_held_tokens: int, num_cached_tokens: int) -> None:
        self._num_ended += 1
        if num_held_tokens:
            self._held[prompt] = num_held_tokens, num_cached_tokens
        if self._num_ended == len(self._prompts):
            self._end(self._seal())

    def _end(self, grant: str) -> None:
        self._grant = grant
        self._context.outcomes.count("prefill", "held" if grant else "not_held")
        self._publish(grant)

    def _seal(self) -> str:
        """Return the grant; empty if no blocks are held."""
        participant = self._engine.kv_participant()
        if participant is None or not participant.endpoint or not self._held:
            return ""
        held: list[HeldPrompt | None] = []
        for number, prompt in enumerate(self._prompts):
            if number not in self._held:
                held.append(None)
                continue
            num_held_tokens, num_cached_tokens = self._held[number]
            num_tokens = min(num_held_tokens, len(prompt))
            digest = digest_tokens(prompt[:num_tokens])
            held.append(HeldPrompt(self._tickets[number], num_tokens, digest, num_cached_tokens))
        return self._context.sealer.seal(
            KvGrant(
                VERSION,
                participant.engine,
                participant.run,
                participant.digest,
                participant.endpoint,
                held,
            )
        )


class DecodeHandoff(HandoffSubmitter):
    """Decode side: fetches the KV blocks of the prompts from the prefill engine, then decodes.

    If the blocks cannot be used, the engine computes the prompts.

    Args:
        context: State of the engine's KV transfers over HTTP.
        read_grant: Returns the signed text that permits to fetch the KV blocks; empty if there is
            none. May raise FieldError.
    """

    def __init__(self, context: HandoffContext, read_grant: Callable[[], Awaitable[str]]) -> None:
        super().__init__(context)
        self._read_grant = read_grant

    async def submit(
        self, prompts: Sequence[list[int]], params: SamplingParams, **options: Any
    ) -> Sequence[RequestHandle]:
        """Submit the requests; the engine fetches the KV blocks of their prompts.

        Raises:
            FieldError: A request field that names the prefill engine is invalid.
        """
        handoffs = await self._read_handoffs(prompts, params)
        return await self._engine.submit(prompts, params, handoffs=handoffs, **options)

    async def _read_handoffs(
        self, prompts: Sequence[list[int]], params: SamplingParams
    ) -> Sequence[KvHandoff]:
        """Return the source of each prompt's KV blocks; empty if the prompts are computed here."""
        text = await self._read_grant()
        if not text:
            self._context.outcomes.count("decode", "no_grant")
            return ()
        try:
            grant = self._context.sealer.unseal(text)
            self._check(grant, prompts, params)
        except GrantError as error:
            log.warning("a prompt that another engine has prefilled is computed here: %s", error)
            self._context.outcomes.count("decode", "unfit_grant")
            return ()
        self._context.outcomes.count("decode", "granted")
        return [KvHandoff() if held is None else _to_handoff(grant, held) for held in grant.prompts]

    def _check(self, grant: KvGrant, prompts: Sequence[list[int]], params: SamplingParams) -> None:
        """Raise GrantError if a request cannot use the KV blocks of a grant."""
        participant = self._engine.kv_participant()
        if participant is None or not participant.endpoint:
            raise GrantError("this engine has no KV cache for transfers at present")
        if grant.run == participant.run:
            self._engine.release_kv([held.ticket for held in grant.prompts if held is not None])
            raise GrantError("this engine has prefilled it itself")
        if grant.digest != participant.digest:
            raise GrantError("the engines differ in weights, dtypes or kernels")
        if params.prompt_logprobs is not None:
            raise GrantError("log-probabilities of the prompt need its computation")
        if len(grant.prompts) != len(prompts):
            raise GrantError(f"{len(grant.prompts)} prompts were prefilled, not {len(prompts)}")
        for held, prompt in zip(grant.prompts, prompts, strict=True):
            if held is not None and digest_tokens(prompt[: held.num_tokens]) != held.digest:
                raise GrantError("another prompt was prefilled")


def _to_handoff(grant: KvGrant, held: HeldPrompt) -> KvHandoff:
    source = KvSource(
        grant.engine, grant.run, held.ticket, held.num_tokens, grant.endpoint, is_foreign=True
    )
    return KvHandoff(0, source, num_cached_tokens=held.num_cached_tokens)
