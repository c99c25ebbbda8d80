"""Sampling parameters of a sequence on the last stage, and the details that a sample returns."""

import msgspec

from gllm.messages.base import Int64, TokenId

ALL_TOKENS_BANNED = "every token of the vocabulary is forbidden"
"""Error of a row whose request leaves it no token."""


class SequenceSamplingParams(msgspec.Struct, frozen=True, array_like=True):
    """Sampling parameters of one sequence in the form that the last stage uses.

    `gllm.config.sampling.SamplingParams` has the parameters as users set them.
    """

    temperature: float = 1.0
    """0 means greedy."""
    top_k: Int64 = 0
    """0 means off."""
    top_p: float = 1.0
    min_p: float = 0.0
    seed: Int64 = 0
    """Seed of the random numbers; the engine sets it for requests without one."""
    choice: int = 0
    """Index of the sequence among its request's choices; part of the random counter."""
    min_tokens: int = 0
    """`banned` tokens are not sampled before this many tokens were generated."""
    banned: tuple[TokenId, ...] = ()
    """Token ids that would end the sequence."""
    repetition_penalty: float = 1.0
    """Penalizes tokens of prompt and output; 1 means off."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[TokenId, float] = {}
    """Added to logits, by token id."""
    allowed: tuple[TokenId, ...] = ()
    """The only token ids that may be sampled; empty for all."""
    bad_words: tuple[tuple[TokenId, ...], ...] = ()
    """Banned token sequences: the last token is not sampled after the other ones."""
    logprobs: int | None = None
    """Number of top tokens to return with each sampled token; None for no log-probabilities."""
    prompt_logprobs: int | None = None
    """Number of top tokens to return with each prompt token; only the first choice returns them."""
    embeds: bool = False
    """True to return the prompt's embedding with the first token."""
    grammar: str = ""
    """Grammar of the output as gllm/text/grammar/compiler.py writes it; empty for none."""

    def check_ids(self, vocab_size: int) -> None:
        """Check that token ids are in the vocabulary.

        `banned` may have ids outside of it: those of EOS come from the model's files.

        Raises:
            ValueError: some id is not; the message names the field.
        """
        bad_words = tuple(token for word in self.bad_words for token in word)
        fields = {"logit_bias": self.logit_bias, "allowed": self.allowed, "bad_words": bad_words}
        for name, ids in fields.items():
            if ids and max(ids) >= vocab_size:
                raise ValueError(f"{name} has ids out of the vocabulary 0..{vocab_size - 1}")

    @property
    def needs_prompt(self) -> bool:
        """True if the last stage needs the prompt's token ids."""
        return self.repetition_penalty != 1 or self.prompt_logprobs is not None


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability and rank of a token, and the most likely tokens at its position.

    Natural logarithms of the model's probabilities, before penalties and temperature.
    """

    token: int
    """Token id."""
    logprob: float
    rank: int
    """1 for the most likely token."""
    top_ids: list[int]
    """Most likely first."""
    top_logprobs: list[float]


class SampleDetails(msgspec.Struct, frozen=True, array_like=True):
    """Logprobs and embedding that a sequence returns with a sampled token, as far as requested."""

    seq: int
    sampled: TokenLogprobs | None
    """Log-probability of the sampled token; None if not requested."""
    prompt_logprobs: list[TokenLogprobs]
    """Log-probabilities of the prompt from its second token on, with the first sampled token; else
    empty."""
    embedding: bytes = b""
    """[hidden] float32, little-endian: the hidden state of the prompt's last token after the final
    norm, with the sequence's first token if requested; else empty."""
