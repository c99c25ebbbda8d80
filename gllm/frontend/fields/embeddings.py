"""The fields of POST /v1/embeddings.

Owns the schema. Knows nothing of how texts become vectors.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from gllm.frontend.fields.body import Count, Int32, ModelBody, about
from gllm.frontend.fields.completions import PROMPTS
from gllm.frontend.fields.generation import Salt


class EmbeddingFields(ModelBody):
    """POST /v1/embeddings."""

    required: ClassVar[tuple[str, ...]] = ("input",)
    inert: ClassVar[Mapping[str, str]] = {"user": "who asks"}

    input: Annotated[
        Any,
        about("a string, a list of strings, token ids, or a list of token ids' lists", **PROMPTS),
    ] = None
    encoding_format: Annotated[
        Literal["float", "base64"] | None, about("numbers, or float32 as base64; default float")
    ] = None
    dimensions: Annotated[
        Count | None, about("keep the first so many numbers, and scale them to length 1 again")
    ] = None
    priority: Annotated[Int32 | None, about("smaller runs earlier; default 0")] = None
    cache_salt: Annotated[
        Salt | None, about("requests share prefixes in the cache only with the same salt")
    ] = None
