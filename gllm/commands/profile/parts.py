"""Times of steps of ranges of layers, from which a profile predicts every division into stages."""

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

from gllm.commands.profile.operators import MS_PER_SECOND, time_sampler
from gllm.commands.profile.span import StepRows, TimedSpan
from gllm.config.engine import EngineConfig
from gllm.kernels.threads import using_num_threads
from gllm.models.config import read_config
from gllm.runtime.worker.device import threads_per_worker
from gllm.sim.costs.profile import SpanSample, StepSample

DECODE_BATCHES = (1, 2, 4, 8, 16, 32, 64)
"""Decodes of the timed steps."""
CONTEXT_SHARES = (0.02, 0.4, 0.9)
"""Contexts of decodes, as shares of the longest prompt."""
CHUNKS = (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
"""Tokens of the timed prefill steps."""
MAX_CONTEXT_TOKENS = 8192
"""Contexts of all decodes of a step together: more takes memory and teaches little."""
REPEATS = 5
"""Times that each step is computed by default."""


def list_steps(longest: int) -> list[StepRows]:
    """Return the steps to time, as (cached tokens, new tokens) of each sequence.

    They are batches of decodes with several context lengths, and prefill chunks.

    Args:
        longest: tokens of the longest prompt.
    """
    steps: list[StepRows] = []
    for batch in DECODE_BATCHES:
        for share in CONTEXT_SHARES:
            context = max(1, int(share * longest))
            if batch * context <= max(MAX_CONTEXT_TOKENS, longest):
                steps.append([(context, 1)] * batch)
    for tokens in (*(tokens for tokens in CHUNKS if tokens < longest), longest):
        steps.append([(0, tokens)])
    half = longest // 2
    steps.append([(half, max(2, half // 2))])
    return steps


def list_spans(num_layers: int, most: int) -> list[range]:
    """Return the ranges of consecutive layers to time, at the start, middle and end of a model.

    Args:
        num_layers: number of layers of the model.
        most: maximum number of layers on one device.
    """
    half, middle = max(1, most // 2), num_layers // 2
    spans = [range(most), range(num_layers - most, num_layers)]
    spans += [range(half), range(num_layers - half, num_layers)]
    if num_layers > 2:
        spans.append(range(middle, middle + 1))
    return list(dict.fromkeys(spans))


def count_span_steps(num_layers: int, layers: Sequence[int], longest: int) -> int:
    """Return the number of steps that `measure_spans` times, for a progress bar.

    Args:
        num_layers: number of layers of the model.
        layers: number of layers of each pipeline stage.
        longest: tokens of the longest prompt.
    """
    spans = list_spans(num_layers, max(layers))
    num_last = sum(span.stop == num_layers for span in spans)
    return (len(spans) + num_last) * len(list_steps(longest))


def measure_spans(
    config: EngineConfig,
    folder: Path,
    layers: Sequence[int],
    longest: int,
    num_ranks: int = 1,
    on_step: Callable[[], object] = lambda: None,
    repeats: int = REPEATS,
) -> list[SpanSample]:
    """Load ranges of a model's layers one after the other, and time steps of each (`list_spans`).

    Args:
        config: configuration of the engine.
        folder: folder with the model's weights.
        layers: number of layers of each pipeline stage. No timed range has more than the largest.
        longest: tokens of the longest prompt.
        num_ranks: tensor parallel size of each stage.
        on_step: called after each step.
        repeats: number of times that each step is computed; the median is the result.

    Raises:
        FieldError: a range of layers cannot be computed as configured.
        ModelError: the folder does not have the weights.
    """
    model, steps = read_config(folder, config.hf_overrides), list_steps(longest)
    samples = []
    with using_num_threads(threads_per_worker(config.threads, num_ranks * len(layers))):
        for span in list_spans(model.model.num_layers, max(layers)):
            with TimedSpan(config, model, folder, span, steps, num_ranks) as timed:
                is_first, is_last = timed.executor.is_first, timed.executor.is_last
                # The last layers are timed without the LM head too.
                kinds = (True, False) if is_last else (True,)
                for rows, should_sample in product(steps, kinds):
                    work, seconds = timed.repeat_step(rows, repeats, should_sample)
                    step = StepSample.of(work, [seconds])
                    samples.append(SpanSample(len(span), is_first, is_last, step))
                    on_step()
    return samples


def measure_samplers(
    config: EngineConfig, folder: Path, num_ranks: int = 1
) -> list[tuple[int, float]]:
    """Return (sequences, seconds) of the sampler alone, for each measured number of decodes.

    Args:
        config: configuration of the engine.
        folder: folder with the model's weights.
        num_ranks: tensor parallel size of the last stage.

    Raises:
        FieldError: the last layer cannot be computed as configured.
        ModelError: the folder does not have the weights.
    """
    model = read_config(folder, config.hf_overrides)
    last = range(model.model.num_layers - 1, model.model.num_layers)
    steps: list[StepRows] = [[(1, 1)] * max(DECODE_BATCHES)]
    with TimedSpan(config, model, folder, last, steps, num_ranks) as timed:
        return [
            (batch, time_sampler(timed, batch, REPEATS) / MS_PER_SECOND) for batch in DECODE_BATCHES
        ]
