r"""Splits of texts into words before byte-pair encoding, by the names in GGUF files.

`tokenizer.ggml.pre` names the split; each is a list of regular expressions of the tokenizers
library, applied one after the other to the pieces that those before have left. What an expression
matches becomes a piece of its own, and so does what lies between two matches.

Source: the tokenizer.json files of the models after which llama.cpp has named them.
"""

from collections.abc import Mapping
from types import MappingProxyType

CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
"""Endings of English words behind an apostrophe."""
GPT2 = rf"{CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
"""Split of GPT-2: words, numbers and other characters, each with one space before it."""
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
"""Alternatives for whitespace that is not part of a word, with line breaks apart."""
DIGIT = r"\p{N}"
"""Expression for one digit."""
DIGITS = r"\p{N}{1,3}"
"""Expression for up to three digits."""
DEEPSEEK_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|" + SPACES
)
"""Words of DeepSeek V3, with one sign before them."""
BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"
"""Words of BLOOM: all but spaces and the marks at ends of sentences."""
CHINESE = "[一-龥ࠀ-一가-퟿]+"
"""Runs of characters that DeepSeek's first tokenizers keep apart."""
LATIN = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅ"
    "Ὀ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴ"
    "ℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
"""Letters with two cases, in which DeepSeek LLM finds words; those of which Unicode has two forms
are escaped, because editors replace them."""


def _words(digits: str, contractions: str = f"(?i:{CONTRACTIONS})|", marks: str = r"\r\n") -> str:
    """Return the split that Llama 3 and Qwen2 have in common: words with one sign before them."""
    return (
        rf"{contractions}[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[{marks}]*|"
        + SPACES
    )


def _cased_words(digits: str, ending: str = "") -> str:
    """Return the split of Tekken and GPT-4o, which begins a word at an upper case letter."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    sign = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{sign}{upper}*{lower}+{ending}|{sign}{upper}+{lower}*{ending}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACES}"
    )


PRE_TOKENIZERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "default": (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
        "gpt-2": (GPT2,),
        "llama-bpe": (_words(DIGITS),),
        "qwen2": (_words(DIGIT),),
        "qwen35": (
            rf"(?i:{CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|{DIGIT}"
            rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{SPACES}",
        ),
        "smollm": (DIGIT, GPT2),
        "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"),
        "deepseek-llm": (
            r"[\r\n]",
            rf"\s?[{LATIN}]+",
            r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
            r"\s+$",
            CHINESE,
            r"\p{N}+",
        ),
        "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CHINESE, DIGIT),
        "deepseek-v3": (DIGITS, "[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK_WORDS),
        "tekken": (_cased_words(DIGIT),),
        "gpt-4o": (_cased_words(DIGITS, f"(?i:{CONTRACTIONS})?"),),
        "chameleon": (
            "<sentinel:[0-9]+>",
            "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
            r"([\t\n]|    |  )",
            DIGIT,
            r"[\p{P}!-/:-@\[-`{-~]",
            GPT2,
        ),
        "bloom": (BLOOM,),
        "viking": (BLOOM, DIGIT),
        "seed-coder": (
            rf"(?i:{CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{DIGIT}"
            rf"| ?[^\s\p{{L}}\p{{N}}\r\n]+|{SPACES}",
        ),
        "superbpe": (r"\p{N}+", r"(?=(\d{3})+(?!\d))"),
    }
)
"""Regular expressions by name."""

ALIASES: Mapping[str, str] = MappingProxyType(
    {
        alias: name
        for name, aliases in {
            "gpt-2": "mpt olmo jais gpt-neox phi-2 gigachat exaone4 roberta-bpe trillion",
            "llama-bpe": "llama3 llama-v3 falcon3 pixtral dbrx smaug-bpe chatglm-bpe glm4",
            "qwen2": "deepseek-r1-qwen megrez stablelm2 hunyuan",
            "smollm": "starcoder refact command-r codeshell exaone minerva-7b",
            "bloom": "poro-chat gpt3-finnish",
            "gpt-4o": "llama4 kanana2",
        }.items()
        for alias in aliases.split()
    }
)
"""Names with the same split as another one."""

IGNORE_MERGES = frozenset(
    ["llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "glm4", "tekken"]
)
"""Splits whose words are tokens at once if the vocabulary has them, whatever the merges say."""
ADD_BOS = frozenset(
    ["llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken", "minerva-7b"]
)
"""Splits of models whose texts begin with bos_token unless the file says otherwise."""
