"""Layers that read the keys and values of earlier ones, and per-layer embeddings: on which stage
they are, and what they hold there."""

from pathlib import Path

import pytest
import torch

from gllm.models.config import read_config
from gllm.models.loader import Checkpoint, Weights
from gllm.models.ranks import Ranks
from gllm.models.spec.attention import AttentionSpec
from gllm.models.spec.layer import LayerSpec
from gllm.models.spec.model import ModelSpec
from gllm.models.split import layer_costs, split_layers
from gllm.models.stage import ENDS, ModelStage, find_reusable_parts
from gllm.recovery.node_layout import NodeMemory, NodeShape, repartition_layers
from gllm.recovery.partition import StageCosts, partition_layers
from gllm.runtime.worker.kv_cache import KVCache, block_bytes, describe_layout
from gllm.runtime.worker.probe import find_kinds
from tests.models.test_popular import POPULAR
from tests.support.models.published import read
from tests.support.models.tiny_models import save

RANKS = Ranks(0, 1)
"""Those of all stages here, which may therefore reuse each other's parts."""
E2B, E4B = (read(POPULAR[f"gemma-4-{size}-it"]["config"]) for size in ("e2b", "e4b"))


def test_the_last_layers_are_on_one_stage() -> None:
    assert (E2B.num_joint_layers, E4B.num_joint_layers) == (22, 20)
    assert [len(part) for part in split_layers(E2B, 2)] == [13, 22]
    assert [len(part) for part in split_layers(E4B, 14)][-1] == 20
    assert split_layers(E2B, 3, (12, 1, 22))[-1] == range(13, 35)
    with pytest.raises(ValueError, match="last stage at least 22 layers"):
        split_layers(E2B, 2, (14, 21))
    with pytest.raises(ValueError, match=r"last 22 layers share .* use at most 14"):
        split_layers(E2B, 15)


def test_measured_costs_do_not_divide_them() -> None:
    costs = StageCosts((1.0,) * 10, num_joint_layers=6)
    assert partition_layers([costs, costs.scale(9.0)]) == [range(4), range(4, 10)]
    with pytest.raises(ValueError, match="of which the last 6 are on one stage"):
        partition_layers([costs] * 6)


def test_a_lost_machine_does_not_divide_them() -> None:
    costs = layer_costs(E4B)
    nodes = ["a", "b", "b", "c"]
    cut = [(part.start, part.stop) for part in split_layers(E4B, 4)]
    memory = NodeMemory(StageCosts((1.0,) * 42))
    shape = repartition_layers(NodeShape(cut, [1] * 4, nodes), ["a", "b"], [costs] * 4, memory)
    assert shape is not None
    assert len(shape.layers) == 3
    assert shape.layers[-1][1] - shape.layers[-1][0] >= 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("gemma4-e", tmp_path_factory.mktemp("gemma4-e"))


def reading(model: ModelSpec) -> list[LayerSpec]:
    attentions = [layer.attention for layer in model.layers]
    pairs = zip(model.layers, attentions, strict=True)
    return [layer for layer, own in pairs if isinstance(own, AttentionSpec) and own.kv_layers_back]


def test_they_have_no_keys_and_values_of_their_own(folder: Path) -> None:
    model = read_config(folder).model
    last, layers = range(3, 7), model.layers[3:]
    assert len(reading(model)) == 2
    cache = KVCache(layers, 7, 4, torch.float32)
    assert cache.layers[2] is cache.layers[0]
    assert cache.layers[3] is cache.layers[1]
    layout = describe_layout("model", last, model.layers, 0, 1, cache)
    assert [each.layer for each in layout.layers] == [3, 4]
    assert block_bytes(layers, 4, torch.float32) == block_bytes(layers[:2], 4, torch.float32)
    assert find_kinds([layers[0], *reading(model)]) == [0]


def load(folder: Path, layers: range, stages: list[ModelStage]) -> tuple[ModelStage, int]:
    """A stage, with what other stages hold, and the bytes that were read for it."""
    model = read_config(folder).model
    held = find_reusable_parts(stages, layers, model.num_layers)
    names = {"held_layers": held.layers, "holds_ends": held.ends is not None}
    with Checkpoint(folder, torch.float32, model, layers, **names) as checkpoint:  # type: ignore[arg-type]
        weights = Weights(checkpoint, ranks=RANKS)
        stage = ModelStage(checkpoint.model, weights, layers, 64, held)
        checkpoint.check_all_read()
        return stage, checkpoint.weight_bytes


def test_a_stage_has_the_columns_of_its_layers(folder: Path) -> None:
    spec = read_config(folder).model.per_layer_embedding
    assert spec is not None
    stages = [load(folder, layers, [])[0] for layers in (range(1, 2), range(2, 7))]
    for stage, count in zip(stages, (1, 5), strict=True):
        assert stage.per_layer_embedding is not None
        assert stage.per_layer_embedding.table.shape == (spec.num_rows, count * spec.size)
        assert stage.embedding is not None
    again, num_bytes = load(folder, range(1, 2), stages)
    assert num_bytes == 0
    assert again.per_layer_embedding is stages[0].per_layer_embedding
    # The layers are held; the columns are others.
    wider, num_bytes = load(folder, range(1, 7), stages)
    assert num_bytes == wider.part_bytes[ENDS] > 0
    assert wider.layers.layers[1:] == stages[1].layers.layers


def test_other_layers_are_not_measured_without_theirs() -> None:
    kinds = find_kinds(E2B.layers)
    chosen = [E2B.layers[index].attention for index in kinds]
    assert all(isinstance(own, AttentionSpec) and not own.kv_layers_back for own in chosen)
