"""Checkpoints in 8-bit floats that transformers quantizes, without the GPU that it asks for."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.models.tiny_models import reference, save


@contextmanager
def quantizing_on_cpu() -> Iterator[None]:
    """Let transformers write 8-bit floats on a CPU, and read them as floats."""
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    def validate_environment(self: Any, *_: Any, **__: Any) -> None:
        if self.pre_quantized:
            self.quantization_config.dequantize = True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", validate_environment)
        yield


def quantize_model(family: str, root: Path, **options: Any) -> Any:
    """Return a model of a family that transformers quantizes; its floats are in root / "plain".

    Called within `quantizing_on_cpu`; options: of FineGrainedFP8Config.
    """
    from transformers import FineGrainedFP8Config

    config = FineGrainedFP8Config(**options)
    plain = save(family, root / "plain")
    kind = type(reference(family))
    return kind.from_pretrained(plain, quantization_config=config, dtype=torch.float32)
