"""A ChatGLM3 folder's tokenizer.model to the files that gllm reads.

Owns the way from a SentencePiece model (BPE with bytes as a fallback) to tokenizer.json, and
ChatGLM3's special tokens, prompt format and ends of text. Needs no sentencepiece. Written into the
folder: tokenizer.json, tokenizer_config.json, generation_config.json; other keys of the latter two
stay.

    python -m scripts.convert_chatglm_tokenizer FOLDER
"""

import argparse
import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, processors

SPECIAL = (
    "[MASK]",
    "[gMASK]",
    "[sMASK]",
    "<sop>",
    "<eop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
)
"""Behind the vocabulary, in this order. ChatGLM3 writes sop and eop without brackets; here special
tokens are found in texts, and `sop` is a part of words."""
BEGIN = ("[gMASK]", "<sop>")
END = ("<|user|>", "<|observation|>")
"""End an answer, as the vocabulary's own end of text does."""
CHAT_TEMPLATE = (
    "{{ '" + "".join(BEGIN) + "' }}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\n' }}"
    "{% if message['content'] %}{{ ' ' + message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""ChatGLM3 encodes the role's line and the content each for itself, and each begins with a space
that is not in the text; the first is the tokenizer's, the second is written here."""

NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6
"""Types of pieces."""
BPE = 2
SPACE = "▁"


@dataclass(frozen=True)
class Piece:
    """An entry of the vocabulary; its id is its place."""

    text: str
    score: float
    kind: int


@dataclass(frozen=True)
class Normalization:
    """Normalization of a text before it is split into pieces."""

    characters: bytes
    """Replacements, in SentencePiece's own format; empty: none."""
    prefix: bool
    """A space is put before the text."""
    squeeze: bool
    """Of several spaces one is left, and none at the ends."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Convert the folder that the command line names."""
    parser = argparse.ArgumentParser(description="ChatGLM3's tokenizer.model to tokenizer.json")
    parser.add_argument("folder", type=Path, help="has tokenizer.model, gets the other files")
    try:
        convert(parser.parse_args(arguments).folder)
    except (OSError, ValueError) as error:
        parser.error(str(error))


def convert(folder: Path) -> None:
    """Write a folder's tokenizer files. Raises ValueError where its tokenizer.model is another."""
    pieces, normalization = parse((folder / "tokenizer.model").read_bytes())
    tokenizer = tokenizer_of(pieces, normalization)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    ends = [i for i, piece in enumerate(pieces) if piece.text == "</s>"]
    ends += [len(pieces) + SPECIAL.index(token) for token in END]
    update_json(folder / "tokenizer_config.json", chat_template=CHAT_TEMPLATE, eos_token="</s>")
    update_json(folder / "generation_config.json", eos_token_id=ends)


def parse(data: bytes) -> tuple[list[Piece], Normalization]:
    """Return the parts of a ModelProto that say how text is encoded. Raises ValueError.

    Source: sentencepiece_model.proto of SentencePiece, fields by number.
    """
    fields = list(_fields(data))
    pieces = [_piece(dict(_fields(value))) for number, value in fields if number == 1]
    trainer = dict(_fields(dict(fields).get(2, b"")))
    normalizer = dict(_fields(dict(fields).get(3, b"")))
    if not pieces or trainer.get(3) != BPE:
        raise ValueError("tokenizer.model is no SentencePiece model of type BPE")
    if not normalizer.get(5, True) or trainer.get(24, False):
        raise ValueError("tokenizer.model treats spaces in a way that is not implemented")
    if unknown := {piece.kind for piece in pieces} - {NORMAL, UNKNOWN, CONTROL, BYTE}:
        raise ValueError(f"tokenizer.model has pieces of types {unknown}, which is not implemented")
    if sum(piece.kind == BYTE for piece in pieces) != 256:
        raise ValueError("tokenizer.model has no fallback to bytes, which is not implemented")
    prefix, squeeze = bool(normalizer.get(3, True)), bool(normalizer.get(4, True))
    return pieces, Normalization(normalizer.get(2, b""), prefix, squeeze)


def _piece(fields: dict[int, Any]) -> Piece:
    return Piece(
        fields[1].decode(), struct.unpack("<f", fields.get(2, bytes(4)))[0], fields.get(3, NORMAL)
    )


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Numbers and values of a protobuf message's fields: an int, or bytes."""
    position = 0

    def varint() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = data[position]
            position += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    try:
        while position < len(data):
            key = varint()
            if key & 7 == 0:
                yield key >> 3, varint()
                continue
            length = varint() if key & 7 == 2 else {1: 8, 5: 4}[key & 7]
            if position + length > len(data):
                raise IndexError
            yield key >> 3, data[position : position + length]
            position += length
    except (IndexError, KeyError) as error:
        raise ValueError("tokenizer.model is no protobuf message") from error


def tokenizer_of(pieces: Sequence[Piece], normalization: Normalization) -> Tokenizer:
    """Return the same encoding, with ChatGLM3's special tokens, two of which begin every text."""
    vocabulary = {piece.text: i for i, piece in enumerate(pieces)}
    unknown = next(piece.text for piece in pieces if piece.kind == UNKNOWN)
    model = models.BPE(vocabulary, merges(pieces), unk_token=unknown, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(_steps(normalization))
    strip = [decoders.Strip(" ", 1, 0)] if normalization.prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    tokenizer.add_special_tokens([p.text for p in pieces if p.kind in (UNKNOWN, CONTROL)])
    tokenizer.add_special_tokens(list(SPECIAL))
    ids = {token: len(pieces) + i for i, token in enumerate(SPECIAL)}
    if any(tokenizer.token_to_id(token) != i for token, i in ids.items()):
        raise ValueError(f"tokenizer.model already has one of {', '.join(SPECIAL)}")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*BEGIN, "$A"], special_tokens=[(token, ids[token]) for token in BEGIN]
    )
    return tokenizer


def _steps(normalization: Normalization) -> list[normalizers.Normalizer]:
    """From a text to what is cut into pieces."""
    steps: list[normalizers.Normalizer] = []
    if normalization.characters:
        steps.append(normalizers.Precompiled(normalization.characters))
    if normalization.squeeze:
        steps.append(normalizers.Replace(Regex(r"\A +| +\z"), ""))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    if normalization.prefix:
        steps.append(normalizers.Prepend(SPACE))
    return [*steps, normalizers.Replace(" ", SPACE)]


def merges(pieces: Sequence[Piece]) -> list[tuple[str, str]]:
    """All pairs of pieces that make a piece, best first.

    SentencePiece knows scores of pieces only, and merges whichever two neighbours make the best.
    """
    scores = {piece.text: piece.score for piece in pieces if piece.kind == NORMAL}
    best_first = sorted(scores, key=lambda text: -scores[text])
    halves = ((text[:cut], text[cut:]) for text in best_first for cut in range(1, len(text)))
    return [(left, right) for left, right in halves if left in scores and right in scores]


def update_json(file: Path, **values: object) -> None:
    """Set keys of a JSON file, which need not be there."""
    found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    file.write_text(json.dumps(found | values, ensure_ascii=False, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
