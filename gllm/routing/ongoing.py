"""Unfinished requests of one engine with their progress, for policies that look at each of them."""

from collections.abc import Iterable

from gllm.options.slo import Slo
from gllm.routing.state import OngoingRequest
from gllm.scheduler.output_lengths import UNKNOWN_LENGTH, LengthEstimate


class OngoingRequests:
    """Table of a router's unfinished requests on one engine, with their progress.

    Ids are those of the router's messages to the engine. Reads no clock: time is an argument.
    """

    def __init__(self) -> None:
        self._requests: dict[int, OngoingRequest] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def on_sent(
        self,
        wire_id: int,
        num_prompt_tokens: int,
        length_estimate: LengthEstimate = UNKNOWN_LENGTH,
        slo: Slo | None = None,
    ) -> None:
        """Add a request that is sent to the engine.

        Args:
            wire_id: id of the sequence.
            num_prompt_tokens: tokens to prefill.
            length_estimate: prediction of the tokens that it generates there.
            slo: its limits of latency; None for none.
        """
        self._requests[wire_id] = OngoingRequest(
            num_prompt_tokens, length_estimate=length_estimate, slo=slo
        )

    def on_tokens(self, wire_ids: Iterable[int], now: float) -> None:
        """Count a token of each sequence; unknown ids are ignored."""
        for wire_id in wire_ids:
            progress = self._requests.get(wire_id)
            if progress is None:
                continue
            if not progress.num_output_tokens:
                progress.first_token_time = now
            progress.num_output_tokens += 1

    def on_ended(self, wire_ids: Iterable[int]) -> None:
        """Remove requests that have finished, failed, or left the engine."""
        for wire_id in wire_ids:
            self._requests.pop(wire_id, None)

    def list(self) -> list[OngoingRequest]:
        """Return the requests in the order of submission; later tokens change them."""
        return [*self._requests.values()]
