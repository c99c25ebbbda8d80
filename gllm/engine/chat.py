"""Prepare a chat request for generation, for the HTTP frontend and `LLM.chat` alike."""

from dataclasses import dataclass, replace

from gllm.config.output_parsers import OutputParserConfig
from gllm.config.sampling import SamplingParams
from gllm.engine.interface import ModelInfo
from gllm.engine.request_checks import check_request, convert_length_errors, truncate_prompt
from gllm.text.chat.output_grammar import constrain_output
from gllm.text.chat.prompt import ChatRequest, render_chat
from gllm.text.output.parser import OutputFormat
from gllm.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class PreparedChat:
    """Chat request converted to prompt tokens, sampling parameters and output format."""

    token_ids: list[int]
    """Prompt tokens, truncated as the sampling parameters require."""
    params: SamplingParams
    """The request's parameters with the grammar and the special tokens that the parser needs."""
    output_format: OutputFormat
    """Formats of reasoning and tool calls by which the output is parsed."""


def prepare_chat(
    request: ChatRequest,
    params: SamplingParams,
    model: ModelInfo,
    tokenizer: Tokenizer,
    parsers: OutputParserConfig,
) -> PreparedChat:
    """Render a chat as prompt tokens, check it, and build the grammar of its tools or schema.

    It takes long for long prompts and large schemas: call it in a thread, not on an event loop.

    Args:
        request: messages, tools and output format of the chat.
        params: sampling parameters of the request.
        model: limits and defaults of the model.
        tokenizer: the model's tokenizer with its chat template.
        parsers: formats of tool calls and reasoning.

    Raises:
        FieldError: The request is invalid; the error names its field.
        PromptTooLongError: The prompt leaves no space for output in the model's context.
    """
    with convert_length_errors("messages", model):
        is_truncated = params.truncate_prompt_tokens is not None
        max_tokens = None if is_truncated else model.max_model_len - 1
        prompt = render_chat(tokenizer, request, parsers, max_tokens)
    token_ids = truncate_prompt(prompt.token_ids, params, model)
    check_request(token_ids, params, model, param="messages")
    structured, output_format = constrain_output(
        params.structured,
        request.tool_options,
        prompt.output_format,
        prompt.template_source,
        tokenizer.token_to_id,
    )
    known = {None, *model.eos_ids, *params.stop_token_ids}
    ends = map(tokenizer.token_to_id, output_format.end_tokens)
    further = [token for token in ends if token is not None and token not in known]
    params = replace(
        params,
        stop_token_ids=(*params.stop_token_ids, *further),
        shown_tokens=output_format.markers,
        continues_prompt=request.continue_final_message,
        structured=structured,
    )
    return PreparedChat(token_ids, params, output_format)
