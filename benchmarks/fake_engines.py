"""Engines that compute nothing, many in one process: they speak a fleet's messages to a router.

Each engine gives all its sequences one token per step. Run as
`python -m benchmarks.fake_engines HOST:PORT --count 100`; it prints a line once all are attached.
"""

import argparse
import asyncio
import itertools
import secrets

import uvloop
import zmq

from gllm import __version__
from gllm.messages.codec import AnyMessage, decode_for_engine
from gllm.messages.fleet import (
    OLDEST_PROTOCOL,
    PROTOCOL,
    AnnounceEngine,
    EngineReport,
    GreetEngine,
    RefuseEngine,
)
from gllm.messages.requests import AbortSequences, EngineOutputs, SubmitRequest
from gllm.models.config import read_config
from gllm.models.hub import resolve_model
from gllm.models.identity import hash_model, hash_numerics
from gllm.runtime.messaging.bus import Spoke
from gllm.scheduler.plan import FinishedSequence, FirstToken, SchedulerStats, StepOutput
from gllm.scheduler.step_cost import StepCostCoefficients

TOKEN_ID = 300
"""Every output token: an ordinary word of the demo model's vocabulary."""
REPORT_SECONDS = 1.0


def announce(name: str) -> AnnounceEngine:
    """Return the description of an engine that serves the demo model."""
    folder = resolve_model("demo")
    model = read_config(folder).model
    model_hash = hash_model(folder)
    return AnnounceEngine(
        PROTOCOL,
        OLDEST_PROTOCOL,
        name,
        secrets.randbits(62),
        "mixed",
        "demo",
        model_hash,
        hash_numerics(model_hash, "fake"),
        __version__,
        model.context_length,
        model.vocab_size,
        16,
        4096,
        1,
    )


class FakeEngine:
    """One engine and its session with a router."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], address: str, announcement: AnnounceEngine,
        step_seconds: float,
    ) -> None:  # fmt: skip
        """Dial the router."""
        self.is_attached = False
        self._step_seconds = step_seconds
        self._left: dict[int, int] = {}
        """Tokens that each running sequence still generates."""
        self._new: list[int] = []
        """Sequences without a token."""
        self._num_steps = self._num_tokens = 0
        self._step: asyncio.TimerHandle | None = None
        self._spoke = Spoke(context, 0, secrets.randbits(62), address, decode_for_engine)
        self._spoke.start(self._on_messages, self._on_lost)
        self._spoke.send(announcement)

    def report(self) -> None:
        """Send the report of each second."""
        if self.is_attached:
            coefficients = StepCostCoefficients(self._step_seconds, 1e-6)
            report = EngineReport("ready", "", self._stats(), coefficients, len(self._left))
            self._spoke.send(report)

    def _stats(self) -> SchedulerStats:
        return SchedulerStats(
            running=len(self._left), steps=self._num_steps, decode_tokens=self._num_tokens
        )

    def _on_messages(self, messages: list[AnyMessage]) -> None:
        for message in messages:
            match message:
                case GreetEngine():
                    self.is_attached = True
                    self.report()
                case SubmitRequest():
                    for seq in range(message.seq, message.seq + message.n):
                        self._left[seq] = message.max_tokens
                        self._new.append(seq)
                case AbortSequences(seqs):
                    for seq in seqs:
                        self._left.pop(seq, None)
                case RefuseEngine(cause):
                    raise SystemExit(f"the router refuses the fake engines: {cause}")
        if self._left and self._step is None:
            loop = asyncio.get_running_loop()
            self._step = loop.call_later(self._step_seconds, self._run_step)

    def _on_lost(self, cause: str) -> None:
        raise SystemExit(f"a fake engine lost its router: {cause}")

    def _run_step(self) -> None:
        """Give each sequence a token."""
        self._step = None
        seqs = list(self._left)
        firsts = [FirstToken(seq, 0, 0.0) for seq in self._new if seq in self._left]
        self._new.clear()
        finished = []
        for seq in seqs:
            self._left[seq] -= 1
            if not self._left[seq]:
                del self._left[seq]
                finished.append(FinishedSequence(seq, "length"))
        self._num_steps += 1
        self._num_tokens += len(seqs)
        outcome = StepOutput(seqs, [TOKEN_ID] * len(seqs), firsts, finished, len(seqs))
        self._spoke.send(EngineOutputs(outcome, self._stats()))
        if self._left:
            loop = asyncio.get_running_loop()
            self._step = loop.call_later(self._step_seconds, self._run_step)


async def run(options: argparse.Namespace) -> None:
    """Run the engines until the process is ended."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(1)
    announcement = announce("fake-0")
    engines = []
    for number in range(options.count):
        names = {"name": f"fake-{number}", "run": secrets.randbits(62)}
        fields = {key: getattr(announcement, key) for key in announcement.__struct_fields__}
        each = AnnounceEngine(**fields | names)
        engines.append(FakeEngine(context, f"tcp://{options.address}", each, options.step_seconds))
    while not all(engine.is_attached for engine in engines):
        await asyncio.sleep(0.05)
    print(f"{options.count} engines are attached", flush=True)
    # One report after the other, as those of many machines would come.
    for engine in itertools.cycle(engines):
        await asyncio.sleep(REPORT_SECONDS / options.count)
        engine.report()


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("address", help="HOST:PORT of the router's hub")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--step-seconds", type=float, default=0.05)
    uvloop.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
