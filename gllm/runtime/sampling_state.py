"""What the last stage remembers of sequences to draw their tokens.

Owns a sequence's output so far, where drawing looks back at it, and the changes to its logits that
its request asks for. It outlives the KV blocks: a preempted sequence goes on with it. Knows nothing
of batches; the arithmetic is in gllm/kernels. Only the thread that samples may change it.
"""

from collections import defaultdict
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gllm.grammar.guide import GrammarGuide
from gllm.kernels.masking import add_token_bias, allow_only_tokens, ban_tokens
from gllm.kernels.penalties import SeenTokens, apply_penalties
from gllm.messages.sampling import SequenceSamplingParams, TokenLogprobs
from gllm.messages.steps import RegisterSequences
from gllm.runtime.grammars import Grammars

EDITING = (
    *("allowed", "bad_words", "logit_bias"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
"""Fields of Sampling that change logits during the whole output."""


class History:
    """The tokens of one output, and how often each distinct token is among them.

    `known`: tokens that have been seen before the output, with a count of 0.
    """

    def __init__(self, known: Sequence[int] = ()) -> None:
        self.tokens: list[int] = []
        self._slots = {token: slot for slot, token in enumerate(dict.fromkeys(known))}
        self._known = len(self._slots)
        self._ids = np.array([*self._slots, *[0] * 64], dtype=np.int64)
        self._counts = np.zeros(len(self._ids))

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """Distinct tokens, in the order of their first appearance."""
        return self._ids[: len(self._slots)]

    @property
    def counts(self) -> npt.NDArray[np.float64]:
        """Occurrences of each of `ids` in the output."""
        return self._counts[: len(self._slots)]

    def append(self, token: int) -> None:
        """One more token."""
        slot = self._slots.setdefault(token, len(self._slots))
        if slot == len(self._ids):
            self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        self._ids[slot] = token
        self._counts[slot] += 1
        self.tokens.append(token)

    def rewind(self, length: int) -> None:
        """Back to the first `length` tokens. Raises ValueError where they are not all there."""
        if len(self.tokens) < length:
            raise ValueError(f"output token {length} is drawn after {len(self.tokens)} tokens")
        while len(self.tokens) > length:
            token = self.tokens.pop()
            slot = self._slots[token]
            self._counts[slot] -= 1
            # Slots were taken in order, so that the one given back is the last.
            if slot >= self._known and not self._counts[slot]:
                del self._slots[token]


class LogitEdits:
    """What a request does to its logits before a token is drawn; penalties come after it. Ids are
    [n] int64."""

    def __init__(self, spec: SequenceSamplingParams) -> None:
        self.allowed = _ids(spec.allowed)
        """Empty where all are."""
        self.bias_ids = _ids(spec.logit_bias)
        self.bias = torch.tensor(list(spec.logit_bias.values()), dtype=torch.float32)
        self.banned = _ids([word[0] for word in spec.bad_words if len(word) == 1])
        self.phrases = [word for word in spec.bad_words if len(word) > 1]
        """Bad words of several tokens."""
        self._by_last: dict[int, list[tuple[int, ...]]] = defaultdict(list)
        """Those, by the last token but one."""
        for word in self.phrases:
            self._by_last[word[-2]].append(word)
        self._min_tokens = spec.min_tokens if spec.banned else 0
        self.ending = _ids(spec.banned)
        off = SequenceSamplingParams()
        self._lasting = any(getattr(spec, name) != getattr(off, name) for name in EDITING)

    def concern(self, index: int) -> bool:
        """Whether there is anything to do for output token `index`."""
        return self._lasting or self.is_early(index)

    def is_early(self, index: int) -> bool:
        """Whether output token `index` must not end the sequence."""
        return index < self._min_tokens

    def apply(self, logits: Tensor, output: list[int]) -> None:
        """Change logits [vocabulary] float32 in place for the token after `output`."""
        if len(self.allowed):
            allow_only_tokens(logits, self.allowed)
        ban_tokens(logits, self.banned)
        if output:
            phrases = self._by_last.get(output[-1], ())
            completing = [p[-1] for p in phrases if tuple(output[1 - len(p) :]) == p[:-1]]
            ban_tokens(logits, _ids(completing))
        if len(self.bias):
            add_token_bias(logits, self.bias_ids, self.bias)
        if self.is_early(len(output)):
            # Ids of EOS come from the model's files and may lie outside of its vocabulary.
            ban_tokens(logits, self.ending[self.ending < len(logits)])


class SamplingState:
    """One sequence's sampling. `edits` are shared by the choices of a request."""

    def __init__(
        self,
        spec: SequenceSamplingParams,
        edits: LogitEdits | None,
        prompt: list[int],
        guide: GrammarGuide | None = None,
    ) -> None:
        self.spec = spec
        self.edits = edits
        self.guide = guide
        """Its way through its grammar, where it has one."""
        self.prompt = prompt
        """Empty where sampling does not need it."""
        self.prompt_logprobs: dict[int, TokenLogprobs] = {}
        """By position in the prompt, what has been computed of those that were asked for."""
        self.fault = ""
        """Why the sequence has to end with an error."""
        told = (spec.logprobs, spec.prompt_logprobs) != (None, None) or spec.embeds
        self.is_plain = edits is None and guide is None and not told
        """Logits and random number decide alone, and nothing is told but the token."""
        self._history: History | None = None

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Some prompt token has not been scored yet."""
        asked = self.spec.prompt_logprobs is not None
        return asked and len(self.prompt_logprobs) < len(self.prompt) - 1

    @property
    def penalizes(self) -> bool:
        """Whether a penalty is on."""
        spec = self.spec
        return (spec.repetition_penalty, spec.presence_penalty, spec.frequency_penalty) != (1, 0, 0)

    @property
    def history(self) -> History:
        """The output so far, made when first asked for: a long prompt takes a while to count."""
        if self._history is None:
            self._history = History(self.prompt if self.spec.repetition_penalty != 1 else ())
        return self._history


def states_of(message: RegisterSequences, grammars: Grammars | None = None) -> list[SamplingState]:
    """The states of a registered request's choices, none where it comes without sampling.
    `grammars`: makes guides, for requests with a grammar."""
    spec = message.sampling
    if spec is None:
        return []
    made = LogitEdits(spec)
    edits = made if made.concern(0) else None
    states = []
    for choice in range(spec.choice, spec.choice + message.n):
        told = spec.prompt_logprobs if choice == spec.choice else None
        own = msgspec.structs.replace(spec, choice=choice, prompt_logprobs=told)
        prompt = message.prompt if own.needs_prompt else []
        guide = grammars.guide(own) if own.grammar and grammars is not None else None
        states.append(SamplingState(own, edits, prompt, guide))
    return states


def edit_logits(
    logits: Tensor, states: list[SamplingState], indices: list[int], rows: list[int]
) -> None:
    """Change some `rows` of logits [all rows, vocabulary] in place as their requests ask.

    states and indices (of the output token to be drawn) are those of all rows.
    """
    penalized = []
    for row in rows:
        state = states[row]
        assert state.edits is not None, "a plain row is not changed"
        state.history.rewind(indices[row])
        state.edits.apply(logits[row], state.history.tokens)
        if state.penalizes:
            penalized.append(row)
    if penalized:
        _penalize(logits, [states[row] for row in penalized], penalized)


def _penalize(logits: Tensor, states: list[SamplingState], rows: list[int]) -> None:
    ids = [state.history.ids for state in states]
    seen = SeenTokens(
        rows=torch.from_numpy(np.repeat(rows, [len(own) for own in ids])),
        ids=torch.from_numpy(np.concatenate(ids)),
        counts=torch.from_numpy(np.concatenate([state.history.counts for state in states])),
    )
    columns = torch.tensor([[1.0], [0.0], [0.0]], dtype=torch.float64).repeat(1, len(logits))
    specs = [state.spec for state in states]
    columns[0, rows] = columns.new_tensor([spec.repetition_penalty for spec in specs])
    columns[1, rows] = columns.new_tensor([spec.frequency_penalty for spec in specs])
    columns[2, rows] = columns.new_tensor([spec.presence_penalty for spec in specs])
    apply_penalties(logits, seen, *columns)


def _ids(tokens: Sequence[int] | dict[int, float]) -> Tensor:
    return torch.tensor(list(tokens), dtype=torch.int64)
