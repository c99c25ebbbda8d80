"""Blocking interface of the engine: prompts in, finished texts out.

Runs the engine's event loop on a thread of its own and shows a progress bar.
"""

import asyncio
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing
from dataclasses import fields, replace
from functools import partial
from typing import Any, TypeVar, overload

from tqdm import tqdm

from gllm.config.attachment import AttachmentConfig
from gllm.config.engine import EngineConfig
from gllm.config.nodes import NodesConfig
from gllm.config.output_parsers import OutputParserConfig
from gllm.config.sampling import SamplingParams
from gllm.engine.chat import PreparedChat, prepare_chat
from gllm.engine.engine import Engine
from gllm.engine.engine_thread import EngineThread
from gllm.engine.interface import EmbeddingError, EngineUnavailableError, PoisonRequestError
from gllm.engine.llm_outputs import (
    ChatCompletionOutput,
    ChatOutput,
    CompletionOutput,
    EmbeddingRequestOutput,
    RequestOutput,
)
from gllm.engine.llm_prompts import ConvertedPrompt, Prompts, convert_params, convert_prompts
from gllm.engine.request_checks import check_options, check_request, truncate_prompt
from gllm.options.field_types import FieldError
from gllm.text.chat.output_parser import ChatOutputParser
from gllm.text.chat.prompt import ChatRequest, ReasoningEffort
from gllm.text.chat.tools import parse_tools
from gllm.text.output.parser import OutputFormat

Output = TypeVar("Output", RequestOutput, EmbeddingRequestOutput)
Launcher = Callable[[EngineConfig, NodesConfig, str | None], AbstractContextManager[NodesConfig]]
"""Starts the other machines of an engine and returns them once entered; ends them on exit. Its
arguments: the engine, the options about machines, the path of the secret file."""


class LLM:
    """Blocking interface for scripts: `LLM("demo", pipeline_parallel_size=2).generate(prompts)`.

    Use it as a context manager or call `close`; workers end with this process in any case.

    Args:
        model: Folder or name of the model.
        progress: Show progress bars.
        tool_call_parser: Format in which `chat` parses tool calls; `auto`: as the chat template
            shows.
        reasoning_parser: Tags at which `chat` splits off reasoning; `auto`: as the chat template
            shows.
        options: Fields of EngineConfig, SchedulerConfig and NodesConfig, and `node_secret_file`.
            With `nnodes`, this process is the head; `gllm node --join` runs on the other machines.
        launcher: Starts the other machines, as `gllm.deploy.ray.launcher.RayLauncher` does; then
            `nnodes` and `master_addr` may be left out.
        create_engine: Creates the engine from the arguments of `Engine`.
    """

    def __init__(
        self,
        model: str = "demo",
        progress: bool = True,
        *,
        tool_call_parser: str = "auto",
        reasoning_parser: str = "auto",
        launcher: Launcher | None = None,
        create_engine: Callable[..., Engine] = Engine,
        **options: Any,
    ) -> None:
        self._progress = progress
        self._parsers = OutputParserConfig(tool_call_parser, reasoning_parser)
        self._thread = thread = EngineThread()
        # It must not wait: garbage is collected on any thread, which may hold any lock.
        weakref.finalize(self, thread.end).atexit = False
        nodes, secret_file = _pop_nodes(options, launcher is not None)
        config = EngineConfig.from_options(model, **options)
        try:
            if launcher is not None:
                nodes = thread.machines.enter_context(launcher(config, nodes, secret_file))
            thread.start()
            attachment = AttachmentConfig(node_secret_file=secret_file)
            start = partial(thread.start_engine, create_engine, config)
            thread.run(partial(start, progress=progress, attachment=attachment, nodes=nodes))
        except BaseException:
            self.close()
            raise

    @property
    def engine(self) -> Engine:
        """The underlying engine."""
        engine = self._thread.engine
        assert engine is not None, "an LLM has an engine"
        return engine

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Return the completions of each prompt, in the order of the prompts.

        All prompts are in the engine at once. A prompt that fails has an `error` in its output, and
        the others are completed. An interrupt aborts all of them.

        Args:
            prompts: One or several: texts, token ids, or dicts with `prompt` or `prompt_token_ids`
                and perhaps `cache_salt`. Iterators and numpy arrays are accepted.
            sampling_params: Parameters of all prompts, or a list with one for each; by default the
                model's own sampling parameters, with outputs of any length.

        Raises:
            FieldError: A prompt or parameter is invalid; no prompt has run then.
            EngineUnavailableError: The engine accepts no requests at present.
            EngineError: The LLM was closed.
        """
        converted = convert_prompts(prompts)
        model = self.engine.model
        params = convert_params(sampling_params, model.defaults, len(converted))
        for each in params[:1] if isinstance(sampling_params, SamplingParams) else params:
            check_options(each, 0, "", "")
        return self._generate_all(converted, params)

    @overload
    def chat(
        self,
        messages: Sequence[dict[str, Any]],
        sampling_params: SamplingParams | None = None,
        *,
        tools: Sequence[dict[str, Any]] | None = ...,
        tool_choice: str | dict[str, Any] | None = ...,
        parallel_tool_calls: bool = ...,
        reasoning_effort: ReasoningEffort | None = ...,
        chat_template_kwargs: Mapping[str, Any] | None = ...,
        add_generation_prompt: bool = ...,
        continue_final_message: bool = ...,
    ) -> ChatOutput: ...

    @overload
    def chat(
        self,
        messages: Sequence[Sequence[dict[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[dict[str, Any]] | None = ...,
        tool_choice: str | dict[str, Any] | None = ...,
        parallel_tool_calls: bool = ...,
        reasoning_effort: ReasoningEffort | None = ...,
        chat_template_kwargs: Mapping[str, Any] | None = ...,
        add_generation_prompt: bool = ...,
        continue_final_message: bool = ...,
    ) -> list[ChatOutput]: ...

    def chat(
        self,
        messages: Sequence[dict[str, Any]] | Sequence[Sequence[dict[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        tool_choice: str | dict[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        reasoning_effort: ReasoningEffort | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> ChatOutput | list[ChatOutput]:
        """Return the assistant's answer to each conversation, with reasoning and tool calls.

        Arguments mean what the fields of `/v1/chat/completions` mean (docs/tools.md). Special
        tokens spelled in messages and tools are ordinary text.

        Args:
            messages: The conversation: `role`, `content` and, of calls and results, `tool_calls`
                and `tool_call_id`. Or several conversations, which run at once.
            sampling_params: Parameters as for `generate`; `structured` applies to the content.
            tools: Functions and custom tools that the model may call.
            tool_choice: auto (the default), none, required, or an object that names a tool.
            parallel_tool_calls: Allow several calls where a call is required.
            reasoning_effort: How much to reason, if the chat template has a variable for it.
            chat_template_kwargs: Variables of the chat template.
            add_generation_prompt: Begin the assistant's answer.
            continue_final_message: Continue the last message, which is the assistant's.

        Returns:
            One output, or a list with one for each of several conversations.

        Raises:
            FieldError: An argument is invalid.
            EngineUnavailableError: The engine accepts no requests at present.
            EngineError: The LLM was closed.
        """
        items: list[Any] = list(messages)
        is_batch = bool(items) and all(isinstance(item, list | tuple) for item in items)
        conversations: list[Any] = items if is_batch else [items]
        engine = self.engine
        params = convert_params(sampling_params, engine.model.defaults, len(conversations))
        tool_options = replace(
            parse_tools(None if tools is None else list(tools), tool_choice),
            is_single_call=not parallel_tool_calls,
        )
        chats: list[PreparedChat] = []
        for conversation, each in zip(conversations, params, strict=True):
            check_options(each, 0, "", "")
            request = ChatRequest(
                messages=list(conversation),
                tool_options=tool_options,
                template_variables=chat_template_kwargs or {},
                reasoning_effort=reasoning_effort,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
            )
            chats.append(prepare_chat(request, each, engine.model, engine.tokenizer, self._parsers))
        outputs = self._generate_all(
            [ConvertedPrompt(chat.token_ids, chat.token_ids) for chat in chats],
            [chat.params for chat in chats],
        )
        answers = [_parse_chat(chat, output) for chat, output in zip(chats, outputs, strict=True)]
        return answers if is_batch else answers[0]

    def embed(self, prompts: Prompts) -> list[EmbeddingRequestOutput]:
        """Return the embedding of each prompt, in the order of the prompts.

        An embedding is the hidden state of the prompt's last token after the final norm, or of a
        model with bidirectional attention as `TextEngine.embed` says. A prompt that fails has an
        `error` in its output.

        Args:
            prompts: As for `generate`.

        Raises:
            FieldError: A prompt is invalid; no prompt has run then.
            EngineUnavailableError: The engine accepts no requests at present.
            EngineError: The LLM was closed.
        """
        params = SamplingParams(max_tokens=1)
        converted = convert_prompts(prompts)
        outputs = [
            EmbeddingRequestOutput(prompt.shown, self._token_ids(prompt, params))
            for prompt in converted
        ]
        salts = [prompt.cache_salt for prompt in converted]
        return self._thread.run(partial(self._run_all, self._embed, outputs, salts))

    def abort(self) -> int:
        """Abort all running requests, of calls in other threads; return their number.

        The calls return the output so far, with the finish reason `abort`.
        """

        async def abort() -> int:
            return self.engine.abort(None)

        return self._thread.run(abort)

    def sleep(self, level: int = 1) -> None:
        """Refuse new requests until `wake_up`, and wait for the running ones.

        Weights and KV cache stay in memory.

        Args:
            level: 1 empties the prefix cache too, 0 keeps it.

        Raises:
            FieldError: vLLM's level 2 would free the weights: close the LLM instead.
            EngineUnavailableError: The engine is not ready, or was awakened or lost a worker
                meanwhile.
        """
        if level not in (0, 1):
            raise FieldError(
                "level", f"level is {level!r}, but has to be 0 or 1: the weights stay in memory"
            )
        self._thread.run(partial(self.engine.sleep, keeps_prefix_cache=level == 0))

    def wake_up(self) -> None:
        """Accept requests again after `sleep`; no effect if the engine is awake."""

        async def wake_up() -> None:
            self.engine.wake_up()

        self._thread.run(wake_up)

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache; running requests continue. Raises EngineUnavailableError."""
        self._thread.run(self.engine.reset_prefix_cache)

    def start_profile(self, folder: str) -> None:
        """Start a torch profile of all workers; `stop_profile` writes it to the folder.

        Raises EngineUnavailableError, and ProfileError if a stage cannot record.
        """
        self._thread.run(partial(self.engine.start_profile, folder))

    def stop_profile(self) -> None:
        """Stop the profile and write it, one file per stage.

        Raises EngineUnavailableError, and ProfileError if a stage cannot write its file.
        """
        self._thread.run(self.engine.stop_profile)

    def close(self) -> None:
        """Stop the workers; calls of other threads return the output so far, with an error.

        Later calls have no effect. If the wait is interrupted, the workers end nevertheless. The
        workers also end when the LLM is garbage, and with this process.
        """
        self._thread.end()
        self._thread.join()

    def _generate_all(
        self, prompts: list[ConvertedPrompt], params: list[SamplingParams]
    ) -> list[RequestOutput]:
        """Return the completions of checked prompts. Raises FieldError if one is invalid."""
        outputs = []
        for prompt, each in zip(prompts, params, strict=True):
            choices = [CompletionOutput() for _ in range(each.n)]
            token_ids = self._token_ids(prompt, each)
            outputs.append(RequestOutput(prompt.shown, choices, prompt_token_ids=token_ids))
        options = [(prompt.cache_salt, each) for prompt, each in zip(prompts, params, strict=True)]
        return self._thread.run(partial(self._run_all, self._generate, outputs, options))

    def _token_ids(self, prompt: ConvertedPrompt, params: SamplingParams) -> list[int]:
        """Return the token ids of a prompt, truncated and checked. Raises FieldError."""
        engine, token_ids = self.engine, prompt.token_ids
        if token_ids is None:
            token_ids = engine.tokenizer.encode(str(prompt.shown))
        token_ids = truncate_prompt(token_ids, params, engine.model)
        check_request(token_ids, params, engine.model)
        return token_ids

    async def _run_all(
        self,
        run: Callable[[Output, Any], Awaitable[None]],
        outputs: list[Output],
        options: list[Any],
    ) -> list[Output]:
        """Run a request per output, all at once, and return the outputs.

        Args:
            run: fills an output.
            outputs: one per prompt.
            options: second arguments of `run`.

        Raises:
            EngineUnavailableError: no request was accepted.
        """
        with tqdm(total=len(outputs), desc="prompts", disable=not self._progress) as bar:

            async def run_one(output: Output, option: Any) -> EngineUnavailableError | None:
                try:
                    await run(output, option)
                except (EmbeddingError, PoisonRequestError) as error:
                    _set_error(output, str(error))
                except EngineUnavailableError as error:
                    _set_error(output, str(error))
                    return error
                bar.update()
                return None

            pairs = zip(outputs, options, strict=True)
            tasks = [asyncio.create_task(run_one(*pair)) for pair in pairs]
            try:
                errors = await asyncio.gather(*tasks)
            finally:
                # After an interrupt, or an error that concerns all: each task aborts its request.
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        if errors and (first := errors[0]) is not None and all(errors):
            raise first
        return outputs

    async def _generate(self, output: RequestOutput, options: tuple[str, SamplingParams]) -> None:
        """Run a request and fill its output."""
        cache_salt, params = options
        deltas = self.engine.generate(output.prompt_token_ids, params, cache_salt=cache_salt)
        async with aclosing(deltas):
            async for delta in deltas:
                choice = output.outputs[delta.index]
                choice.text += delta.text
                choice.token_ids += delta.token_ids
                choice.logprobs += delta.logprobs
                output.prompt_logprobs = delta.prompt_logprobs or output.prompt_logprobs
                choice.finish_reason = delta.finish_reason or ""
                choice.stop_reason = delta.stop_reason
                choice.error = delta.error

    async def _embed(self, output: EmbeddingRequestOutput, cache_salt: str) -> None:
        """Compute an embedding and fill its output."""
        token_ids = output.prompt_token_ids
        output.outputs.embedding = await self.engine.embed(token_ids, cache_salt=cache_salt)


def _set_error(output: RequestOutput | EmbeddingRequestOutput, error: str) -> None:
    """End an output with an error; choices that have finished stay as they are."""
    if isinstance(output, EmbeddingRequestOutput):
        output.error = error
        return
    for choice in output.outputs:
        if not choice.finish_reason:
            choice.finish_reason, choice.error = "error", error


def _parse_chat(chat: PreparedChat, output: RequestOutput) -> ChatOutput:
    """Return an output with the text of each choice parsed into a message."""
    choices = [_parse_choice(choice, chat.output_format) for choice in output.outputs]
    return ChatOutput(chat.token_ids, choices, output.prompt_logprobs)


def _parse_choice(choice: CompletionOutput, output_format: OutputFormat) -> ChatCompletionOutput:
    """Return a choice with its text parsed into a message."""
    parser = ChatOutputParser(output_format)
    message, finish_reason = parser.parse(choice.text, choice.finish_reason)
    return ChatCompletionOutput(
        choice.text,
        choice.token_ids,
        finish_reason or "",
        choice.stop_reason,
        choice.logprobs,
        choice.error,
        content=message.content,
        reasoning=message.reasoning,
        tool_calls=list(message.tool_calls.values()),
    )


def _pop_nodes(
    options: dict[str, Any], has_launcher: bool = False
) -> tuple[NodesConfig, str | None]:
    """Remove the options about machines; return them and the file of the node secret.

    Raises ValueError: only the head has an LLM, and Ray needs its launcher.
    """
    names = {spec.name for spec in fields(NodesConfig)}
    nodes = NodesConfig(**{name: options.pop(name) for name in list(options) if name in names})
    if nodes.distributed_executor_backend == "ray" and not has_launcher:
        raise ValueError(
            "distributed_executor_backend ray: pass launcher=RayLauncher instead, from "
            "gllm.deploy.ray.launcher"
        )
    has_address = nodes.nnodes == 1 or nodes.master_addr is not None or has_launcher
    if nodes.node_rank or not has_address:
        raise ValueError(
            "an LLM with nnodes is the head: leave node_rank out, set master_addr to an address of "
            "this machine, and run `gllm node --join` with that address on the other machines"
        )
    return replace(nodes, node_rank=0), options.pop("node_secret_file", None)
