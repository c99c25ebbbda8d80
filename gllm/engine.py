"""The embeddable engine: worker processes, tokenizer and requests behind one object.

Owns the engine's life (loading, ready, draining, dead) and the way from a prompt to text. Knows
nothing of HTTP; imports no torch, that is the workers' business.
"""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import zmq
from tqdm import tqdm

from gllm.config import EngineConfig, SamplingParams
from gllm.engine_api import Delta, EngineUnavailable, ModelInfo, check_request, truncated
from gllm.messages import (
    AnyMessage,
    Bubbles,
    Fatal,
    Loaded,
    Progress,
    Ready,
    Sampling,
    Shutdown,
    StageLoad,
    Start,
    TokenLogprobs,
    Tokens,
)
from gllm.models.config import read_config
from gllm.models.errors import ModelError
from gllm.models.hub import resolve
from gllm.models.spec import Model
from gllm.models.split import split_layers
from gllm.runtime.bus import FRONTEND, BusFault, Inbox, Outbox
from gllm.runtime.client import EngineClient, Piece
from gllm.runtime.device import kv_blocks
from gllm.runtime.launch import Workers
from gllm.scheduler.plan import First, Stats
from gllm.text.detokenizer import TextStream
from gllm.text.tokenizer import Tokenizer

SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")

Words = tuple[tuple[int, ...], ...]
"""Bad words as token sequences."""


class EngineError(Exception):
    """The engine could not start, or is gone; the message says why."""


class Engine:
    """One pipeline. `async with Engine(EngineConfig("demo")) as engine: ...`

    Construction reads the model's configuration and raises ModelError or ValueError; `start` makes
    the workers, if none are given that were made before. `progress`: show a bar for the weights.
    """

    def __init__(
        self,
        config: EngineConfig,
        served_model_name: str | None = None,
        log_level: str = "warning",
        progress: bool = False,
        workers: Workers | None = None,
    ) -> None:
        self.state = "loading"
        self.cause = ""
        self.died = asyncio.Event()
        """Set when the engine is dead."""
        self._folder = resolve(config.model)
        read = read_config(self._folder)
        self.config = replace(config, max_model_len=_context(config, read.model))
        self._layers = split_layers(read.model, config.pipeline_parallel_size, config.layers)
        self.tokenizer = Tokenizer.load(self._folder)
        assert self.config.max_model_len is not None
        self.model = ModelInfo(
            name=served_model_name or config.model,
            max_model_len=self.config.max_model_len,
            vocab_size=read.model.vocab_size,
            eos_ids=read.eos_ids,
            defaults=_sampling_defaults(self._folder),
            created=int(time.time()),
        )
        self.num_blocks = 0
        self.kv_bytes = 0
        self._log_level = log_level
        self._given = workers
        self._bar = tqdm(unit="B", unit_scale=True, desc="weights", disable=not progress)
        self._progress: dict[int, Progress] = {}
        self._loaded: dict[int, Loaded] = {}
        self._ready: set[int] = set()
        self._news = asyncio.Event()

    async def __aenter__(self) -> "Engine":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def num_requests(self) -> int:
        """Calls of `generate` that have not ended."""
        return self._client.num_requests if self.state != "loading" else 0

    @property
    def stats(self) -> Stats:
        """The scheduler's state after the last step."""
        return self._client.stats if self.state != "loading" else Stats()

    @property
    def step_sizes(self) -> Mapping[int, int]:
        """Micro-batches so far, by their tokens rounded up to a power of two."""
        return self._client.step_sizes if self.state != "loading" else {}

    @property
    def stage_loads(self) -> dict[int, StageLoad]:
        """What each stage computed so far, by stage."""
        return self._client.stage_loads if self.state != "loading" else {}

    @property
    def bubbles(self) -> Bubbles:
        """What the pipeline lost so far."""
        return self._client.bubbles if self.state != "loading" else Bubbles()

    def healthy(self) -> bool:
        """Whether the engine lives and no pending work is stuck."""
        if self.state not in ("ready", "draining"):
            return False
        return self._client.stalled_seconds < self.config.health_timeout

    async def start(self) -> None:
        """Start the workers and wait until a step has gone through all of them.

        Raises EngineError where one fails.
        """
        self._workers = self._given or Workers(len(self._layers))
        self._workers.tell(self.config, self._folder, self._layers, self._log_level)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._inbox = Inbox(self._context, self._workers.frontend)
        self._stages = [Outbox(self._context, a, FRONTEND) for a in self._workers.inboxes]
        self._client = EngineClient(self._stages[0])
        self._inbox.start(self._handle, self._on_fault)
        self._workers.watch(self._on_death)
        try:
            await self._wait_for(self._loaded)
            self._start_stages()
            await self._wait_for(self._ready)
            await self._warm_up()
        except BaseException:
            await self.stop()
            raise
        self._workers.hide()
        self.state = "ready"

    async def drain(self, seconds: float) -> None:
        """Take no new requests and give running ones this long to end."""
        if self.state == "ready":
            self.state = "draining"
        deadline = time.monotonic() + seconds
        while self.num_requests and self.state == "draining" and time.monotonic() < deadline:
            await asyncio.sleep(0.02)

    async def stop(self) -> None:
        """End the workers; requests that still run end with an error."""
        self._die("the engine was stopped")
        self._bar.close()
        for stage in self._stages:
            stage.send(Shutdown())
        await self._workers.stop()
        self._inbox.close()
        for stage in self._stages:
            stage.close()
        self._context.term()

    async def generate(
        self,
        prompt: str | list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> AsyncGenerator[Delta, None]:
        """The deltas of the request's choices, interleaved; closing the generator aborts it.

        prompt: text, or token ids. Raises FieldError for a request that cannot be,
        EngineUnavailable before the first delta.
        """
        if isinstance(prompt, str):
            prompt = await asyncio.to_thread(self.tokenizer.encode, prompt)
        prompt = truncated(prompt, params, self.model)
        check_request(prompt, params, self.model)
        words: Words = ()
        if params.bad_words:
            words = await asyncio.to_thread(self._token_sequences, params.bad_words)
        if self.state != "ready":
            raise EngineUnavailable(self.state, self.cause or f"the engine is {self.state}")
        async with aclosing(self._run(prompt, params, priority, cache_salt, words)) as deltas:
            async for delta in deltas:
                yield delta

    def _token_sequences(self, words: tuple[str, ...]) -> Words:
        """What the model may write the words with: each alone and behind a space."""
        bare = {word.removeprefix(" ") for word in words}
        texts = bare | {" " + word for word in bare}
        found = (tuple(self.tokenizer.encode(text, add_special_tokens=False)) for text in texts)
        vocabulary = self.model.vocab_size
        return tuple(sorted({ids for ids in found if ids and max(ids) < vocabulary}))

    async def _run(
        self,
        prompt: list[int],
        params: SamplingParams,
        priority: int,
        cache_salt: str,
        bad_words: Words,
    ) -> AsyncGenerator[Delta, None]:
        room = self.model.max_model_len - len(prompt)
        stop_ids = {*params.stop_token_ids, *(() if params.ignore_eos else self.model.eos_ids)}
        stream = self._client.submit(
            prompt,
            _sampling(params, stop_ids, bad_words),
            min(params.max_tokens or room, room),
            sorted(stop_ids),
            params.n,
            priority,
            cache_salt,
        )
        texts = {choice: self._text_stream(params) for choice in range(params.n)}
        prompt_logprobs: list[TokenLogprobs] = []
        try:
            while texts:
                for choice, piece in (await stream.take()).items():
                    if choice not in texts:
                        continue
                    if piece.first is not None:
                        # The first choice speaks for all: no other one begins before it.
                        prompt_logprobs = piece.prompt_logprobs or prompt_logprobs
                        piece.prompt_logprobs = prompt_logprobs
                    delta = _delta(choice, piece, texts[choice], params)
                    if delta.finish_reason is not None:
                        del texts[choice]
                        self._client.abort([stream.seq + choice])
                    yield delta
        finally:
            self._client.release(stream)

    def _text_stream(self, params: SamplingParams) -> TextStream:
        return TextStream(
            self.tokenizer,
            params.stop,
            params.skip_special_tokens,
            params.include_stop_str_in_output,
            params.shown_tokens,
        )

    async def _wait_for(self, reached: dict[int, Loaded] | set[int]) -> None:
        while len(reached) < len(self._layers):
            await self._news.wait()
            self._news.clear()
            if self.state == "dead":
                raise EngineError(self.cause)

    def _start_stages(self) -> None:
        """Divide the memory for KV blocks: the same number on every stage."""
        self._bar.close()
        block_bytes = sum(loaded.block_bytes for loaded in self._loaded.values())
        scheduler, length = self.config.scheduler, self.model.max_model_len
        most = scheduler.max_num_seqs * -(-length // scheduler.block_size)
        stages = [(loaded.block_bytes, loaded.room) for loaded in self._loaded.values()]
        self.num_blocks = min(kv_blocks(self.config.kv_cache_memory, stages), most)
        self.kv_bytes = self.num_blocks * block_bytes
        scheduler.resolve(len(self._layers), self.num_blocks, length)
        for stage in self._stages:
            stage.send(Start(self.num_blocks))

    async def _warm_up(self) -> None:
        """One token through all stages and back."""
        async for delta in self._run([0], SamplingParams(max_tokens=1, temperature=0), 0, "", ()):
            if delta.error:
                raise EngineError(f"the warm-up step failed: {delta.error}")

    def _handle(self, messages: list[AnyMessage]) -> None:
        for message in messages:
            match message:
                case Tokens() | StageLoad() | Bubbles():
                    self._client.hear(message)
                case Progress(stage):
                    self._progress[stage] = message
                    self._show_progress()
                case Loaded(stage):
                    self._loaded[stage] = message
                case Ready(stage):
                    self._ready.add(stage)
                case Fatal(stage, cause):
                    self._die(f"stage {stage} failed: {cause}")
        self._news.set()

    def _show_progress(self) -> None:
        self._bar.total = sum(progress.total for progress in self._progress.values())
        done = sum(progress.done for progress in self._progress.values())
        self._bar.update(done - self._bar.n)

    def _on_fault(self, fault: BusFault) -> None:
        self._die(str(fault))

    def _on_death(self, stage: int, ending: str) -> None:
        # Why it ended may still be on its way to us.
        asyncio.get_running_loop().call_later(0.05, self._die, ending)

    def _die(self, cause: str) -> None:
        """The first cause counts."""
        if self.state == "dead":
            return
        self.state, self.cause = "dead", cause
        self._client.fail_all(cause)
        self._news.set()
        self.died.set()


def _context(config: EngineConfig, model: Model) -> int:
    """Tokens of the longest sequence. Raises ValueError beyond the model's context."""
    length = config.max_model_len or model.context_length
    if length > model.context_length:
        raise ValueError(
            f"max_model_len is {length}, but the model's context is {model.context_length} tokens"
        )
    return length


def _sampling_defaults(folder: Path) -> dict[str, Any]:
    """Sampling defaults of a model folder's generation_config.json, if it has one."""
    file = folder / "generation_config.json"
    if not file.is_file():
        return {}
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        return {k: values[k] for k in SAMPLING_DEFAULTS if values.get(k) is not None}
    except (ValueError, AttributeError) as error:
        raise ModelError(f"{file} is no JSON object: {error}") from error


def _sampling(params: SamplingParams, stop_ids: set[int], bad_words: Words) -> Sampling:
    """What the last stage has to know; a request without a seed gets one."""
    return Sampling(
        temperature=params.temperature,
        top_k=max(params.top_k, 0),
        top_p=params.top_p,
        min_p=params.min_p,
        seed=secrets.randbits(63) if params.seed is None else params.seed,
        min_tokens=params.min_tokens,
        banned=tuple(sorted(stop_ids)) if params.min_tokens else (),
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=dict(params.logit_bias),
        allowed=tuple(sorted(set(params.allowed_token_ids or ()))),
        bad_words=bad_words,
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
    )


def _delta(choice: int, piece: Piece, text: TextStream, params: SamplingParams) -> Delta:
    """A piece as text. A token that ends the choice is counted, but is no part of the text unless
    the request asks for what stopped it."""
    end, tokens = piece.end, piece.tokens
    stopped_by_token = end is not None and end.stop_token is not None
    hides_last = stopped_by_token and not params.include_stop_str_in_output
    shown, used, stop = text.push(tokens[:-1] if hides_last else tokens)
    first = piece.first or First(0, 0, 0.0)
    made = Delta(
        choice,
        shown,
        tokens,
        cached_tokens=first.cached_tokens,
        queue_seconds=first.queue_seconds,
        logprobs=piece.logprobs,
        prompt_logprobs=piece.prompt_logprobs,
    )
    if stop is not None:
        made = replace(made, token_ids=tokens[:used], logprobs=piece.logprobs[:used])
        return replace(made, finish_reason="stop", stop_reason=stop)
    if end is None:
        return made
    return replace(
        made,
        text=shown + text.finish(),
        finish_reason=end.reason,
        stop_reason=end.stop_token if end.stop_token in params.stop_token_ids else None,
        error=end.error,
    )
