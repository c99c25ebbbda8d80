"""Length from which on a prompt's KV is transferred while it is computed: Splitwise's theta.

Measured at the prefill engine: the time between the end of a prefill and the end of the transfer of
its KV, of prompts that were transferred during the prefill and after it. Source: "Splitwise"
(ISCA'24, arXiv 2311.18677), section IV-C, which has one threshold for H100s. Pure: time is an
argument.
"""

from gllm.transport.kv.transfer_estimate import TransferEstimate

MIN_TOKENS = 32
"""Smallest threshold: the layers of a step of fewer tokens are not counted one by one."""
MAX_TOKENS = 8192
"""Largest threshold, at which almost all prompts are transferred after their prefill."""
TRIAL_INTERVAL = 16
"""Prompts of which one is transferred the other way, so that both ways stay measured."""
MARGIN = 1.1
"""Factor by which a transfer after the prefill has to end later: one during the prefill takes time
of the prefill, which is not measured."""


class PushThreshold:
    """Finds the threshold by measured transfers.

    Args:
        initial_tokens: threshold until both ways are measured.
    """

    def __init__(self, initial_tokens: int) -> None:
        self.num_tokens = initial_tokens
        """Threshold in tokens to compute."""
        self._after = TransferEstimate()
        """Time that passes after a prefill, by prompt tokens, of transfers that begin then."""
        self._during = TransferEstimate()
        """The same of transfers that begin during the prefill."""
        self._largest = [0, 0]
        """Tokens of the largest transfer after and during the prefill."""
        self._num_prompts = 0

    def next_threshold(self) -> int:
        """Return the threshold for the next prompt: now and then one that only measures."""
        self._num_prompts += 1
        if self._num_prompts % TRIAL_INTERVAL:
            return self.num_tokens
        # All prompts one way, or all of them the other way.
        return MIN_TOKENS if self._num_prompts % (2 * TRIAL_INTERVAL) else MAX_TOKENS

    def observe(self, num_tokens: int, is_pushed: bool, seconds: float, now: float) -> None:
        """Learn from a complete transfer.

        Args:
            num_tokens: tokens of the prompt.
            is_pushed: True if the transfer began during the prefill.
            seconds: time from the end of the prefill to that of the transfer.
            now: time of its end in seconds.
        """
        estimate = self._during if is_pushed else self._after
        # One that has ended with the prefill took no time, which the estimate would ignore.
        estimate.observe(num_tokens, max(seconds, 1e-6), now)
        self._largest[is_pushed] = max(self._largest[is_pushed], num_tokens)
        if all(self._largest):
            self.num_tokens = self._find()

    def _find(self) -> int:
        """Return the least number of tokens from which on transfers after the prefill end later."""
        best, num_tokens = MAX_TOKENS, MIN_TOKENS
        sizes = []
        while num_tokens <= min(MAX_TOKENS, 2 * max(self._largest)):
            sizes.append(num_tokens)
            num_tokens *= 2
        for num_tokens in reversed(sizes):
            after, during = self._after.predict(num_tokens), self._during.predict(num_tokens)
            assert after is not None
            assert during is not None
            if after <= MARGIN * during:
                break
            best = num_tokens
        return best
