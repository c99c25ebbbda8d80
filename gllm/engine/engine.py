"""The embeddable asyncio engine: worker processes, tokenizer, grammar compiler and requests.

Imports no torch: the worker processes compute.
"""

import asyncio
import logging
import secrets
import time
from array import array
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import msgspec
from tqdm import tqdm

from gllm.config.engine import EngineConfig
from gllm.config.field_types import FieldError, to_str, to_token_ids
from gllm.config.sampling import SamplingParams
from gllm.engine.interface import (
    EngineStatus,
    EngineUnavailableError,
    ModelInfo,
    OutputDelta,
    PoisonRequestError,
    ProfileError,
    check_options,
    check_request,
    embedding_error,
    encode_prompt,
    truncate_prompt,
)
from gllm.engine.preflight import plan_model
from gllm.engine.request import BadWords, RequestState, build_sequence_params
from gllm.engine.status import read_status
from gllm.grammar.compiler import CompilerBusyError, GrammarCompiler
from gllm.messages.sampling import SequenceSamplingParams
from gllm.models.config import model_notes
from gllm.observability.logs import DEFAULT_LOG_CONFIG, LogConfig
from gllm.runtime.local_node import LocalNode
from gllm.runtime.node import Node
from gllm.runtime.request_stream import RequestStream
from gllm.runtime.supervisor import EngineError as EngineError
from gllm.runtime.supervisor import Supervisor
from gllm.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

RECOVERY_RETRY_SECONDS = 5
"""Time after which a client may try again while the engine recovers."""


class Engine:
    """An engine: one pipeline of worker processes and its requests.

    Use it as `async with Engine(EngineConfig("demo")) as engine: ...`, or call `start` and `stop`.

    Args:
        config: Model, stages, memory and scheduler.
        served_model_name: Public name of the model; by default `config.model`.
        logs: Level and format of the workers' logs.
        progress: Show a progress bar while the weights load.
        node: Node with worker processes that were started before; by default `start` creates it.

    Raises:
        ModelError: The model cannot be served.
        ValueError: The configuration does not fit the model.
    """

    def __init__(
        self,
        config: EngineConfig,
        served_model_name: str | None = None,
        logs: LogConfig = DEFAULT_LOG_CONFIG,
        progress: bool = False,
        node: Node | None = None,
    ) -> None:
        plan = plan_model(config)
        self._folder, read = plan.folder, plan.config
        self.config = replace(config, max_model_len=plan.max_model_len)
        self.tokenizer = Tokenizer.load(self._folder, config.chat_template)
        for note in model_notes(read.model, plan.max_model_len):
            log.warning("%s", note)
        self.model = ModelInfo(
            name=served_model_name or config.model,
            max_model_len=plan.max_model_len,
            vocab_size=read.model.vocab_size,
            eos_ids=read.eos_ids,
            defaults=read.sampling,
            created=int(time.time()),
        )
        self._grammars = GrammarCompiler(self._folder, read.model.vocab_size, read.eos_ids)
        self._compiling: dict[asyncio.Future[str], str] = {}
        """Running grammar compilations and the ids of their requests; `abort` removes them."""
        self._supervisor = Supervisor(self.config, plan.layers, self._show_progress)
        self._client = self._supervisor.client
        self._logs = logs
        self._node = node
        self._seeds = secrets.SystemRandom() if config.seed is None else Random(config.seed)
        """Source of seeds for requests without one."""
        self._progress = progress
        self._bar: tqdm | None = None
        """Progress bar of the weights; None until the first bytes are loaded."""

    async def __aenter__(self) -> "Engine":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def status(self) -> EngineStatus:
        """Return a snapshot of the engine's state and counters."""
        return read_status(self._supervisor, self.config)

    async def wait_until_dead(self) -> None:
        """Wait until the engine is dead, after a failure or `stop`."""
        await self._supervisor.died.wait()

    async def start(self) -> None:
        """Start the workers and wait until a warm-up step has run on all of them.

        Raises EngineError if a worker fails.
        """
        if self.config.step_log is not None:
            # Drivers append: the log of a run has the events of all its drivers.
            open(self.config.step_log, "wb").close()
        node = self._node or LocalNode(len(self._supervisor.layers))
        try:
            await self._supervisor.start(self._folder, node, self._logs)
        finally:
            if self._bar is not None:
                self._bar.close()

    async def drain(self, seconds: float) -> None:
        """Reject new requests and wait at most `seconds` for the running ones."""
        await self._supervisor.drain(seconds)

    async def stop(self) -> None:
        """Stop the workers; running requests end with an error."""
        await self._supervisor.stop()
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
    ) -> list[RequestState]:
        """Start one request per prompt, all or none; each handle has to be closed.

        In contrast to `generate`, the caller can read the deltas while the engine handles the step
        that produced them. Arguments and errors are those of `generate`.
        """
        priority, cache_salt = check_options(params, priority, cache_salt, request_id)
        prompts = [to_token_ids("prompt", prompt) for prompt in prompts]
        prompts = [truncate_prompt(prompt, params, self.model) for prompt in prompts]
        for prompt in prompts:
            check_request(prompt, params, self.model)
        words: BadWords = ()
        if params.bad_words:
            words = await asyncio.to_thread(self._token_sequences, params.bad_words)
        self._check_accepting()
        grammar = await self._grammar(params, request_id)
        self._check_accepting()
        send = partial(self._send, params, priority, cache_salt, request_id, words, grammar or "")
        streams: list[RequestStream] = []
        try:
            for prompt in prompts:
                streams.append(send(prompt))
        except (TypeError, ValueError, OverflowError, PoisonRequestError) as error:
            for stream in streams:
                self._client.release(stream)
            if isinstance(error, PoisonRequestError):
                raise
            raise FieldError("params", f"the request cannot be sent: {error}") from error
        if grammar is None:
            self._client.abort_streams(streams)
        return [RequestState(self._client, stream, self.tokenizer, params) for stream in streams]

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
        `hidden_size` numbers.

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
        if self._supervisor.state not in ("ready", "recovering", "draining"):
            return 0
        compiling = [task for task, named in self._compiling.items() if request_id in (None, named)]
        for task in compiling:
            del self._compiling[task]
            task.cancel()
        return self._client.abort_request(request_id) + len(compiling)

    async def reset_prefix_cache(self) -> None:
        """Empty the prefix cache. Raises EngineUnavailableError."""
        self._check_ready()
        if cause := await self._supervisor.reset_prefix_cache():
            raise EngineUnavailableError(self._supervisor.state, cause)

    async def start_profile(self, folder: str) -> None:
        """Start to record the operations of every stage; `stop_profile` writes them to `folder`.

        Raises EngineUnavailableError, and ProfileError if a stage cannot record.
        """
        self._check_ready()
        if cause := await self._supervisor.start_profile(folder):
            raise ProfileError(cause)

    async def stop_profile(self) -> None:
        """Stop recording and write the profile, one file per stage.

        Raises EngineUnavailableError, and ProfileError if a stage cannot write its file.
        """
        self._check_ready()
        if cause := await self._supervisor.stop_profile():
            raise ProfileError(cause)

    def describe(self) -> dict[str, Any]:
        """Return the engine's configuration and state as JSON values."""
        return {
            "state": self._supervisor.state,
            "layers": [len(layers) for layers in self._supervisor.layers],
            "kv_blocks": self._supervisor.num_blocks,
            "kv_bytes": self._supervisor.kv_bytes,
            "config": msgspec.to_builtins(self.config),
        }

    def _check_accepting(self) -> None:
        """Raise EngineUnavailableError unless requests run, or wait for the end of a recovery."""
        supervisor = self._supervisor
        if supervisor.state == "recovering" and not supervisor.is_recovery_overdue:
            return
        self._check_ready()

    def _check_ready(self) -> None:
        """Raise EngineUnavailableError unless requests run."""
        state, cause = self._supervisor.state, self._supervisor.cause
        if state == "recovering":
            cause = f"the engine is recovering: {self._supervisor.deaths.cause}"
            raise EngineUnavailableError(state, cause, RECOVERY_RETRY_SECONDS)
        if state != "ready":
            raise EngineUnavailableError(state, cause or f"the engine is {state}")

    async def _grammar(self, params: SamplingParams, request_id: str) -> str | None:
        """Return the compiled grammar of the output.

        Returns an empty string if the output is unconstrained, None if the request was aborted
        while the grammar compiled.
        """
        if params.structured is None:
            return ""
        task = asyncio.ensure_future(self._grammars.compile_structured_output(params.structured))
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

    def _send(
        self,
        params: SamplingParams,
        priority: int,
        cache_salt: str,
        request_id: str,
        bad_words: BadWords,
        grammar: str,
        prompt: list[int],
    ) -> RequestStream:
        num_free = self.model.max_model_len - len(prompt)
        # At the end of a grammar only EOS is allowed, so EOS has to end the output.
        ends = not params.ignore_eos or grammar
        stop_ids = {*params.stop_token_ids, *(self.model.eos_ids if ends else ())}
        return self._client.submit(
            prompt,
            build_sequence_params(params, stop_ids, bad_words, grammar, self._seeds),
            min(params.max_tokens or num_free, num_free),
            sorted(stop_ids),
            params.n,
            priority,
            cache_salt,
            request_id,
        )

    def _show_progress(self, done: int, total: int) -> None:
        if self._bar is None:
            hidden = not self._progress
            self._bar = tqdm(unit="B", unit_scale=True, desc="weights", disable=hidden)
        self._bar.total = total
        self._bar.update(done - self._bar.n)
