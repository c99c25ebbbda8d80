"""Convert the tokenizer of Kimi and Moonlight: tiktoken.model with special tokens beside it.

Source: the models' tokenizer_config.json and the code that they publish.
"""

from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from gllm.text.added_tokens import read_json_object, to_token
from gllm.text.conversion.byte_ranks import build_byte_tokenizer, parse_ranks

FILE = "tiktoken.model"
NUM_SPECIAL_TOKENS = 256
"""Special tokens after the vocabulary; those without a name are reserved."""
_LETTERS = r"\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}{_LETTERS}]*[\p{{Ll}}{_LETTERS}]+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}{_LETTERS}]+[\p{{Ll}}{_LETTERS}]*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""Regular expression of a word: Chinese characters, words, digits, signs, and spaces."""


def is_kimi_folder(folder: Path) -> bool:
    """Return True if a folder has a tokenizer of Kimi, by its files' own names for it."""
    config = read_json_object(folder / "tokenizer_config.json")
    named = f"{config.get('auto_map')} {read_json_object(folder / 'config.json').get('model_type')}"
    is_named = any(name in named for name in ("tokenization_kimi", "tokenization_moonshot", "kimi"))
    return (folder / FILE).is_file() and is_named


def convert_kimi(folder: Path) -> Tokenizer:
    """Return the tokenizer of a folder with a tiktoken.model of Kimi.

    Raises:
        ValueError: A file is invalid.
    """
    ranks = parse_ranks((folder / FILE).read_bytes(), FILE)
    config = read_json_object(folder / "tokenizer_config.json")
    named = config.get("added_tokens_decoder")
    named = named if isinstance(named, dict) else {}
    tokens = []
    for index in range(len(ranks), len(ranks) + NUM_SPECIAL_TOKENS):
        token = named.get(str(index))
        if isinstance(token, dict) and isinstance(token.get("content"), str):
            tokens.append(to_token(token))
        else:
            text = f"<|reserved_token_{index}|>"
            tokens.append(AddedToken(text, special=True, normalized=False))
    return build_byte_tokenizer(ranks, PATTERN, tokens)
