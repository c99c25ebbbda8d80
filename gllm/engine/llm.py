"""The blocking face of the engine: prompts in, finished texts out.

Owns an event loop on a thread of its own, and a progress bar. Knows nothing that Engine does not.
"""

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeVar

from tqdm import tqdm

from gllm.config.engine import EngineConfig
from gllm.config.field_types import to_str, to_token_ids
from gllm.config.sampling import SamplingParams
from gllm.engine.engine import Engine, EngineError
from gllm.engine.interface import check_options, check_request, truncated
from gllm.messages.sampling import TokenLogprobs
from gllm.text.special_tokens import new_mark

T = TypeVar("T")


@dataclass
class Completion:
    """One finished choice."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    """stop or length."""
    stop_reason: int | str | None = None
    """The stop token id or stop string that ended it, where one did."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of each token, where they were asked for."""


@dataclass
class RequestOutput:
    """What a prompt brought."""

    prompt: str | list[int]
    outputs: list[Completion]
    """One for each of `n`."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of the prompt's tokens from the second on, where they were asked for."""


class LLM:
    """An engine for scripts: `LLM("demo", pipeline_parallel_size=2).generate(prompts)`.

    Options are the fields of EngineConfig and SchedulerConfig. Use it as a context manager or call
    `close`; workers end with this process in any case.
    """

    def __init__(self, model: str = "demo", progress: bool = True, **options: Any) -> None:
        self._progress = progress
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="gllm", daemon=True)
        self._thread.start()
        try:
            self._engine = self._wait(_start(EngineConfig.of(model, **options), progress))
        except BaseException:
            self._end_loop()
            raise

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[list[int]],
        sampling_params: SamplingParams | None = None,
    ) -> list[RequestOutput]:
        """The completions of each prompt (text or token ids), in their order.

        Token ids are integers, those of a numpy array too. Without parameters the model's own
        sampling defaults hold, and texts of any length. All prompts are in the engine at once.
        Raises FieldError for a prompt that cannot be, before anything runs, and EngineError where a
        request fails.
        """
        several: Sequence[str | list[int]] = [prompts] if isinstance(prompts, str) else prompts
        params = sampling_params
        if params is None:
            params = SamplingParams(**self._engine.model.defaults)
        return self._wait(self._generate_all(several, params))

    def chat(
        self, messages: list[dict[str, str]], sampling_params: SamplingParams | None = None
    ) -> RequestOutput:
        """The answer to a conversation of {"role": ..., "content": ...} messages.

        Special tokens spelled in a content are ordinary text.
        """
        tokenizer = self._engine.tokenizer
        template = tokenizer.chat_template
        if template is None:
            raise EngineError("this model has no chat template: use generate")
        mark = new_mark()
        text = template.render(tokenizer.special_tokens.mark_all(messages, mark))
        ids = tokenizer.encode_chat(text, mark)
        return self.generate([ids], sampling_params)[0]

    def close(self) -> None:
        """End the workers."""
        if self._thread.is_alive():
            self._wait(self._engine.stop())
            self._end_loop()

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _generate_all(
        self, prompts: Sequence[str | list[int]], params: SamplingParams
    ) -> list[RequestOutput]:
        check_options(params, 0, "", "")
        ids = [self._token_ids(f"prompts[{index}]", p) for index, p in enumerate(prompts)]
        model = self._engine.model
        ids = [truncated(prompt, params, model) for prompt in ids]
        for prompt in ids:
            check_request(prompt, params, model)
        with tqdm(total=len(ids), desc="prompts", disable=not self._progress) as bar:
            runs = [self._run(prompt, params, bar) for prompt in ids]
            outputs = await asyncio.gather(*runs)
        return [
            RequestOutput(prompt, *output) for prompt, output in zip(prompts, outputs, strict=True)
        ]

    def _token_ids(self, name: str, prompt: object) -> list[int]:
        """Return a prompt's token ids. Raises FieldError."""
        if isinstance(prompt, str):
            return self._engine.tokenizer.encode(to_str(name, prompt))
        return to_token_ids(name, prompt)

    async def _run(
        self, prompt: list[int], params: SamplingParams, bar: "tqdm[Any]"
    ) -> tuple[list[Completion], list[TokenLogprobs]]:
        outputs = [Completion() for _ in range(params.n)]
        prompt_logprobs: list[TokenLogprobs] = []
        async for delta in self._engine.generate(prompt, params):
            if delta.finish_reason == "error":
                raise EngineError(delta.error)
            output = outputs[delta.index]
            output.text += delta.text
            output.token_ids += delta.token_ids
            output.logprobs += delta.logprobs
            prompt_logprobs = delta.prompt_logprobs or prompt_logprobs
            output.finish_reason = delta.finish_reason or ""
            output.stop_reason = delta.stop_reason
        bar.update()
        return outputs, prompt_logprobs


async def _start(config: EngineConfig, progress: bool) -> Engine:
    engine = Engine(config, progress=progress)
    await engine.start()
    return engine
