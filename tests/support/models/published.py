"""Contents of published config.json files, and what the families make of them.

Owns the way from tests/data to a description. Knows none of the files.
"""

import copy
import json
from pathlib import Path
from typing import Any

from gllm.models.config_reader import ConfigReader
from gllm.models.registry import select_architecture, spec_builder
from gllm.models.spec import ModelSpec

Config = dict[str, Any]
PUBLISHED: dict[str, Config] = json.loads(
    (Path(__file__).parents[2] / "data" / "published_configs.json").read_text()
)
"""Files with the keys that were written at their time; lists of rotary factors are made up."""


def read(raw: Config) -> ModelSpec:
    """The description, every key of the file accounted for."""
    keys = ConfigReader(copy.deepcopy(raw))
    model = spec_builder(select_architecture(raw["architectures"]))(keys)
    keys.check_all_read()
    return model
