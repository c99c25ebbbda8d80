"""Letters of byte-level vocabularies: one character for each byte."""


def _byte_alphabet() -> dict[str, int]:
    """Return the byte of each character of a byte-level vocabulary.

    Printable bytes stand for themselves; the others have the code points from 256 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_LEVEL_ALPHABET = _byte_alphabet()
"""Byte of each character of a byte-level vocabulary."""
