"""The fields of POST /v1/embeddings.

Owns the schema. Knows nothing of how texts become vectors.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from gllm.frontend.fields.base import Int32, ModelRequestFields, PositiveInt, doc
from gllm.frontend.fields.completions import PROMPTS
from gllm.frontend.fields.generation import CacheSalt


class EmbeddingFields(ModelRequestFields):
    """POST /v1/embeddings."""

    required_fields: ClassVar[tuple[str, ...]] = ("input",)
    ignored_fields: ClassVar[Mapping[str, str]] = {"user": "who asks"}

    input: Annotated[
        Any,
        doc("a string, a list of strings, token ids, or a list of token ids' lists", **PROMPTS),
    ] = None
    encoding_format: Annotated[
        Literal["float", "base64"] | None, doc("numbers, or float32 as base64; default float")
    ] = None
    dimensions: Annotated[
        PositiveInt | None, doc("keep the first so many numbers, and scale them to length 1 again")
    ] = None
    priority: Annotated[Int32 | None, doc("smaller runs earlier; default 0")] = None
    cache_salt: Annotated[
        CacheSalt | None, doc("requests share prefixes in the cache only with the same salt")
    ] = None
