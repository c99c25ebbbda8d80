"""The embeddable engine: pipeline, tokenizer and requests behind one object.

Owns the way from a prompt to text. Knows nothing of HTTP and of processes; imports no torch, which
is the workers' business.
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
    EmbeddingError,
    EngineStatus,
    EngineUnavailableError,
    ModelInfo,
    OutputDelta,
    ProfileError,
    check_options,
    check_request,
    encode_prompt,
    truncate_prompt,
)
from gllm.engine.preflight import plan_model
from gllm.engine.request import BadWords, RequestState, build_sequence_params
from gllm.grammar.compiler import CompilerBusyError, GrammarCompiler
from gllm.messages.sampling import SequenceSamplingParams
from gllm.models.config import model_notes
from gllm.observability.logs import DEFAULT_LOG_CONFIG, LogConfig
from gllm.runtime.client import RequestStream
from gllm.runtime.launch import PipelineWorkers, Workers
from gllm.runtime.pipeline import EngineError as EngineError
from gllm.runtime.pipeline import WorkerPipeline
from gllm.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


class Engine:
    """One pipeline. `async with Engine(EngineConfig("demo")) as engine: ...`

    Construction reads the model's configuration and raises ModelError or ValueError; `start` makes
    the workers, if none are given that were made before. `progress`: show a bar for the weights.
    """

    def __init__(
        self,
        config: EngineConfig,
        served_model_name: str | None = None,
        logs: LogConfig = DEFAULT_LOG_CONFIG,
        progress: bool = False,
        workers: PipelineWorkers | None = None,
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
        """Grammars that requests wait for, by whose id; an abort takes them out."""
        self._pipeline = WorkerPipeline(self.config, plan.layers, self._show_progress)
        self._client = self._pipeline.client
        self._logs = logs
        self._given = workers
        self._seeds = secrets.SystemRandom() if config.seed is None else Random(config.seed)
        """Gives seeds to requests that have none."""
        self._progress = progress
        self._bar: tqdm | None = None
        """Of the weights, from their first bytes on: an error before shows no empty bar."""

    async def __aenter__(self) -> "Engine":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def status(self) -> EngineStatus:
        """Return a snapshot of the engine's state and counters."""
        pipeline, client = self._pipeline, self._client
        is_running = pipeline.state in ("ready", "draining")
        return EngineStatus(
            state=pipeline.state,
            cause_of_death=pipeline.cause,
            is_healthy=is_running and client.stalled_seconds < self.config.health_timeout,
            num_requests=client.num_requests,
            stats=client.stats,
            step_sizes=dict(client.step_sizes),
            stage_loads=dict(client.stage_loads),
            bubbles=client.bubbles,
            num_kv_blocks=pipeline.num_blocks,
            kv_cache_bytes=pipeline.kv_bytes,
            block_size=self.config.scheduler.block_size,
        )

    async def wait_until_dead(self) -> None:
        """Wait until the engine is dead, after a failure or `stop`."""
        await self._pipeline.died.wait()

    async def start(self) -> None:
        """Start the workers and wait until a step has gone through all of them.

        Raises EngineError where one fails.
        """
        workers = self._given or Workers(len(self._pipeline.layers))
        try:
            await self._pipeline.start(self._folder, workers, self._logs)
        finally:
            if self._bar is not None:
                self._bar.close()

    async def drain(self, seconds: float) -> None:
        """Take no new requests and give running ones this long to end."""
        await self._pipeline.drain(seconds)

    async def stop(self) -> None:
        """End the workers; requests that still run end with an error."""
        await self._pipeline.stop()
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
        """The deltas of the request's choices, interleaved; closing the generator aborts it, and so
        does `abort` by its id.

        prompt: text, or token ids. Raises FieldError for a request that cannot be,
        EngineUnavailableError before the first delta.
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
        """As `generate`, for several prompts and for who takes the deltas within the step that
        brings them. A request for each prompt, all or none; each has to be closed."""
        priority, cache_salt = check_options(params, priority, cache_salt, request_id)
        prompts = [to_token_ids("prompt", prompt) for prompt in prompts]
        prompts = [truncate_prompt(prompt, params, self.model) for prompt in prompts]
        for prompt in prompts:
            check_request(prompt, params, self.model)
        words: BadWords = ()
        if params.bad_words:
            words = await asyncio.to_thread(self._token_sequences, params.bad_words)
        self._check_ready()
        grammar = await self._grammar(params, request_id)
        self._check_ready()
        send = partial(self._send, params, priority, cache_salt, request_id, words, grammar or "")
        streams: list[RequestStream] = []
        try:
            for prompt in prompts:
                streams.append(send(prompt))
        except (TypeError, ValueError, OverflowError) as error:
            for stream in streams:
                self._client.release(stream)
            raise FieldError("params", f"the request cannot be sent: {error}") from error
        if grammar is None:
            self._client.cut(streams)
        return [RequestState(self._client, stream, self.tokenizer, params) for stream in streams]

    async def embed(
        self,
        prompt: str | list[int],
        *,
        priority: int = 0,
        cache_salt: str = "",
        request_id: str = "",
    ) -> list[float]:
        """What the model knows at the prompt's last token: its hidden state behind the final norm,
        as many numbers as the model is wide.

        Raises FieldError, EngineUnavailableError, and EmbeddingError where it cannot be computed.
        """
        params = SamplingParams(max_tokens=1, temperature=0)
        priority, cache_salt = check_options(params, priority, cache_salt, request_id)
        if isinstance(prompt, str):
            text = to_str("prompt", prompt)
            prompt = await asyncio.to_thread(self._encode, text, params)
        prompt = to_token_ids("prompt", prompt)
        check_request(prompt, params, self.model)
        self._check_ready()
        # The first token is drawn on the way, and not looked at.
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
                piece = stream.take()[0]
                embedding, end = embedding or piece.embedding, piece.end
        finally:
            self._client.release(stream)
        if end.error or not embedding:
            raise EmbeddingError(end.error or "the request was aborted")
        return array("f", embedding).tolist()

    def abort(self, request_id: str | None) -> int:
        """End the requests of this id, all for None; their choices finish with reason `abort`.
        The number of requests."""
        if self._pipeline.state not in ("ready", "draining"):
            return 0
        compiling = [task for task, named in self._compiling.items() if request_id in (None, named)]
        for task in compiling:
            del self._compiling[task]
            task.cancel()
        return self._client.end(request_id) + len(compiling)

    async def reset_prefix_cache(self) -> None:
        """Forget what the prefix cache holds. Raises EngineUnavailableError."""
        self._check_ready()
        if cause := await self._pipeline.forget_prefixes():
            raise EngineUnavailableError("dead", cause)

    async def start_profile(self, folder: str) -> None:
        """Start to record the operations of every stage; `stop_profile` writes them to `folder`.

        Raises EngineUnavailableError, and ProfileError if a stage cannot record.
        """
        await self._profile(folder)

    async def stop_profile(self) -> None:
        """Stop recording and write the profile, one file per stage.

        Raises EngineUnavailableError, and ProfileError if a stage cannot write its file.
        """
        await self._profile("")

    def describe(self) -> dict[str, Any]:
        """Return the engine's configuration and state as JSON values."""
        return {
            "state": self._pipeline.state,
            "layers": [len(layers) for layers in self._pipeline.layers],
            "kv_blocks": self._pipeline.num_blocks,
            "kv_bytes": self._pipeline.kv_bytes,
            "config": msgspec.to_builtins(self.config),
        }

    async def _profile(self, folder: str) -> None:
        """Start a profile, or stop it if the folder is empty."""
        self._check_ready()
        if cause := await self._pipeline.profile(folder):
            raise ProfileError(cause)

    def _check_ready(self) -> None:
        state, cause = self._pipeline.state, self._pipeline.cause
        if state != "ready":
            raise EngineUnavailableError(state, cause or f"the engine is {state}")

    async def _grammar(self, params: SamplingParams, request_id: str) -> str | None:
        """What the output has to fit, compiled; empty for anything, None where the request was
        aborted meanwhile."""
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
        """What the model may write the words with: each alone and behind a space."""
        bare = {word.removeprefix(" ") for word in words}
        texts = bare | {" " + word for word in bare}
        found = (tuple(self.tokenizer.encode(text, add_special_tokens=False)) for text in texts)
        vocabulary = self.model.vocab_size
        return tuple(sorted({ids for ids in found if ids and max(ids) < vocabulary}))

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
        room = self.model.max_model_len - len(prompt)
        # A grammar's end is the text's, which nothing can follow.
        ends = not params.ignore_eos or grammar
        stop_ids = {*params.stop_token_ids, *(self.model.eos_ids if ends else ())}
        return self._client.submit(
            prompt,
            build_sequence_params(params, stop_ids, bad_words, grammar, self._seeds),
            min(params.max_tokens or room, room),
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
