"""Contents of published config.json files, and what the families make of them.

Owns the way from tests/data to a description. Knows none of the files.
"""

import copy
import json
from pathlib import Path
from typing import Any

from gllm.models.keys import Keys
from gllm.models.registry import architecture_of, family
from gllm.models.spec import Model

Config = dict[str, Any]
PUBLISHED: dict[str, Config] = json.loads(
    (Path(__file__).parents[1] / "data" / "published_configs.json").read_text()
)
"""Files with the keys that were written at their time; lists of rotary factors are made up."""


def read(raw: Config) -> Model:
    """The description, every key of the file accounted for."""
    keys = Keys(copy.deepcopy(raw))
    model = family(architecture_of(raw["architectures"]))(keys)
    keys.finish()
    return model
