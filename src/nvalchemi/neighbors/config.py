"""What a model asks of a neighbour search."""

from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["NeighborConfig", "NeighborListFormat"]


class NeighborListFormat(StrEnum):
    """How neighbours are stored in a batch of N atoms.

    ========== ===================================================================================================
    ``coo``    ``neighbor_list [E, 2]`` with rows (i, j) and ``neighbor_list_shifts [E, 3]``
    ``matrix`` ``neighbor_matrix [N, K]`` padded with N, ``num_neighbors [N]``, ``neighbor_matrix_shifts [N, K, 3]``
    ========== ===================================================================================================

    >>> NeighborListFormat("matrix") is NeighborListFormat.MATRIX
    True
    """

    COO = "coo"
    MATRIX = "matrix"


class NeighborConfig(BaseModel):
    """Neighbour list that a model needs.

    Parameters
    ----------
    cutoff : float
        Largest distance the model sees, Å; pairs at exactly this distance are left out.
    format : NeighborListFormat or str, default "coo"
        Storage, see :class:`NeighborListFormat`.
    half_list : bool, default False
        Each pair once (see :func:`nvalchemi.neighbors.compute_neighbors`) and not in both directions.
    skin : float, default 0.0
        Å added to the cutoff in the search, so that the list stays valid while no atom has moved more than half of it.
        For models that ignore pairs beyond their cutoff.

    Examples
    --------
    >>> NeighborConfig(cutoff=5.0, skin=0.5).search_cutoff
    5.5
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    cutoff: float = Field(gt=0, allow_inf_nan=False)
    format: NeighborListFormat = NeighborListFormat.COO
    half_list: bool = False
    skin: float = Field(default=0.0, ge=0, allow_inf_nan=False)

    @property
    def search_cutoff(self) -> float:
        """Distance up to which pairs are listed, cutoff + skin, Å."""
        return self.cutoff + self.skin

    def is_served_by(self, other: "NeighborConfig") -> bool:
        """Whether a model that asks for this list can read that of ``other``: same kind, cutoff not smaller."""
        same_kind = self.format is other.format and self.half_list == other.half_list
        return same_kind and other.cutoff >= self.cutoff
