"""Blocking interface of the engine: prompts in, finished texts out.

Runs the engine's event loop on a thread of its own and shows a progress bar.
"""

import asyncio
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

from tqdm import tqdm

from gllm.config.attachment import AttachmentConfig
from gllm.config.engine import EngineConfig
from gllm.config.nodes import NodesConfig
from gllm.config.output_parsers import OutputParserConfig
from gllm.config.sampling import SamplingParams
from gllm.engine.chat import prepare_chat
from gllm.engine.engine import Engine, EngineError
from gllm.engine.engine_thread import EngineThread
from gllm.engine.request_checks import check_options, check_request, truncate_prompt
from gllm.messages.sampling import TokenLogprobs
from gllm.options.field_types import to_str, to_token_ids
from gllm.text.chat.output_parser import ChatOutputParser
from gllm.text.chat.prompt import ChatRequest, ReasoningEffort
from gllm.text.chat.tools import parse_tools
from gllm.text.output.events import ToolCall
from gllm.text.output.parser import OutputFormat

Launcher = Callable[[EngineConfig, NodesConfig, str | None], AbstractContextManager[NodesConfig]]
"""Starts the other machines of an engine and returns them once entered; ends them on exit. Its
arguments: the engine, the options about machines, the path of the secret file."""


@dataclass
class CompletionOutput:
    """Generated text, tokens and finish reason of one choice of a prompt."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    """stop, length or abort; of a chat also tool_calls."""
    stop_reason: int | str | None = None
    """The stop token id or stop string that ended the choice, if one did."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Log-probabilities of each token, if requested."""


@dataclass
class RequestOutput:
    """Prompt with all of its finished choices, as `LLM.generate` returns it."""

    prompt: str | list[int]
    outputs: list[CompletionOutput]
    """The choices, `n` of them."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Log-probabilities of the prompt's tokens from the second on, if requested."""


@dataclass
class ChatCompletionOutput(CompletionOutput):
    """Finished choice of a chat: text, reasoning and tool calls, and the raw output."""

    content: str = ""
    """The answer without reasoning and tool calls."""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)

    @property
    def message(self) -> dict[str, Any]:
        """The assistant message, to be appended to the messages of the next request."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [call.to_dict() for call in self.tool_calls]
        return message


@dataclass
class ChatOutput:
    """Prompt of a chat with all of its finished choices, as `LLM.chat` returns it."""

    prompt: list[int]
    """Token ids of the rendered chat."""
    outputs: list[ChatCompletionOutput]
    """The choices, `n` of them."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Log-probabilities of the prompt's tokens from the second on, if requested."""


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
        prompts: str | Sequence[str] | Sequence[list[int]],
        sampling_params: SamplingParams | None = None,
    ) -> list[RequestOutput]:
        """Return the completions of each prompt, in the order of the prompts.

        All prompts are in the engine at once.

        Args:
            prompts: Texts or token ids, which may be numpy arrays.
            sampling_params: Parameters of all prompts; by default the model's own sampling
                parameters, with outputs of any length.

        Raises:
            FieldError: A prompt or parameter is invalid; no prompt has run then.
            EngineError: A request failed.
        """
        prompt_list: Sequence[str | list[int]] = [prompts] if isinstance(prompts, str) else prompts
        params = self._params(sampling_params)
        return self._thread.run(partial(self._generate_all, prompt_list, params))

    def chat(
        self,
        messages: Sequence[dict[str, Any]],
        sampling_params: SamplingParams | None = None,
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        tool_choice: str | dict[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        reasoning_effort: ReasoningEffort | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> ChatOutput:
        """Return the assistant's answer to a conversation, with reasoning and tool calls.

        Arguments mean what the fields of `/v1/chat/completions` mean (docs/tools.md). Special
        tokens spelled in messages and tools are ordinary text.

        Args:
            messages: The conversation: `role`, `content` and, of calls and results, `tool_calls`
                and `tool_call_id`.
            sampling_params: Parameters as for `generate`; `structured` applies to the content.
            tools: Functions and custom tools that the model may call.
            tool_choice: auto (the default), none, required, or an object that names a tool.
            parallel_tool_calls: Allow several calls where a call is required.
            reasoning_effort: How much to reason, if the chat template has a variable for it.
            chat_template_kwargs: Variables of the chat template.
            add_generation_prompt: Begin the assistant's answer.
            continue_final_message: Continue the last message, which is the assistant's.

        Raises:
            FieldError: An argument is invalid.
            EngineError: The request failed.
        """
        params = self._params(sampling_params)
        check_options(params, 0, "", "")
        request = ChatRequest(
            messages=list(messages),
            tool_options=replace(
                parse_tools(None if tools is None else list(tools), tool_choice),
                is_single_call=not parallel_tool_calls,
            ),
            template_variables=chat_template_kwargs or {},
            reasoning_effort=reasoning_effort,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        engine = self.engine
        chat = prepare_chat(request, params, engine.model, engine.tokenizer, self._parsers)
        (output,) = self._thread.run(partial(self._generate_all, [chat.token_ids], chat.params))
        choices = [_parse_choice(choice, chat.output_format) for choice in output.outputs]
        return ChatOutput(chat.token_ids, choices, output.prompt_logprobs)

    def close(self) -> None:
        """Stop the workers; calls of other threads get the output so far, with an error.

        Later calls have no effect. If the wait is interrupted, the workers end nevertheless.
        """
        self._thread.end()
        self._thread.join()

    def _params(self, params: SamplingParams | None) -> SamplingParams:
        """Return the given parameters, or else the model's own sampling defaults."""
        return SamplingParams(**self.engine.model.defaults) if params is None else params

    async def _generate_all(
        self, prompts: Sequence[str | list[int]], params: SamplingParams
    ) -> list[RequestOutput]:
        check_options(params, 0, "", "")
        ids = [self._token_ids(f"prompts[{index}]", p) for index, p in enumerate(prompts)]
        model = self.engine.model
        ids = [truncate_prompt(prompt, params, model) for prompt in ids]
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
            return self.engine.tokenizer.encode(to_str(name, prompt))
        return to_token_ids(name, prompt)

    async def _run(
        self, prompt: list[int], params: SamplingParams, bar: "tqdm[Any]"
    ) -> tuple[list[CompletionOutput], list[TokenLogprobs]]:
        outputs = [CompletionOutput() for _ in range(params.n)]
        prompt_logprobs: list[TokenLogprobs] = []
        async for delta in self.engine.generate(prompt, params):
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
