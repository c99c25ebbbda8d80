"""POST /tokenize, POST /detokenize and GET /tokenizer_info."""

import asyncio

from aiohttp import web

from gllm.config import FieldError, ServerConfig
from gllm.frontend.chat_job import chat_prompt
from gllm.frontend.context import CONTEXT
from gllm.frontend.fields.reading import read_fields
from gllm.frontend.fields.tokens import DetokenizeFields, TokenizeFields
from gllm.frontend.logprobs import token_text
from gllm.text.tokenizer import Tokenizer

SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


async def tokenize(request: web.Request) -> web.Response:
    """The token ids of a text or of a chat."""
    context = request.app[CONTEXT]
    fields = await read_fields(request, TokenizeFields)
    context.check_model(fields.model)
    tokenizer = context.engine.tokenizer
    ids = await asyncio.to_thread(_ids, tokenizer, fields, context.config)
    texts = {}
    if fields.return_token_strs:
        texts = {"token_strs": [token_text(tokenizer, token_id) for token_id in ids]}
    length = context.engine.model.max_model_len
    return web.json_response({"count": len(ids), "max_model_len": length, "tokens": ids, **texts})


def _ids(tokenizer: Tokenizer, fields: TokenizeFields, config: ServerConfig) -> list[int]:
    if fields.prompt is None:
        return chat_prompt(tokenizer, fields.chat, config).ids
    return tokenizer.encode(fields.prompt, fields.add_special_tokens is not False)


async def detokenize(request: web.Request) -> web.Response:
    """The text of token ids."""
    context = request.app[CONTEXT]
    fields = await read_fields(request, DetokenizeFields)
    context.check_model(fields.model)
    ids, size = fields.tokens, context.engine.model.vocab_size
    if ids is None or not all(0 <= token_id < size for token_id in ids):
        raise FieldError("tokens", f"tokens has to be a list of token ids, 0..{size - 1} each")
    text = await asyncio.to_thread(context.engine.tokenizer.decode, ids, False)
    return web.json_response({"prompt": text})


async def info(request: web.Request) -> web.Response:
    """The tokenizer's special tokens, chat template and context length, as evaluations ask for."""
    context = request.app[CONTEXT]
    context.check_ready()
    model, tokenizer = context.engine.model, context.engine.tokenizer
    template = tokenizer.chat_template
    known = {} if template is None else template.special_tokens
    tokens = {name: known.get(name) for name in SPECIAL_TOKENS}
    if tokens["eos_token"] is None and model.eos_ids:
        tokens["eos_token"] = tokenizer.token(model.eos_ids[0])
    described = {
        **tokens,
        "chat_template": None if template is None else template.source,
        "model_max_length": model.max_model_len,
        "vocab_size": tokenizer.vocab_size,
    }
    return web.json_response(described)
