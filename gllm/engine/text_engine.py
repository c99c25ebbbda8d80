"""Engine without computation: tokenizer, grammar compiler, requests, and text of their output.

Imports no torch: a backend computes.
"""

import asyncio
import logging
import secrets
import time
from array import array
from collections.abc import AsyncGenerator, Sequence
from itertools import zip_longest
from pathlib import Path
from random import Random
from typing import Any, Protocol, Self

from gllm.config.sampling import SamplingParams, StructuredOutput
from gllm.engine.fleet_control import FleetControl
from gllm.engine.interface import (
    EngineStatus,
    EngineUnavailableError,
    KvParticipant,
    ModelInfo,
    OutputDelta,
    PoisonRequestError,
    ProfileError,
    RoleSwitchError,
    UnknownNodeError,
    embedding_error,
)
from gllm.engine.request import BadWords, RequestState, build_sequence_params
from gllm.engine.request_checks import (
    check_can_generate,
    check_options,
    check_request,
    encode_prompt,
    truncate_prompt,
)
from gllm.messages.handoff import KvHandoff
from gllm.messages.node_report import NodeReport
from gllm.messages.sampling import SequenceSamplingParams
from gllm.models.config import ModelConfig, model_notes
from gllm.options.field_types import FieldError, to_str, to_token_ids
from gllm.options.slo import Slo
from gllm.runtime.head.deaths import EngineError
from gllm.runtime.head.request_client import RequestClient
from gllm.runtime.head.request_stream import RequestStream
from gllm.text.grammar.compiler import CompilerBusyError, GrammarCompiler
from gllm.text.tokenizer import Tokenizer


class Backend(Protocol):
    """Interface of a backend that runs requests of token ids, for `TextEngine`."""

    @property
    def client(self) -> RequestClient:
        """Client that submits and aborts requests."""

    @property
    def state(self) -> str:
        """Current state: loading, ready, recovering, sleeping, draining or dead."""

    @property
    def is_sleeping(self) -> bool:
        """True after `set_sleeping`, also while the backend recovers or drains."""

    @property
    def died(self) -> asyncio.Event:
        """Set when the backend is dead."""

    def status(self) -> EngineStatus:
        """Return a snapshot of state and counters."""

    def describe(self) -> dict[str, Any]:
        """Return configuration and state as JSON values."""

    @property
    def accepts_requests(self) -> bool:
        """True if requests run, or wait for the end of a recovery."""

    def check_ready(self) -> None:
        """Raise EngineUnavailableError unless the backend is ready."""

    def check_admission(
        self,
        prompts: Sequence[list[int]],
        max_tokens: int | None,
        priority: int,
        cache_salt: str,
        slo: Slo | None,
    ) -> None:
        """Raise OverloadedError for a request that is not likely to meet its SLO.

        Args:
            prompts: token ids of each prompt.
            max_tokens: most tokens to generate for each; None for as many as fit.
            priority: requests of lower values run first.
            cache_salt: cached prefixes are shared within one salt.
            slo: objectives; None for none.

        Raises:
            OverloadedError: the request is refused.
        """

    async def start(self) -> None:
        """Wait until requests can run. Raises EngineError."""

    async def drain(self, seconds: float) -> None:
        """Reject new requests and wait at most `seconds` for the running ones."""

    async def stop(self) -> None:
        """Stop; running requests end with an error."""

    def set_sleeping(self, is_on: bool) -> None:
        """Refuse new requests, or accept them again; running requests continue."""

    async def reset_prefix_cache(self) -> str:
        """Reset the prefix cache; return the error, empty on success."""

    async def start_profile(self, folder: str) -> str:
        """Start a profile on all stages; return the first error, empty on success."""

    async def stop_profile(self) -> str:
        """Stop the profile on all stages; return the first error, empty on success."""


log = logging.getLogger(__name__)


class TextEngine:
    """Base class of engines: tokenizes prompts, compiles grammars and detokenizes outputs.

    A backend runs the requests.
    """

    def __init__(
        self,
        backend: Backend,
        name: str,
        folder: Path,
        model: ModelConfig,
        max_model_len: int,
        chat_template: str | None,
        seed: int | None,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        """Load the tokenizer; `start` starts the backend.

        Args:
            backend: computes the requests.
            name: public name of the model.
            folder: folder with the model's tokenizer.
            model: the model's configuration.
            max_model_len: most tokens of prompt and output together.
            chat_template: file with the chat template; None for the model's own.
            seed: seed for sampling the seeds of requests without one; None for random seeds.
            grammars: compiles grammars; None for a compiler of this model.
        """
        self._backend = backend
        self.tokenizer = Tokenizer.load(folder, chat_template)
        for note in model_notes(model.model, max_model_len, bool(model.eos_ids)):
            log.warning("%s", note)
        self.model = ModelInfo(
            name=name,
            max_model_len=max_model_len,
            vocab_size=model.model.vocab_size,
            eos_ids=model.eos_ids,
            defaults=model.sampling,
            created=int(time.time()),
            architecture=model.architecture,
            is_embedding_only=model.model.is_bidirectional,
        )
        self._grammars = grammars or GrammarCompiler(folder, model.model.vocab_size, model.eos_ids)
        self._compiling: dict[asyncio.Future[str], str] = {}
        """Running grammar compilations and the ids of their requests; `abort` removes them."""
        self._client = backend.client
        self._seeds = secrets.SystemRandom() if seed is None else Random(seed)
        """Source of seeds for requests without one."""
        self._starting: asyncio.Task[None] | None = None
        """The start, which happens at most once."""
        self._stopping: asyncio.Task[None] | None = None
        """The end, which happens at most once."""

    @property
    def fleet(self) -> FleetControl | None:
        """None: an engine has no engines of its own; a router overrides it."""
        return None

    @property
    def role(self) -> str:
        """Role: mixed, because only an engine with routers can have another one."""
        return "mixed"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def state(self) -> str:
        """Current state: loading, ready, recovering, sleeping, draining or dead."""
        return self._backend.state

    @property
    def accepts_requests(self) -> bool:
        """True if new requests are accepted; during a recovery they wait for its end."""
        return self._backend.accepts_requests

    @property
    def num_requests(self) -> int:
        """Number of requests that have not ended."""
        return self._client.num_requests

    def status(self) -> EngineStatus:
        """Return a snapshot of the engine's state and counters."""
        return self._backend.status()

    async def wait_until_dead(self) -> None:
        """Wait until the engine is dead, after a failure or `stop`."""
        await self._backend.died.wait()

    async def start(self) -> None:
        """Start the backend and wait until it runs requests.

        Raises:
            EngineError: a worker failed, or the engine was started or stopped before.
        """
        if self._stopping is not None:
            raise EngineError("the engine was stopped: create another one")
        if self._starting is not None:
            raise EngineError(f"the engine was started before and is {self.state}")
        self._starting = asyncio.create_task(self._backend.start())
        try:
            await self._starting
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._is_stopped and task is not None and not task.cancelling():
                raise EngineError("the engine was stopped while it started") from None
            raise

    async def drain(self, seconds: float) -> None:
        """Reject new requests and wait at most `seconds` for the running ones."""
        await self._backend.drain(seconds)

    async def stop(self) -> None:
        """Stop the backend; running requests end with an error.

        All callers wait for the same end, and one that is cancelled does not interrupt it.
        """
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop())
        await asyncio.shield(self._stopping)

    @property
    def _is_stopped(self) -> bool:
        """True from the beginning of the end."""
        return self._stopping is not None

    async def _stop(self) -> None:
        if self._starting is not None and not self._starting.done():
            self._starting.cancel()
            await asyncio.wait([self._starting])
        try:
            await self._backend.stop()
        finally:
            await self._grammars.close()

    async def generate(
        self,
        prompt: str | list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        request_id: str = "",
    ) -> AsyncGenerator[OutputDelta, None]:
        """Generate the choices of a prompt; yield their deltas, interleaved.

        Closing the generator aborts the request.

        Args:
            prompt: Text or token ids.
            params: Sampling parameters.
            priority: Requests of lower values run first.
            cache_salt: Prefix-cache entries are shared only by requests with the same salt.
            request_id: Id by which `abort` finds the request.

        Raises:
            FieldError: The engine cannot run such a request.
            EngineUnavailableError: The engine accepts no requests at present.
        """
        if isinstance(prompt, str):
            text = to_str("prompt", prompt)
            prompt = await asyncio.to_thread(self._encode, text, params)
        (request,) = await self.submit(
            [prompt], params, priority=priority, cache_salt=cache_salt, request_id=request_id
        )
        try:
            while not request.is_finished:
                await request.wait()
                for delta in request.pop_deltas():
                    yield delta
        finally:
            request.close()

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
    ) -> list[RequestState]:
        """Start one request per prompt, all or none; each handle must be closed.

        In contrast to `generate`, the caller can read the deltas while the engine handles the step
        that produced them. Arguments and errors are those of `generate`.
        """
        priority, cache_salt = check_options(params, priority, cache_salt, request_id)
        prompts = [to_token_ids("prompt", prompt) for prompt in prompts]
        prompts = [truncate_prompt(prompt, params, self.model) for prompt in prompts]
        check_can_generate(self.model)
        for prompt in prompts:
            check_request(prompt, params, self.model)
        words: BadWords = ()
        if params.bad_words:
            words = await asyncio.to_thread(self._token_sequences, params.bad_words)
        self._check_accepting()
        self._backend.check_admission(prompts, params.max_tokens, priority, cache_salt, slo)
        grammar: str | None = ""
        if params.structured is not None:
            grammar = await self._compile_grammar(params.structured, request_id)
            self._check_accepting()
        # At the end of a grammar only EOS is allowed, so EOS has to end the output.
        ends = not params.ignore_eos or grammar
        stop_ids = {*params.stop_token_ids, *(self.model.eos_ids if ends else ())}
        streams: list[RequestStream] = []
        try:
            for prompt, handoff in zip_longest(prompts, handoffs):
                num_free = self.model.max_model_len - len(prompt)
                stream = self._client.submit(
                    prompt,
                    build_sequence_params(params, stop_ids, words, grammar or "", self._seeds),
                    min(params.max_tokens or num_free, num_free),
                    sorted(stop_ids),
                    params.n,
                    priority,
                    cache_salt,
                    request_id,
                    session,
                    slo,
                    handoff,
                    client,
                )
                streams.append(stream)
        except (TypeError, ValueError, OverflowError, PoisonRequestError) as error:
            for stream in streams:
                self._client.release(stream)
            if isinstance(error, PoisonRequestError):
                raise
            raise FieldError("params", f"the request cannot be sent: {error}") from error
        if grammar is None:
            self._client.abort_streams(streams)
        return [
            RequestState(self._client, stream, self.tokenizer, params, prompt)
            for stream, prompt in zip(streams, prompts, strict=True)
        ]

    async def embed(
        self,
        prompt: str | list[int],
        *,
        priority: int = 0,
        cache_salt: str = "",
        request_id: str = "",
    ) -> list[float]:
        """Return the embedding of a prompt.

        The embedding is the hidden state of the prompt's last token after the final norm,
        `hidden_size` numbers; of a model with bidirectional attention the mean over the prompt's
        tokens, after the dense layers of its folder.

        Raises:
            FieldError: The engine cannot run such a request.
            EngineUnavailableError: The engine accepts no requests at present.
            EmbeddingError: The embedding could not be computed.
        """
        params = SamplingParams(max_tokens=1, temperature=0)
        priority, cache_salt = check_options(params, priority, cache_salt, request_id)
        if isinstance(prompt, str):
            text = to_str("prompt", prompt)
            prompt = await asyncio.to_thread(self._encode, text, params)
        prompt = to_token_ids("prompt", prompt)
        check_request(prompt, params, self.model)
        self._check_accepting()
        # Each request samples a token; it is not used.
        sampling = SequenceSamplingParams(temperature=0, embeds=True)
        stream = self._client.submit(
            prompt,
            sampling,
            1,
            [],
            priority=priority,
            cache_salt=cache_salt,
            request_id=request_id,
        )
        embedding, end = b"", None
        try:
            while end is None:
                await stream.wait()
                piece = stream.pop_deltas()[0]
                embedding, end, kind = embedding or piece.embedding, piece.end, piece.error_kind
        finally:
            self._client.release(stream)
        if end.error or not embedding:
            raise embedding_error(end.error or "the request was aborted", kind)
        return array("f", embedding).tolist()

    def abort(self, request_id: str | None) -> int:
        """Abort the requests with this id, or all if it is None; return their number.

        Their choices finish with reason `abort`.
        """
        if self._backend.state not in ("ready", "recovering", "draining", "sleeping"):
            return 0
        compiling = [task for task, named in self._compiling.items() if request_id in (None, named)]
        for task in compiling:
            del self._compiling[task]
            task.cancel()
        return self._client.abort_request(request_id) + len(compiling)

    async def sleep(self, keeps_prefix_cache: bool = False) -> None:
        """Refuse new requests until `wake_up`, finish the running ones, reset the prefix cache.

        Weights and KV cache stay in memory. If a worker dies meanwhile, the requests are resumed
        and finished before this returns.

        Raises:
            EngineUnavailableError: The engine is not ready, or it was woken, drained or stopped
                meanwhile, or it does not recover in time.
        """
        backend = self._backend
        if not backend.is_sleeping:
            backend.check_ready()
        backend.set_sleeping(True)
        while True:
            while self._client.num_requests or backend.state == "recovering":
                self._check_sleeping()
                await asyncio.sleep(0.02)
            self._check_sleeping()
            cause = "" if keeps_prefix_cache else await backend.reset_prefix_cache()
            # After a death during the reset the next epoch is awaited.
            if backend.state != "recovering":
                break
        self._check_sleeping()
        if cause:
            raise EngineUnavailableError(backend.state, cause)

    def _check_sleeping(self) -> None:
        """Raise EngineUnavailableError if a sleep that waits for requests cannot go on."""
        state = self._backend.state
        if not self._backend.is_sleeping:
            raise EngineUnavailableError("awake", "the engine was woken before it was idle")
        if state == "recovering" and (status := self._backend.status()).is_recovery_overdue:
            cause = f"the engine sleeps, but does not recover: {status.recovery_cause}"
            raise EngineUnavailableError("recovering", cause)
        if state not in ("sleeping", "recovering"):
            self._backend.check_ready()

    def wake_up(self) -> None:
        """Accept requests again after `sleep`; no effect if the engine is awake."""
        self._backend.set_sleeping(False)

    async def reset_prefix_cache(self) -> None:
        """Reset the prefix cache. Raises EngineUnavailableError."""
        self._backend.check_ready()
        if cause := await self._backend.reset_prefix_cache():
            raise EngineUnavailableError(self._backend.state, cause)

    async def start_profile(self, folder: str) -> None:
        """Start recording the operations of every stage; `stop_profile` writes them to `folder`.

        Raises EngineUnavailableError, and ProfileError if a stage cannot record.
        """
        self._backend.check_ready()
        if cause := await self._backend.start_profile(folder):
            raise ProfileError(cause)

    async def stop_profile(self) -> None:
        """Stop recording and write the profile, one file per stage.

        Raises EngineUnavailableError, and ProfileError if a stage cannot write its file.
        """
        self._backend.check_ready()
        if cause := await self._backend.stop_profile():
            raise ProfileError(cause)

    def nodes(self) -> list[NodeReport]:
        """Return the state of each machine of the engine, the head first; none for a router."""
        return []

    def drain_node(self, name: str) -> str:
        """Raise UnknownNodeError: a router has no machines."""
        raise UnknownNodeError(f"there is no machine {name!r}")

    def set_role(self, role: str) -> str:
        """Raise RoleSwitchError: only an engine with routers has a role."""
        raise RoleSwitchError("the engine has no routers: start it with --router or --hub")

    def kv_participant(self) -> KvParticipant | None:
        """Return None: a router takes no part in KV transfers."""
        return None

    def release_kv(self, tickets: list[int]) -> None:
        """Do nothing: a router reserves no KV blocks."""

    def describe(self) -> dict[str, Any]:
        """Return the engine's configuration and state as JSON values."""
        return self._backend.describe()

    async def _compile_grammar(self, structured: StructuredOutput, request_id: str) -> str | None:
        """Return the compiled grammar of an output, None if the request was aborted meanwhile."""
        task = asyncio.ensure_future(self._grammars.compile_structured_output(structured))
        self._compiling[task] = request_id
        try:
            await asyncio.wait([task])
            return task.result() if task in self._compiling else None
        except CompilerBusyError as error:
            raise EngineUnavailableError("full", str(error)) from error
        finally:
            self._compiling.pop(task, None)
            task.cancel()

    def _encode(self, prompt: str, params: SamplingParams) -> list[int]:
        return encode_prompt(prompt, params, self.model, self.tokenizer)

    def _token_sequences(self, words: tuple[str, ...]) -> BadWords:
        """Return the token sequences of words, each with and without a leading space."""
        bare = {word.removeprefix(" ") for word in words}
        texts = bare | {" " + word for word in bare}
        sequences = (tuple(self.tokenizer.encode(text, add_special_tokens=False)) for text in texts)
        vocabulary = self.model.vocab_size
        return tuple(sorted({ids for ids in sequences if ids and max(ids) < vocabulary}))

    def _check_accepting(self) -> None:
        """Raise EngineUnavailableError unless requests run, or wait until they can."""
        if not self._backend.accepts_requests:
            self._backend.check_ready()
