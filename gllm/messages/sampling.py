"""How the last stage samples a sequence, and the log-probabilities that it returns."""

import msgspec

from gllm.messages.base import Int64, TokenId


class SequenceSamplingParams(msgspec.Struct, frozen=True, array_like=True):
    """How the last stage draws the tokens of one sequence."""

    temperature: float = 1.0
    """0 means greedy."""
    top_k: Int64 = 0
    """0 means off."""
    top_p: float = 1.0
    min_p: float = 0.0
    seed: Int64 = 0
    """Any 64-bit signed integer; always set by the time it gets here."""
    choice: int = 0
    """Index of the sequence among its request's choices; part of the random counter."""
    min_tokens: int = 0
    """`banned` tokens are not drawn before this many tokens were generated."""
    banned: tuple[TokenId, ...] = ()
    """Token ids that would end the sequence."""
    repetition_penalty: float = 1.0
    """Over prompt and output; 1 means off."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[TokenId, float] = {}
    """By token id."""
    allowed: tuple[TokenId, ...] = ()
    """The only token ids that may be drawn; empty means all."""
    bad_words: tuple[tuple[TokenId, ...], ...] = ()
    """Token sequences whose last token is not drawn after the rest of them."""
    logprobs: int | None = None
    """Likeliest tokens told with each token drawn; None: no log-probabilities at all."""
    prompt_logprobs: int | None = None
    """The same for each token of the prompt; told by the first choice alone."""
    embeds: bool = False
    """Tell the prompt's embedding with the first token."""
    grammar: str = ""
    """What the output has to fit, as gllm/grammar/compiler.py gives it; empty: anything."""

    def check_ids(self, vocab_size: int) -> None:
        """Raise ValueError, naming the field, for token ids outside of the vocabulary.

        `banned` may hold such ids: those of EOS come from the model's files.
        """
        words = tuple(token for word in self.bad_words for token in word)
        named = {"logit_bias": self.logit_bias, "allowed": self.allowed, "bad_words": words}
        for name, ids in named.items():
            if ids and max(ids) >= vocab_size:
                raise ValueError(f"{name} has ids out of the vocabulary 0..{vocab_size - 1}")

    @property
    def needs_prompt(self) -> bool:
        """Whether the last stage has to know the prompt."""
        return self.repetition_penalty != 1 or self.prompt_logprobs is not None


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """How likely a token was at its place, and which were the likeliest there.

    Natural logarithms of the model's probabilities, before penalties and temperature.
    """

    token: int
    logprob: float
    rank: int
    """1 for the likeliest token."""
    top_ids: list[int]
    """Likeliest first."""
    top_logprobs: list[float]


class SampleDetails(msgspec.Struct, frozen=True, array_like=True):
    """What a sampling row has to tell besides its token."""

    seq: int
    drawn: TokenLogprobs | None
    prompt: list[TokenLogprobs]
    """Of the prompt's tokens from the second on, with the sequence's first token; else empty."""
    embedding: bytes = b""
    """[hidden] float32, little-endian: the hidden state of the prompt's last token behind the final
    norm, with the sequence's first token where it was asked for; else empty."""
