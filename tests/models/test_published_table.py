"""The table of published configurations: each runs and equals transformers, or is refused.

`python -m pytest tests/models/test_published_table.py -m ""` runs all of it; the count is printed
by `test_the_table_is_long` (option -s).
"""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gllm.models.config import select_language_model
from gllm.models.errors import ModelError
from tests.models.test_popular import EVERY
from tests.support.engines.pipeline import Pipeline
from tests.support.full_cases import full_but
from tests.support.models.published import Config, read
from tests.support.models.small_configs import VOCABULARY, small
from tests.support.models.tiny_models import randomize, use_recurrent_rule

REFUSED: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "data" / "refused_configs.json").read_text()
)
"""Configurations of published models that do not run, with a part of the refusal's text."""
TYPES = {"kimi_k2": "deepseek_v3", "mimo": "qwen2"}
"""Model types that transformers does not have, and those of which they are."""
FOREIGN = {"chatglm", "baichuan", "qwen", "deepseek", "internlm2", "minicpm", "minimax_text_01"}
"""Formats without a class in transformers: tests/runtime/worker/test_executor.py compares them with
references of the tests."""
COMPARED = [name for name, raw in EVERY.items() if raw.get("model_type") not in FOREIGN]
QUICK = {"smollm3-3b", "granite-3.1-3b-a800m-instruct", "glm-4.5-air"}
TOKENS = [(7 * i * i + 11) % 128 + 3 for i in range(37)]


def library_model(raw: Config) -> Any:
    """Return transformers' model of a configuration, with random weights in float32."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    keys = copy.deepcopy(raw)
    kind = keys.pop("model_type", "")
    if keys.get("rope_scaling") is None:
        # Classes of models without positions warn of the key.
        keys.pop("rope_scaling", None)
    torch.manual_seed(0)
    if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or kind in TYPES:
        config = transformers.AutoConfig.for_model(TYPES.get(kind, kind), **keys)
        model = transformers.AutoModelForCausalLM.from_config(config)
    else:
        # The type of the language model of a multimodal class.
        model_class = getattr(transformers, raw["architectures"][0])
        model = model_class(model_class.config_class(**keys))
    use_recurrent_rule(model)
    return randomize(model.eval())


def language_model(raw: Config) -> Config:
    """Return the configuration of a model, or of the language model of a multimodal class."""
    config = select_language_model(copy.deepcopy(raw))[1]
    return config.content | {"architectures": [config.architecture]}


@pytest.mark.parametrize("name", full_but(QUICK, COMPARED))
def test_published_models_equal_transformers(name: str, tmp_path: Path) -> None:
    """With the keys of the published file and small sizes: logits of a prompt in two chunks."""
    raw = small(language_model(EVERY[name]))
    model = library_model(raw)
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(raw | {"torch_dtype": "float32"}))
    with torch.inference_mode():
        expected = model(torch.tensor([TOKENS])).logits[0]
    assert expected.shape[1] == VOCABULARY
    # Layers that share keys and values are on one stage.
    pipeline = Pipeline(tmp_path, 1 if raw.get("num_kv_shared_layers") else 2)
    pipeline.add(1, TOKENS)
    if pipeline.config.model.is_bidirectional:
        actual = pipeline.logits(pipeline.plan([pipeline.row(1, 37)]))[1]
        assert (actual - expected[36:]).abs().max() < 1e-4 * expected.abs().max()
        return
    first = pipeline.logits(pipeline.plan([pipeline.row(1, 20)]))[1]
    last = pipeline.plan([pipeline.row(1, 17)])
    if pipeline.config.model.has_state:
        # Earlier positions of recurrent layers cannot be computed again.
        actual = torch.cat((first, pipeline.logits(last)[1]))
        expected = expected[[19, 36]]
    else:
        pipeline.logits(last)
        actual = torch.cat((first, pipeline.logits(pipeline.decodes_again(1))[1]))
        expected = torch.cat((expected[19:20], expected))
    error = (actual - expected).abs().max() / expected.abs().max()
    assert error < 1e-4, f"{name}: {error:.1e}"
    assert torch.equal(actual.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("name", REFUSED)
def test_other_published_models_are_refused(name: str) -> None:
    with pytest.raises(ModelError, match=REFUSED[name]["reason"]):
        read(REFUSED[name]["config"])


def test_the_table_is_long() -> None:
    total, num_run = len(EVERY) + len(REFUSED), len(EVERY)
    print(
        f"{total} published configurations: {num_run} run ({len(COMPARED)} equal transformers, "
        f"{num_run - len(COMPARED)} references of the tests), {len(REFUSED)} are refused by name"
    )
    assert total >= 120
    assert num_run >= 95
