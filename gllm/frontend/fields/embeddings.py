"""Request fields of POST /v1/embeddings."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from gllm.frontend.fields.base import Int32, ModelRequestFields, PositiveInt, doc
from gllm.frontend.fields.completions import PROMPT_FORMS, PROMPT_SCHEMA
from gllm.frontend.fields.generation import CacheSalt


class EmbeddingFields(ModelRequestFields):
    """POST /v1/embeddings."""

    required_fields: ClassVar[tuple[str, ...]] = ("input",)
    ignored_fields: ClassVar[Mapping[str, str]] = {"user": "identifies the end user"}

    input: Annotated[Any, doc(PROMPT_FORMS, **PROMPT_SCHEMA)] = None
    encoding_format: Annotated[
        Literal["float", "base64"] | None,
        doc("float (default): lists of numbers; base64: bytes of float32 numbers"),
    ] = None
    dimensions: Annotated[
        PositiveInt | None,
        doc("return this number of leading components, normalized to length 1"),
    ] = None
    priority: Annotated[
        Int32 | None, doc("requests with smaller values are scheduled first; default 0")
    ] = None
    cache_salt: Annotated[
        CacheSalt | None,
        doc("requests share prefix cache blocks only with requests of the same salt"),
    ] = None
