"""POST /tokenize, POST /detokenize and GET /tokenizer_info."""

import asyncio

import msgspec
from aiohttp import web

from gllm.config.field_types import FieldError
from gllm.config.limits import MAX_TOKENIZE_BYTES, check_size
from gllm.config.server import ServerConfig
from gllm.frontend.chat_request import chat_request
from gllm.frontend.context import CONTEXT
from gllm.frontend.fields.parsing import read_fields
from gllm.frontend.fields.tokens import DetokenizeFields, TokenizeFields
from gllm.frontend.json_encoding import encode_json_in_pieces
from gllm.frontend.logprobs import token_text
from gllm.text.chat.prompt import render_chat
from gllm.text.tokenizer import Tokenizer

SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


async def tokenize(request: web.Request) -> web.Response:
    """The token ids of a text or of a chat."""
    context = request.app[CONTEXT]
    fields = await read_fields(request, TokenizeFields)
    context.check_model(fields.model)
    tokenizer = context.engine.tokenizer
    length = context.engine.model.max_model_len
    body = await asyncio.to_thread(_tokenized, tokenizer, fields, context.config, length)
    return web.Response(body=body, content_type="application/json")


def _tokenized(
    tokenizer: Tokenizer, fields: TokenizeFields, config: ServerConfig, length: int
) -> bytes:
    """The answer to a request to tokenize."""
    ids = _ids(tokenizer, fields, config)
    texts = {}
    if fields.return_token_strs:
        texts = {"token_strs": [token_text(tokenizer, token_id) for token_id in ids]}
    return encode_json_in_pieces(
        {"count": len(ids), "max_model_len": length, "tokens": ids, **texts}
    )


def _ids(tokenizer: Tokenizer, fields: TokenizeFields, config: ServerConfig) -> list[int]:
    if fields.prompt is None:
        return render_chat(
            tokenizer, chat_request(fields.to_chat_completion()), config.output_parsers
        ).token_ids
    check_size("prompt", fields.prompt.encode(), MAX_TOKENIZE_BYTES, "bytes in UTF-8")
    return tokenizer.encode(fields.prompt, fields.add_special_tokens is not False)


async def detokenize(request: web.Request) -> web.Response:
    """The text of token ids."""
    context = request.app[CONTEXT]
    fields = await read_fields(request, DetokenizeFields)
    context.check_model(fields.model)
    ids, size = fields.tokens, context.engine.model.vocab_size
    if ids is None or (ids and not 0 <= min(ids) <= max(ids) < size):
        raise FieldError("tokens", f"tokens has to be a list of token ids, 0..{size - 1} each")
    text = await asyncio.to_thread(context.engine.tokenizer.decode, ids, False)
    body = msgspec.json.encode({"prompt": text})
    return web.Response(body=body, content_type="application/json")


async def get_tokenizer_info(request: web.Request) -> web.Response:
    """The tokenizer's special tokens, chat template and context length, as evaluations ask for."""
    context = request.app[CONTEXT]
    context.check_ready()
    model, tokenizer = context.engine.model, context.engine.tokenizer
    template = tokenizer.chat_template
    known = {} if template is None else template.special_tokens
    tokens = {name: known.get(name) for name in SPECIAL_TOKENS}
    if tokens["eos_token"] is None and model.eos_ids:
        tokens["eos_token"] = tokenizer.id_to_token(model.eos_ids[0])
    described = {
        **tokens,
        "chat_template": None if template is None else template.source,
        "model_max_length": model.max_model_len,
        "vocab_size": tokenizer.vocab_size,
    }
    return web.json_response(described)
