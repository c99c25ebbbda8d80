"""Names of the encodings of activations between machines; no encoding is imported here."""

from types import MappingProxyType

PLAIN = "plain"
LINK_ENCODINGS = MappingProxyType(
    {
        PLAIN: ("gllm.transport.link.encodings", "PlainEncoding"),
        "int8": ("gllm.transport.link.int8_encoding", "Int8Encoding"),
    }
)
"""Module and class by name, imported on first use."""
