"""Loss of a link encoding: a model's stages in this process, with encoded activations between them.

Texts are sampled from the model without an encoding, so its perplexity on them is the least that
any model has, and each error of the activations raises it.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from gllm.config.engine import EngineConfig
from gllm.config.link_encodings import PLAIN
from gllm.messages.sampling import SequenceSamplingParams
from gllm.messages.steps import RegisterSequences
from gllm.models.config import read_config
from gllm.models.split import split_layers
from gllm.runtime.worker.cpu.executor import CpuExecutor
from gllm.scheduler.plan import ScheduledRow, StepPlan
from gllm.transport.link.encodings import RowFormat, make_encoding

BLOCK_SIZE = 16
"""Tokens of a KV block."""
ITEM_BYTES = 2
"""Bytes per element of the activations that byte ratios refer to."""
GREEDY = SequenceSamplingParams(temperature=0.0)


class EncodedLink:
    """Link between two stages in one process that encodes and decodes activations."""

    def __init__(self, encoding: str) -> None:
        """Use an encoding of LINK_ENCODINGS. Raises ValueError."""
        self._encoding = make_encoding(encoding)
        self.num_elements = 0
        """Elements that were sent."""
        self.num_bytes = 0
        """Bytes that they were encoded in."""

    def send(self, hidden: Tensor) -> Tensor:
        """Return activations [tokens, hidden_size] as the next stage receives them."""
        row = RowFormat(hidden.shape[1], hidden.itemsize, hidden.dtype == torch.bfloat16)
        received = torch.empty_like(hidden)
        encoded = self._encoding.encode(_memory_of(hidden.contiguous()), row)
        self._encoding.decode(encoded, row, _memory_of(received))
        self.num_elements += hidden.numel()
        self.num_bytes += len(encoded)
        return received


class StagedModel:
    """Stages of a model, computed one after the other on the CPU.

    Args:
        folder: Of the model.
        num_stages: Number of stages; all links between them have the encoding.
        encoding: A name of LINK_ENCODINGS.
        dtype: A name of DTYPES.
        max_tokens: Most tokens of the texts of one call.

    Raises:
        ModelError: The folder does not have the model.
        ValueError: The model has fewer layers than stages, or there is no such encoding.
    """

    def __init__(
        self, folder: Path, num_stages: int, encoding: str, dtype: str, max_tokens: int
    ) -> None:
        self.link = EncodedLink(encoding)
        model = read_config(folder)
        config = EngineConfig.from_options(
            str(folder),
            pipeline_parallel_size=num_stages,
            dtype=dtype,
            device="cpu",
            block_size=BLOCK_SIZE,
        )
        self._executors = [
            CpuExecutor(model, config, num_stages, layers)
            for layers in split_layers(model.model, num_stages)
        ]
        for executor in self._executors:
            executor.load(folder, lambda done, total: None)
            executor.allocate(max_tokens // BLOCK_SIZE, BLOCK_SIZE)
        self._step = self._num_sequences = 0

    @torch.inference_mode()
    def score(self, texts: Sequence[list[int]]) -> list[Tensor]:
        """Return logits [tokens, vocabulary] behind each token of each text."""
        logits = []
        for text in texts:
            row = self._register([text], len(text))[0]
            logits.append(self._compute([row], every_token=True))
        return logits

    @torch.inference_mode()
    def generate(
        self, prompts: Sequence[list[int]], num_tokens: int, generator: torch.Generator | None
    ) -> list[list[int]]:
        """Return the continuations of prompts, computed together.

        Args:
            prompts: Prompts of at least one token.
            num_tokens: Tokens of each continuation.
            generator: Source of samples at temperature 1; None: greedy.
        """
        rows = self._register(prompts, max(map(len, prompts)) + num_tokens)
        outputs: list[list[int]] = [[] for _ in prompts]
        for _ in range(num_tokens):
            logits = self._compute(rows, every_token=False)
            if generator is None:
                tokens = logits.argmax(-1)
            else:
                tokens = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
            for index, token in enumerate(tokens.tolist()):
                outputs[index].append(token)
                row = rows[index]
                rows[index] = row._replace(
                    start=row.start + row.num_tokens,
                    num_tokens=1,
                    new_block_ids=[],
                    token_ids=[token],
                )
        return outputs

    def _register(self, prompts: Sequence[list[int]], max_length: int) -> list[ScheduledRow]:
        """Return the prefills of new sequences, whose KV blocks replace those of earlier ones."""
        num_blocks = -(-max_length // BLOCK_SIZE)
        rows = []
        for index, prompt in enumerate(prompts):
            seq = self._num_sequences
            self._num_sequences += 1
            for executor in self._executors:
                executor.register(RegisterSequences(seq, len(prompt), prompt, GREEDY))
            blocks = list(range(index * num_blocks, (index + 1) * num_blocks))
            rows.append(ScheduledRow(seq, 0, 0, len(prompt), blocks, [], True))
        return rows

    def _compute(self, rows: Sequence[ScheduledRow], every_token: bool) -> Tensor:
        """Return the logits behind the last token of each row, or behind every token."""
        self._step += 1
        plan = StepPlan(self._step, list(rows), [])
        hidden: Tensor | None = None
        for executor in self._executors:
            batch = executor.prepare(plan)
            if hidden is not None:
                hidden = self.link.send(hidden)
            hidden = executor.stage.forward(batch.inputs, hidden, executor.layer_caches)
        assert hidden is not None, "a model has a stage"
        last = self._executors[-1].stage
        return last.compute_logits(hidden if every_token else hidden[batch.logits_indices])


class EncodingLoss(NamedTuple):
    """Comparison of an encoding with plain activations of the same stages."""

    byte_ratio: float
    """Bytes over those of activations of ITEM_BYTES per element."""
    plain_perplexity: float
    perplexity: float
    forced_match: float
    """Share of the positions of the texts with the same most likely token."""
    greedy_match: float
    """Share of the positions of greedy continuations with the same token; after the first
    difference the two are different texts."""

    @property
    def perplexity_rise(self) -> float:
        """Relative rise of the perplexity."""
        return self.perplexity / self.plain_perplexity - 1


class TextSizes(NamedTuple):
    """Sizes of the compared texts."""

    num_texts: int = 32
    num_tokens: int = 256
    """Tokens of each text."""
    prompt_tokens: int = 16
    """Leading tokens of a text that are the prompt of a greedy continuation."""
    greedy_tokens: int = 64


DEFAULT_SIZES = TextSizes()


def measure_encoding_loss(
    folder: Path,
    num_stages: int,
    encoding: str,
    dtype: str = "auto",
    sizes: TextSizes = DEFAULT_SIZES,
    seed: int = 0,
    num_threads: int = 1,
) -> EncodingLoss:
    """Return the loss of an encoding on all links between the stages of a model.

    Args:
        folder: Of the model.
        num_stages: Number of stages.
        encoding: A name of LINK_ENCODINGS.
        dtype: A name of DTYPES.
        sizes: Number and lengths of the texts.
        seed: Of the texts.
        num_threads: Threads of the arithmetic.

    Raises:
        ModelError: The folder does not have the model.
        ValueError: The model has fewer layers than stages, or there is no such encoding.
    """
    previous = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        return _measure_loss(folder, num_stages, encoding, dtype, sizes, seed)
    finally:
        torch.set_num_threads(previous)


def _measure_loss(
    folder: Path, num_stages: int, encoding: str, dtype: str, sizes: TextSizes, seed: int
) -> EncodingLoss:
    longest = max(sizes.num_tokens, sizes.prompt_tokens + sizes.greedy_tokens)
    max_tokens = sizes.num_texts * (longest + BLOCK_SIZE)
    plain, encoded = (
        StagedModel(folder, num_stages, name, dtype, max_tokens) for name in (PLAIN, encoding)
    )
    generator = torch.Generator().manual_seed(seed)
    first = next(iter(read_config(folder).eos_ids), 0)
    texts = [
        [first, *rest]
        for rest in plain.generate([[first]] * sizes.num_texts, sizes.num_tokens - 1, generator)
    ]
    plain_logits, logits = plain.score(texts), encoded.score(texts)
    matches = [(a.argmax(-1) == b.argmax(-1)) for a, b in zip(plain_logits, logits, strict=True)]
    prompts = [text[: sizes.prompt_tokens] for text in texts]
    continuations = [
        torch.tensor(model.generate(prompts, sizes.greedy_tokens, None))
        for model in (plain, encoded)
    ]
    return EncodingLoss(
        encoded.link.num_bytes / (ITEM_BYTES * encoded.link.num_elements),
        _perplexity(plain_logits, texts),
        _perplexity(logits, texts),
        torch.cat(matches).double().mean().item(),
        (continuations[0] == continuations[1]).double().mean().item(),
    )


def _perplexity(logits: Sequence[Tensor], texts: Sequence[list[int]]) -> float:
    """Return the perplexity of texts, whose first tokens are given."""
    losses = [
        torch.nn.functional.cross_entropy(each[:-1].double(), torch.tensor(text[1:]))
        for each, text in zip(logits, texts, strict=True)
    ]
    return math.exp(torch.stack(losses).mean().item())


def _memory_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU."""
    return tensor.view(torch.uint8).reshape(-1).numpy().data
