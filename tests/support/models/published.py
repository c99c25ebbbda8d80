"""Contents of published config.json files, and what the families make of them.

Owns the way from tests/data to a description. Knows none of the files.
"""

import copy
import json
from pathlib import Path
from typing import Any

from gllm.models.config import build_model, select_language_model
from gllm.models.spec.model import ModelSpec

Config = dict[str, Any]
PUBLISHED: dict[str, Config] = json.loads(
    (Path(__file__).parents[2] / "data" / "published_configs.json").read_text()
)
"""Files with the keys that were written at their time; lists of rotary factors are made up."""


def read(raw: Config) -> ModelSpec:
    """The description, every key of the file accounted for."""
    return build_model(select_language_model(copy.deepcopy(raw))[1])
