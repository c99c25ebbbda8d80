"""Overlap of a prefill's and decodes' activations on a weak link over time (MoLink, Figure 3)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from experiments.base import ExperimentOptions, ExperimentResult
from experiments.claims import ExpectedDirection, PaperClaim, relative_change
from experiments.interference import MixedStep
from experiments.link_policies import BASELINE_LINK_POLICIES
from experiments.weak_links_compute import (
    CONTEXT,
    DEVICE,
    LINK,
    MODEL,
    REFERENCE,
    STAGES,
    weak_pipeline,
)
from gllm.pacing.policy_registry import make_link_policy
from gllm.pacing.traffic import Chunk, LinkPolicy, LinkView, TrafficClass, WaitingMessage
from gllm.sim.costs.base import TransferCost
from gllm.sim.costs.roofline import RooflineCostModel
from gllm.sim.event_loop import PIPELINE, EventLoop
from gllm.sim.link import SimulatedLink
from gllm.sim.metrics.plots import open_picture
from gllm.sim.metrics.report import format_table

POLICIES = {
    "serial": "serial",
    "concurrent": BASELINE_LINK_POLICIES["concurrent"],
    "molink-paper": BASELINE_LINK_POLICIES["molink-paper"],
    "molink": "molink",
}
"""Link policies by name: in order of arrival, fair sharing, the paper's and this project's."""
BASELINE, PAPER, OURS = "concurrent", "molink-paper", "molink"
PROMPT, NUM_DECODES = 1024, 8
"""Tokens of the prefill, and sequences of each micro-batch of decodes."""
COLOURS = {TrafficClass.DECODE: "#0072B2", TrafficClass.PREFILL: "#D55E00"}
TEXT = """\
Simulated: the link behind the first of {stages} stages of {model} on {device}, {mbits:.0f} Mbit/s.
The activations of a prefill of {prompt} tokens are ready at 0, those of a micro-batch of {decodes}
decodes every {period:.1f} ms, the time that the stage computes them; without a wait the link is
busy with a prefill for {prefill:.0f} ms and with a micro-batch of decodes for {decode:.1f} ms.
*Wait*: time from when a micro-batch's activations are ready until they have left, less the time of
their own bytes; the micro-batches are those that are ready while fair sharing sends the prefill.
*serial* sends in the order of arrival, *concurrent* shares the link fairly, as systems do that send
each message by itself, *molink-paper* is the paper's Algorithm 1 with just-in-time chunks, *molink*
the policy of this project. The paper's figure is a drawing without numbers: its direction is
judged, against fair sharing.

"""


class LinkInterval(NamedTuple):
    """Time in which a link sends one chunk, in seconds."""

    start: float
    end: float
    traffic_class: TrafficClass


class RecordingPolicy:
    """A link policy whose chunks are recorded.

    Args:
        policy: Chooses the chunks.
    """

    sends_whole = False

    def __init__(self, policy: LinkPolicy) -> None:
        self._policy = policy
        self.uses_slack = policy.uses_slack
        self.intervals: list[LinkInterval] = []

    def select(self, waiting: Sequence[WaitingMessage], view: LinkView) -> Chunk:
        """Return the policy's chunk."""
        chunk = self._policy.select(waiting, view)
        end = view.now + chunk.num_bytes / view.bytes_per_second
        kind = waiting[chunk.position].traffic_class
        self.intervals.append(LinkInterval(view.now, end, kind))
        return chunk


class Timeline(NamedTuple):
    """Chunks of a link, and when its messages have left it."""

    intervals: list[LinkInterval]
    prefill_end: float
    """Time in seconds at which the prefill has left."""
    waits: list[float]
    """Of each micro-batch of decodes, in seconds."""


def record_timeline(
    policy: str, prefill: TransferCost, decode: TransferCost, period: float, num_decodes: int
) -> Timeline:
    """Send a prefill, and decodes at regular times, over one link.

    Args:
        policy: Name of the link policy, or an entry `module:Class`.
        prefill: Cost of the prefill's message, which is ready at 0.
        decode: Cost of each message of decodes.
        period: Seconds between two messages of decodes.
        num_decodes: Number of messages of decodes.
    """
    loop = EventLoop()
    recorder = RecordingPolicy(make_link_policy(policy))
    link = SimulatedLink(loop, recorder)
    ready = [(index + 1) * period for index in range(num_decodes)]
    left: dict[int, float] = {}

    def send(now: float, index: int) -> None:
        kind, cost = TrafficClass.DECODE, decode
        if index < 0:
            kind, cost = TrafficClass.PREFILL, prefill
        link.send(kind, cost, lambda arrival, each: left.__setitem__(each, arrival), index)

    def slack(now: float) -> float | None:
        return min((time - now for time in ready if time > now), default=None)

    link.add_slack_source(link, slack)
    loop.push(0.0, PIPELINE, send, -1)
    for index, time in enumerate(ready):
        loop.push(time, PIPELINE, send, index)
    loop.run()
    waits = [left[index] - time - decode.total_seconds for index, time in enumerate(ready)]
    return Timeline(recorder.intervals, left[-1] - prefill.propagation_seconds, waits)


def _table(timelines: Mapping[str, Timeline]) -> str:
    rows = [
        [name, f"{1e3 * each.prefill_end:.0f}", f"{1e3 * fmean(each.waits):.1f}",
         f"{1e3 * max(each.waits):.1f}", str(sum(wait > 1e-9 for wait in each.waits))]
        for name, each in timelines.items()
    ]  # fmt: skip
    header = ["policy", "prefill has left, ms", "mean wait of decodes, ms", "longest, ms",
              "decodes that wait"]  # fmt: skip
    return format_table(header, rows)


def timeline_claims(timelines: Mapping[str, Timeline]) -> list[PaperClaim]:
    """Return the direction of the figure: decodes wait less; when the prefill leaves, beside it."""

    def wait(name: str) -> float:
        return relative_change(fmean(timelines[name].waits), fmean(timelines[BASELINE].waits))

    def end(name: str) -> float:
        return relative_change(timelines[name].prefill_end, timelines[BASELINE].prefill_end)

    return [
        PaperClaim(
            "Figure 3: wait of decodes against fair sharing",
            ExpectedDirection(False, "shorter"),
            wait(PAPER),
            beside={OURS: f"{100 * wait(OURS):+.0f} %"},
        ),
        PaperClaim(
            "Figure 3: end of the prefill against fair sharing",
            "filled into the time between decodes",
            None,
            f"{100 * end(PAPER):+.0f} %",
            beside={OURS: f"{100 * end(OURS):+.0f} %"},
        ),
    ]


def plot_timelines(timelines: Mapping[str, Timeline], path: Path) -> None:
    """Plot the chunks of each policy over time."""
    from matplotlib.patches import Patch

    with open_picture(path, 1.5 + 0.5 * len(timelines)) as figure:
        axes = figure.subplots()
        for row, each in enumerate(timelines.values()):
            for kind, colour in COLOURS.items():
                spans = [
                    (1e3 * part.start, 1e3 * (part.end - part.start))
                    for part in each.intervals
                    if part.traffic_class is kind
                ]
                axes.broken_barh(spans, (row - 0.35, 0.7), facecolor=colour, linewidth=0)
        last = max(part.end for each in timelines.values() for part in each.intervals)
        axes.set(xlabel="ms since the prefill was ready", xlim=(0, 1e3 * last))
        axes.set(ylim=(len(timelines) - 0.5, -0.5), yticks=range(len(timelines)))
        axes.set_yticklabels(list(timelines))
        axes.grid(visible=False, axis="y")
        axes.set_title("One link: activations of a prefill and of decodes")
        legend = [
            Patch(label=kind.name.lower(), facecolor=colour) for kind, colour in COLOURS.items()
        ]
        figure.legend(handles=legend, loc="outside lower center", ncols=len(legend))


def run(options: ExperimentOptions) -> ExperimentResult:
    """Record the link under each policy, and return the page."""
    cost = RooflineCostModel(weak_pipeline())
    prompt = MixedStep((PROMPT // 4 if options.quick else PROMPT,)).stage_work()
    step = MixedStep((), (CONTEXT,) * NUM_DECODES).stage_work()
    prefill, decode = cost.activation_transfer(0, prompt), cost.activation_transfer(0, step)
    period = cost.stage_seconds(0, step)
    # Under fair sharing the link is busy with both until the prefill has left.
    shared = prefill.occupancy_seconds / (1 - min(0.5, decode.occupancy_seconds / period))
    num_decodes = max(2, round(shared / period))
    timelines = {
        name: record_timeline(policy, prefill, decode, period, num_decodes)
        for name, policy in POLICIES.items()
    }
    text = TEXT.format(
        stages=STAGES,
        model=MODEL,
        device=DEVICE,
        mbits=LINK.bandwidth * 8 / 1e6,
        prompt=PROMPT,
        decodes=NUM_DECODES,
        period=1e3 * period,
        prefill=1e3 * prefill.occupancy_seconds,
        decode=1e3 * decode.occupancy_seconds,
    )
    return ExperimentResult(
        "MoLink: overlap of transmissions on a weak link",
        text + _table(timelines),
        timeline_claims(timelines),
        {"weak-links-timeline.svg": lambda path: plot_timelines(timelines, path)},
        reference=REFERENCE,
    )
