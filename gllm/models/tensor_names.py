"""Names of the tensors that a model reads from a checkpoint.

Each tensor belongs to a layer, to a part outside the layers, to a known leftover that changes
nothing, or is refused by name: a tensor that is not read may change what is computed.
"""

import re
from collections.abc import Collection, Iterable

from gllm.models.spec import ModelSpec

LEFTOVERS = (r"(.*\.)?rotary(_pos)?_emb\.inv_freq",)
"""Patterns of tensors that old files of all families may have and that are computed here. A family
names its own in Model.ignored; docs/models.md lists them all."""


class TensorNames:
    """The names of a model's tensors."""

    def __init__(self, model: ModelSpec) -> None:
        """Compile the patterns of a model."""
        self._model = model
        self._layer = re.compile(
            re.escape(model.layer_name_format).replace(r"\{\}", r"(\d+)") + r"\."
        )
        self._ignored = re.compile("|".join((*LEFTOVERS, *model.ignored_tensors)))

    def is_read(
        self,
        name: str,
        layers: range,
        held_layers: Collection[int] = (),
        holds_ends: bool = False,
    ) -> bool:
        """Return whether a stage with these layers reads a tensor.

        Args:
            name: of the tensor.
            layers: of the stage.
            held_layers: those of which no tensor is read.
            holds_ends: True if no tensor beside the layers is read.
        """
        if self.is_ignored(name) or not self._belongs(name, layers):
            return False
        index = self._layer_of(name)
        return not holds_ends if index is None else index not in held_layers

    def _belongs(self, name: str, layers: range) -> bool:
        index = self._layer_of(name)
        if index is not None:
            return index in layers
        return name.rpartition(".")[0] in self._model.names_outside_layers(layers)

    def is_ignored(self, name: str) -> bool:
        """Return whether a tensor is a known leftover or part of a multi-token prediction layer."""
        index, last = self._layer_of(name), self._model.num_layers
        if index is not None and last <= index < last + self._model.num_prediction_layers:
            return True
        return self._ignored.fullmatch(name) is not None

    def unknown(self, names: Iterable[str]) -> list[str]:
        """Return the names that no stage reads and that are not ignored, sorted."""
        every = range(self._model.num_layers)
        return sorted(
            name for name in names if not (self._belongs(name, every) or self.is_ignored(name))
        )

    def excess_layers(self, names: Iterable[str]) -> list[int]:
        """Return the sorted numbers of layers beyond those of the model."""
        numbers = {number for name in names if (number := self._layer_of(name)) is not None}
        return sorted(number for number in numbers if number >= self._model.num_layers)

    def _layer_of(self, name: str) -> int | None:
        found = self._layer.match(name)
        return None if found is None else int(found[1])
