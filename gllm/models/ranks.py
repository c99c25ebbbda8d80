"""The tensor parallel ranks of a stage, from the view of its modules."""

from gllm.kernels.all_reduce import RankGroup


class Ranks:
    """Tensor-parallel rank of this process, and the communicators of its stage.

    Weights outlive an epoch, but groups do not. The modules therefore keep this object, which
    joins the groups of each epoch.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        """Create without groups, which a single rank never uses."""
        self.rank, self.size = rank, size
        self._groups: tuple[RankGroup, RankGroup] | None = None

    def join(self, layers: RankGroup, head: RankGroup) -> None:
        """Use the groups of an epoch from now on.

        Args:
            layers: group of the embedding and the layers.
            head: group of the LM head.

        Raises:
            ValueError: they are of another rank, or of another number of ranks.
        """
        for group in (layers, head):
            if (group.rank, group.size) != (self.rank, self.size):
                raise ValueError(
                    f"rank {self.rank} of {self.size} joins a group as rank {group.rank} of "
                    f"{group.size}"
                )
        self._groups = layers, head

    def leave(self) -> None:
        """Use no groups any more."""
        self._groups = None

    @property
    def layers(self) -> RankGroup:
        """Group of the embedding and the layers."""
        return self._joined[0]

    @property
    def head(self) -> RankGroup:
        """Group of the LM head."""
        return self._joined[1]

    @property
    def _joined(self) -> tuple[RankGroup, RankGroup]:
        assert self._groups is not None, "ranks join their groups before they compute"
        return self._groups
