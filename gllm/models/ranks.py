"""The tensor parallel ranks of a stage, from the view of its modules."""

from gllm.kernels.all_reduce import RankGroup


class Ranks:
    """Tensor parallel rank of this process, with the current communicators of its stage.

    Weights survive an engine restart, communicators do not. Modules therefore refer to this object,
    which gets new communicators after each restart.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        """Create without communicators, which a single rank does not need."""
        self.rank, self.size = rank, size
        self._groups: tuple[RankGroup, RankGroup] | None = None

    def join(self, layers: RankGroup, head: RankGroup) -> None:
        """Use new communicators from now on.

        Args:
            layers: communicator for the embedding and the layers.
            head: communicator for the LM head.

        Raises:
            ValueError: they have another rank or size than this object.
        """
        for group in (layers, head):
            if (group.rank, group.size) != (self.rank, self.size):
                raise ValueError(
                    f"rank {self.rank} of {self.size} joins a group as rank {group.rank} of "
                    f"{group.size}"
                )
        self._groups = layers, head

    def leave(self) -> None:
        """Drop the communicators."""
        self._groups = None

    @property
    def layers(self) -> RankGroup:
        """Communicator for the embedding and the layers."""
        return self._joined[0]

    @property
    def head(self) -> RankGroup:
        """Communicator for the LM head."""
        return self._joined[1]

    @property
    def _joined(self) -> tuple[RankGroup, RankGroup]:
        assert self._groups is not None, "ranks join their groups before they compute"
        return self._groups
