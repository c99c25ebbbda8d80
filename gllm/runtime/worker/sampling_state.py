"""Sampling state of each sequence on the last stage: its output so far, logit edits and grammar.

The state outlives the KV blocks of a sequence, so a preempted sequence resumes with it. Only the
thread that samples changes it, apart from what is planned with a micro-batch.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from gllm.messages.sampling import SequenceSamplingParams, TokenLogprobs
from gllm.messages.steps import RegisterSequences
from gllm.runtime.worker.grammars import GuideFactory
from gllm.runtime.worker.logit_edits import RequestLogitEdits
from gllm.text.grammar.guide import GrammarGuide


class TokenHistory:
    """The tokens of one output and the count of each distinct token.

    Distinct tokens have slots in the order of their first appearance; `ids` and `counts` are arrays
    over slots. `prompt_tokens` get a slot with a count of 0.
    """

    def __init__(self, prompt_tokens: Sequence[int] = ()) -> None:
        self.tokens: list[int] = []
        self._slots = {token: slot for slot, token in enumerate(dict.fromkeys(prompt_tokens))}
        self._num_prompt_slots = len(self._slots)
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
        """Append an output token."""
        slot = self._slots.setdefault(token, len(self._slots))
        if slot == len(self._ids):
            self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        self._ids[slot] = token
        self._counts[slot] += 1
        self.tokens.append(token)

    def truncate(self, length: int) -> None:
        """Remove all output tokens but the first `length`.

        Raises:
            ValueError: the output has fewer tokens.
        """
        if len(self.tokens) < length:
            raise ValueError(f"output token {length} is sampled after {len(self.tokens)} tokens")
        while len(self.tokens) > length:
            token = self.tokens.pop()
            slot = self._slots[token]
            self._counts[slot] -= 1
            # Slots are assigned in order, so the slot that becomes free is the last one.
            if slot >= self._num_prompt_slots and not self._counts[slot]:
                del self._slots[token]


class SamplingState:
    """Sampling state of one sequence; the choices of a request share `edits`.

    Args:
        params: sampling parameters of the sequence.
        edits: logit edits of its request; None if it has none.
        prompt: token ids of the prompt; empty if sampling does not need them.
        guide: guide of a sequence with a grammar.
        output: tokens that the sequence generated before it was registered.
    """

    def __init__(
        self,
        params: SequenceSamplingParams,
        edits: RequestLogitEdits | None,
        prompt: list[int],
        guide: GrammarGuide | None = None,
        output: Sequence[int] = (),
    ) -> None:
        self.params = params
        self.edits = edits
        self.guide = guide
        """Position in the grammar, for a sequence that has one."""
        self.prompt = prompt
        """Token ids; empty if sampling does not need them."""
        self.prompt_logprobs: dict[int, TokenLogprobs] = {}
        """LogprobTensors computed so far, by position in the prompt."""
        self.num_planned_scores = 0
        """Prompt tokens after the first one that a micro-batch so far has scored or will score."""
        self.error = ""
        """The reason for which the sequence has to end with an error."""
        has_scores = params.logprobs is not None or params.prompt_logprobs is not None
        has_details = has_scores or params.embeds
        self.is_plain = edits is None and guide is None and not has_details
        """True if a row only samples a token: no edits, no grammar, no details."""
        self.first_index = len(output)
        """Index in the output of the first token that is sampled here."""
        self._output = output
        self._history: TokenHistory | None = None

    @property
    def needs_prompt_logprobs(self) -> bool:
        """True if log-probabilities of the prompt are requested and not all planned so far.

        Known from the step plans, without results, so that all ranks of a stage compute the logits
        of the same rows.
        """
        is_requested = self.params.prompt_logprobs is not None
        return is_requested and self.num_planned_scores < len(self.prompt) - 1

    def returns_prompt_logprobs(self, output_index: int) -> bool:
        """Return True if this output token returns the log-probabilities of the prompt."""
        return output_index == self.first_index and self.params.prompt_logprobs is not None

    @property
    def has_penalties(self) -> bool:
        """True if a repetition, presence or frequency penalty is on."""
        params = self.params
        values = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
        return values != (1, 0, 0)

    @property
    def history(self) -> TokenHistory:
        """The output so far, created on first use: counting a long prompt takes a while."""
        if self._history is None:
            has_repetition = self.params.repetition_penalty != 1
            self._history = TokenHistory(self.prompt if has_repetition else ())
            for token in self._output:
                self._history.append(token)
        return self._history


def create_sampling_states(
    message: RegisterSequences, grammars: GuideFactory | None = None
) -> list[SamplingState]:
    """Create the states of a registered request's choices; none if the message has no sampling.

    Args:
        message: the registration.
        grammars: creates guides for sequences with a grammar; None for none.
    """
    request = message.sampling
    if request is None:
        return []
    request_edits = RequestLogitEdits(request)
    edits = request_edits if request_edits.applies_to(0) else None
    states = []
    choices = message.choices or range(request.choice, request.choice + message.n)
    outputs = message.outputs or [[]] * message.n
    for choice, output in zip(choices, outputs, strict=True):
        prompt_logprobs = request.prompt_logprobs if choice == choices[0] else None
        params = msgspec.structs.replace(request, choice=choice, prompt_logprobs=prompt_logprobs)
        prompt = message.prompt if params.needs_prompt else []
        guide = None
        if params.grammar and grammars is not None:
            guide = grammars.create_guide(params, output)
        states.append(SamplingState(params, edits, prompt, guide, output))
    return states


def create_default_states(message: RegisterSequences) -> list[SamplingState]:
    """Create states without edits and grammars for a request that cannot be sampled.

    They score the prompt if the request does, as on ranks on which nothing failed.
    """
    request = message.sampling or SequenceSamplingParams()
    default = SequenceSamplingParams()
    first = SequenceSamplingParams(prompt_logprobs=request.prompt_logprobs)
    return [
        SamplingState(default if index else first, None, [] if index else message.prompt)
        for index in range(message.n)
    ]
