"""The served model and its tokenizer: /v1/models, /tokenize, /detokenize, /tokenizer_info."""

import asyncio

from aiohttp import web

from gllm.engine.interface import EngineInterface
from gllm.frontend import server_response_schemas as schemas
from gllm.frontend.chat_request import to_chat_request
from gllm.frontend.context import CONTEXT, ServerContext
from gllm.frontend.fields.chat import DetokenizeFields, TokenizeFields
from gllm.frontend.fields.parsing import read_fields
from gllm.frontend.json_encoding import encode_json_in_pieces, json_response
from gllm.frontend.logprobs import token_text
from gllm.options.field_types import FieldError
from gllm.options.limits import MAX_TOKENIZE_BYTES, check_size
from gllm.text.chat.prompt import REASONING_CONTROLS, render_chat


async def list_models(request: web.Request) -> web.Response:
    """Return a list with the served model."""
    card = _model_card(request.app[CONTEXT].engine)
    return json_response(schemas.ModelListResponse(object="list", data=[card]))


async def get_model(request: web.Request) -> web.Response:
    """Return the served model; the status is 404 for another name."""
    context = request.app[CONTEXT]
    context.check_model(request.match_info["model"])
    return json_response(_model_card(context.engine))


def _model_card(engine: EngineInterface) -> schemas.ModelCard:
    model, template = engine.model, engine.tokenizer.chat_template
    variables = set() if template is None else template.variables
    return schemas.ModelCard(
        id=model.name,
        object="model",
        created=model.created,
        owned_by="gllm",
        root=model.root or model.name,
        parent=None,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        reasoning_controls=[name for name in REASONING_CONTROLS if name in variables],
    )


async def tokenize(request: web.Request) -> web.Response:
    """Return the token ids of a text, or of a chat rendered by the chat template."""
    context = request.app[CONTEXT]
    fields = await read_fields(request, TokenizeFields)
    context.check_model(fields.model)
    body = await asyncio.to_thread(_tokenize_body, context, fields)
    return web.Response(body=body, content_type="application/json")


def _tokenize_body(context: ServerContext, fields: TokenizeFields) -> bytes:
    """Return the body of an answer of /tokenize. Raises FieldError."""
    tokenizer = context.engine.tokenizer
    if fields.prompt is None:
        chat = to_chat_request(fields.to_chat_completion())
        token_ids = render_chat(tokenizer, chat, context.config.output_parsers).token_ids
    else:
        check_size("prompt", fields.prompt.encode(), MAX_TOKENIZE_BYTES, "bytes in UTF-8")
        token_ids = tokenizer.encode(fields.prompt, fields.add_special_tokens is not False)
    answer = schemas.TokenizeResponse(
        count=len(token_ids), max_model_len=context.engine.model.max_model_len, tokens=token_ids
    )
    if fields.return_token_strs:
        answer.token_strs = [token_text(tokenizer, token_id) for token_id in token_ids]
    return encode_json_in_pieces(answer)


async def detokenize(request: web.Request) -> web.Response:
    """Return the text of a list of token ids."""
    context = request.app[CONTEXT]
    fields = await read_fields(request, DetokenizeFields)
    context.check_model(fields.model)
    token_ids, vocab_size = fields.tokens, context.engine.model.vocab_size
    assert token_ids is not None  # `tokens` is required.
    smallest, largest = min(token_ids, default=0), max(token_ids, default=0)
    if smallest < 0 or largest >= vocab_size:
        invalid_id = smallest if smallest < 0 else largest
        message = f"tokens contains {invalid_id}, but token ids have to be in [0, {vocab_size - 1}]"
        raise FieldError("tokens", message)
    text = await asyncio.to_thread(context.engine.tokenizer.decode, token_ids, False)
    return json_response(schemas.DetokenizeResponse(prompt=text))


async def get_tokenizer_info(request: web.Request) -> web.Response:
    """Return the tokenizer's special tokens, chat template and context length."""
    context = request.app[CONTEXT]
    context.check_accepting()
    model, tokenizer = context.engine.model, context.engine.tokenizer
    template = tokenizer.chat_template
    special_tokens = {} if template is None else template.special_tokens
    eos_token = special_tokens.get("eos_token")
    if eos_token is None and model.eos_ids:
        eos_token = tokenizer.id_to_token(model.eos_ids[0])
    return json_response(
        schemas.TokenizerInfoResponse(
            bos_token=special_tokens.get("bos_token"),
            eos_token=eos_token,
            pad_token=special_tokens.get("pad_token"),
            unk_token=special_tokens.get("unk_token"),
            chat_template=None if template is None else template.source,
            model_max_length=model.max_model_len,
            vocab_size=tokenizer.vocab_size,
        )
    )
