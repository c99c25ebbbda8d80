"""Declare the shapes of answers about models, tokens and the server itself, as answer_schemas.py
does for those of endpoints that generate."""

from typing import Any, Literal

from msgspec import UNSET

from gllm.frontend.response_schemas import ResponseSchema, Unset


class ModelCard(ResponseSchema):
    """A served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    vocab_size: int


class ModelListResponse(ResponseSchema):
    """The answer of /v1/models."""

    object: Literal["list"]
    data: list[ModelCard]


class StatusResponse(ResponseSchema):
    """A state in one word."""

    status: str


class ProfileResponse(ResponseSchema):
    """A state, and where profiles are written."""

    status: str
    folder: str


class VersionResponse(ResponseSchema):
    """The version of gllm."""

    version: str


class TokenizeResponse(ResponseSchema):
    """Token ids of a prompt."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | Unset = UNSET


class DetokenizeResponse(ResponseSchema):
    """The text of token ids."""

    prompt: str


class ServerInfoResponse(ResponseSchema):
    """The configuration of server and engine."""

    version: str
    model: dict[str, Any]
    engine: dict[str, Any]
    server: dict[str, Any]


class LoadResponse(ResponseSchema):
    """Requests in the engine, and the share of KV blocks in use."""

    server_load: int
    running: int
    waiting: int
    kv_usage: float


class AbortResponse(ResponseSchema):
    """Requests that were ended."""

    aborted: int


class TokenizerInfoResponse(ResponseSchema):
    """The tokenizer's special tokens, chat template and sizes."""

    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | None
    model_max_length: int
    vocab_size: int
