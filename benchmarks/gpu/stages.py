"""Compare the greedy texts of several workers on one device with those of one worker.

Workers are stages, or ranks of a stage (tensor parallelism); they are real processes. The
comparison is about correctness alone, because the workers share one device. The demo model runs in
float32: in bfloat16 other micro-batches may round to another token. If a package of the processes
is missing, the stages' executors run in this process (inline_stages.py), and ranks are skipped.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from benchmarks.gpu.rows import Measured, PendingRow, SkipRowError
from benchmarks.gpu.stand_ins import missing, provide_msgspec

NEEDED = ("numpy", "safetensors", "tokenizers")
"""Packages that the comparison requires."""
PROCESSES = ("zmq", "msgspec", "setproctitle", "uvloop", "tqdm", "jinja2")
"""Additional packages of the parent and its workers."""
WORKERS = ((2, 1), (4, 1), (1, 2), (2, 2))
"""Number of stages, and of ranks per stage."""
PROMPTS = (
    "Once upon a time",
    "Otto the fox",
    "The owl said",
    "One day in the forest",
    "A small mouse",
    "In the evening",
    "Who lives",
    "The bear was",
)
TOKENS, KV_BYTES = 32, 64 * 2**20


class Baseline:
    """Texts of one worker, generated on first use."""

    def __init__(self, is_dry: bool, options: dict[str, str]) -> None:
        self.is_dry, self.options = is_dry, options
        self.missing_packages = missing(*PROCESSES)
        """Missing packages without which stages cannot be processes."""
        self._texts: list[list[int]] | None = None

    def texts(self) -> list[list[int]]:
        """Return the token ids of one worker for each prompt."""
        if self._texts is None:
            self._texts = self.generated(1, 1)
        return self._texts

    def generated(self, stages: int, ranks: int) -> list[list[int]]:
        """Generate the token ids of each prompt with this number of stages and ranks per stage.

        Raises:
            SkipRowError: A package is missing.
        """
        missing_packages = missing(*NEEDED)
        if missing_packages:
            raise SkipRowError(f"no {', '.join(missing_packages)}")
        options: dict[str, Any] = {
            "device": "cpu" if self.is_dry else "cuda",
            "dtype": "float32",
            "max_num_seqs": len(PROMPTS),
            **self.options,
        }
        count, tokens = (2, 4) if self.is_dry else (len(PROMPTS), TOKENS)
        if self.missing_packages and ranks > 1:
            raise SkipRowError(f"ranks are processes: no {', '.join(self.missing_packages)}")
        if self.missing_packages:
            return self._generate_inline(stages, PROMPTS[:count], tokens, options)
        from gllm.config.sampling import SamplingParams
        from gllm.engine.llm import LLM

        options |= {
            "kv_cache_memory": KV_BYTES,
            "pipeline_parallel_size": stages,
            "tensor_parallel_size": ranks,
        }
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        with LLM("demo", progress=False, **options) as llm:
            outputs = llm.generate(PROMPTS[:count], params)
        return [output.outputs[0].token_ids for output in outputs]

    def _generate_inline(
        self, stages: int, prompts: Sequence[str], tokens: int, options: dict[str, Any]
    ) -> list[list[int]]:
        """Generate the token ids of each prompt within this process."""
        provide_msgspec()
        from tokenizers import Tokenizer

        from benchmarks.gpu.inline_stages import InlinePipeline
        from gllm.models.hub import DEMO

        tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
        ids = [tokenizer.encode(prompt).ids for prompt in prompts]
        return InlinePipeline(stages, self.is_dry, options).generate(ids, tokens)


def rows(is_dry: bool, options: dict[str, str]) -> Iterator[PendingRow]:
    """Yield one row per number of stages and ranks."""
    baseline = Baseline(is_dry, options)
    for stages, ranks in WORKERS:
        name = f"{stages} stage{'s' * (stages > 1)}" + f" of {ranks} ranks" * (ranks > 1)
        yield PendingRow(f"{name} on one device", partial(compare, baseline, stages, ranks))


def compare(baseline: Baseline, stages: int, ranks: int = 1) -> Measured:
    """Compare the texts of several workers with those of one worker."""
    expected, got = baseline.texts(), baseline.generated(stages, ranks)
    mismatched = sum(text != other for text, other in zip(expected, got, strict=True))
    fault = f"{mismatched} of {len(expected)} texts differ" if mismatched else ""
    note = (
        f"within one process: no {', '.join(baseline.missing_packages)}"
        if baseline.missing_packages
        else ""
    )
    figures: dict[str, float] = {"texts": len(expected), "mismatched": mismatched}
    return Measured(figures, fault=fault, note=note)
