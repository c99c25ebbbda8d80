"""Messages of tests of link policies, and a link that sends them without time."""

from dataclasses import dataclass

from experiments.link_policies import BASELINE_LINK_POLICIES
from gllm.pacing.policy_registry import LINK_POLICIES
from gllm.pacing.traffic import LinkPolicy, LinkView, TrafficClass

EVERY_LINK_POLICY = {name: name for name in LINK_POLICIES} | dict(BASELINE_LINK_POLICIES)
"""Arguments of `make_link_policy` by name or short name."""


@dataclass
class Message:
    """Waiting message."""

    traffic_class: TrafficClass
    num_bytes: int
    number: int
    remaining_bytes: int = 0

    def __post_init__(self) -> None:
        self.remaining_bytes = self.remaining_bytes or self.num_bytes


class Queue:
    """Waiting messages of one link in the order of their numbers."""

    def __init__(self, policy: LinkPolicy, bytes_per_second: float = 1000.0) -> None:
        self.policy = policy
        self.bytes_per_second = bytes_per_second
        self.waiting: list[Message] = []
        self._num_messages = 0

    def add(self, traffic_class: TrafficClass, num_bytes: int) -> Message:
        """Add a message."""
        message = Message(traffic_class, num_bytes, self._num_messages)
        self._num_messages += 1
        self.waiting.append(message)
        return message

    def send(self, slack_seconds: float | None = None) -> tuple[Message, int]:
        """Send the next chunk; return its message and its size."""
        view = LinkView(0.0, self.bytes_per_second, slack_seconds)
        position, num_bytes = self.policy.select(self.waiting, view)
        message = self.waiting[position]
        assert 1 <= num_bytes <= message.remaining_bytes
        message.remaining_bytes -= num_bytes
        if not message.remaining_bytes:
            del self.waiting[position]
        return message, num_bytes
