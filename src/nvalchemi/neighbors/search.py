"""Neighbour search: one function over the backends, for arrays and for a :class:`~nvalchemi.data.Batch`."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch.autograd.graph import increment_version

from nvalchemi import _kernels
from nvalchemi.neighbors._failure import Describe
from nvalchemi.neighbors._warp import is_installed
from nvalchemi.neighbors.config import NeighborConfig, NeighborListFormat
from nvalchemi.typing import Bool, Float, Int, Tensor

if TYPE_CHECKING:
    from nvalchemi.data import Batch

__all__ = ["compute_neighbors", "neighbor_list", "neighbor_matrix"]


def compute_neighbors(
    batch: "Batch",
    cutoff: float | None = None,
    *,
    config: NeighborConfig | None = None,
    format: NeighborListFormat | str = NeighborListFormat.COO,
    max_neighbors: int | None = None,
    half_list: bool = False,
    method: str | None = None,
    in_place: bool = False,
    positions: Float[Tensor, "N 3"] | None = None,
    cell: Float[Tensor, "B 3 3"] | None = None,
    pbc: Bool[Tensor, "B 3"] | None = None,
    graphs: Bool[Tensor, "B"] | None = None,
) -> None:
    """Write the neighbour list of every structure into a batch.

    All pairs closer than the cutoff are found, whatever the cell: triclinic, left-handed, thinner than the cutoff
    (then an atom meets several images of another, and its own), periodic along any of the axes, with atoms any number
    of cells away. Two atoms at the same place are a pair. The list of a structure does not depend on what else is in
    the batch.

    Parameters
    ----------
    batch : Batch
        The structures. Without ``pbc`` nothing is periodic; lattice vectors of axes that are not periodic are not
        looked at.
    cutoff : float, optional
        Distance, Å; pairs at exactly this distance are left out. Either this or ``config``.
    config : NeighborConfig, optional
        What a model needs (``model.model_config.neighbor_config``): sets cutoff (+ skin), format and half_list.
    format : {"coo", "matrix"}, default "coo"
        ``"coo"`` writes ``neighbor_list`` (int64 [E, 2], sorted by graph, then by i) and ``neighbor_list_shifts``
        (int32 [E, 3]). Other edge fields are dropped, as they belong to other edges.
        ``"matrix"`` writes ``neighbor_matrix`` (int32 [N, K], padded with N), ``num_neighbors`` (int32 [N]) and
        ``neighbor_matrix_shifts`` (int8 [N, K, 3]; int32 where shifts may be beyond ±127). K is a multiple of 8. The
        shifts are a view of a table [N, 3, K], the layout that is fast for kernels.
    max_neighbors : int, optional
        Columns the matrix has at least. Rows are never cut: a longer row widens the table.
    half_list : bool, default False
        List each pair once: with i < j, and an atom with its own image with the first non-zero component of S
        positive. The default lists (i, j, S) and (j, i, −S).
    method : {"numba", "torch", "warp"}, optional
        Backend. By default the compiled kernel on the CPU, with ``torch.get_num_threads()`` threads; on CUDA the Warp
        kernels of nvalchemi-toolkit-ops (extra ``cuda``) where they are installed; torch operations elsewhere.
    in_place : bool, default False
        For repeated searches in ``"matrix"`` format: overwrite the tables of the batch where they are wide enough.
    positions, cell, pbc : Tensor, optional
        Search with these in place of the batch's own.
    graphs : Tensor, bool [B], optional
        With ``in_place``: the other graphs need no search, because nothing changed there. They may keep their rows.

    Raises
    ------
    UnsearchableStructureError
        A ``ValueError``: a degenerate periodic cell, a position that is not finite or too far away (naming the graph
        and atom).
    ValueError
        A cutoff that is not a positive number.

    Examples
    --------
    >>> from nvalchemi.data import AtomicData, Batch
    >>> argon = AtomicData(
    ...     positions=torch.zeros(1, 3),
    ...     atomic_numbers=torch.tensor([18]),
    ...     cell=2.63 * torch.tensor([[[0.0, 1, 1], [1, 0, 1], [1, 1, 0]]]),
    ...     pbc=torch.ones(1, 3, dtype=torch.bool),
    ... )
    >>> batch = Batch.from_data_list([argon])
    >>> compute_neighbors(batch, 8.5)
    >>> batch.neighbor_list.shape
    torch.Size([78, 2])
    """
    if config is not None:
        if cutoff is not None:
            raise ValueError("give either cutoff or config to compute_neighbors, not both")
        cutoff, format, half_list = config.search_cutoff, config.format, config.half_list  # noqa: A001
    if cutoff is None:
        raise ValueError("compute_neighbors needs a cutoff or a config")
    x: Tensor = batch.positions if positions is None else positions
    h: Tensor = batch.get("cell", x.new_zeros(batch.num_graphs, 3, 3)) if cell is None else cell
    nowhere = torch.zeros(batch.num_graphs, 3, dtype=torch.bool, device=x.device)
    periodic: Tensor = batch.get("pbc", nowhere) if pbc is None else pbc
    structures = (x, batch.batch_ptr, h, periodic, cutoff)
    if NeighborListFormat(format) is NeighborListFormat.COO:
        pairs, shifts, edge_ptr = neighbor_list(
            *structures, half_list=half_list, method=method, describe=batch.describe_graph
        )
        batch.set_edges(edge_ptr, neighbor_list=pairs, neighbor_list_shifts=shifts)
        return
    old = None
    if in_place and "neighbor_matrix" in batch:
        old = (batch.neighbor_matrix, batch.num_neighbors, batch.neighbor_matrix_shifts)
    new = neighbor_matrix(
        *structures,
        half_list=half_list,
        method=method,
        max_neighbors=max_neighbors,
        out=old,
        graphs=graphs,
        describe=batch.describe_graph,
    )
    for i, name in enumerate(("neighbor_matrix", "num_neighbors", "neighbor_matrix_shifts")):
        if old is None or new[i] is not old[i]:
            batch.add_key(name, new[i])
        else:
            # Compiled code wrote, which torch cannot see: say so, for those who keep something derived from the list.
            increment_version(new[i])


def neighbor_list(
    positions: Float[Tensor, "N 3"],
    batch_ptr: Int[Tensor, "B_plus_1"],
    cell: Float[Tensor, "B 3 3"],
    pbc: Bool[Tensor, "B 3"],
    cutoff: float,
    *,
    half_list: bool = False,
    method: str | None = None,
    describe: Describe = "graph {}".format,
) -> tuple[Int[Tensor, "E 2"], Int[Tensor, "E 3"], Int[Tensor, "B_plus_1"]]:
    """Pairs within the cutoff as a list; :func:`compute_neighbors` for tensors.

    Parameters
    ----------
    positions : Tensor, shape [N, 3]
        Positions of the atoms of all graphs, Å.
    batch_ptr : Tensor, shape [B + 1]
        First atom of each graph and, last, N.
    cell, pbc : Tensor, shape [B, 3, 3] and [B, 3]
        Lattice vectors (rows, Å) and periodicity.
    cutoff, half_list, method
        As in :func:`compute_neighbors`.
    describe : callable, optional
        Words for a graph, from its index, in error messages.

    Returns
    -------
    tuple of Tensor
        Pairs (i, j), int64 [E, 2]; shifts, int32 [E, 3]; first pair of each graph and, last, E, int64 [B + 1].
    """
    structures = (positions, batch_ptr, cell, pbc, _checked(cutoff), half_list, describe)
    method = _resolve(method, positions)
    if method == "numba":
        from nvalchemi.neighbors._numba import CompiledSearch

        pairs, shifts, counts = CompiledSearch(*structures).pairs()
    else:
        pairs, shifts, counts = _find_pairs(method)(*structures)
    ends = torch.nn.functional.pad(torch.cumsum(counts, 0), (1, 0))
    return pairs, shifts, ends[batch_ptr]


def neighbor_matrix(
    positions: Float[Tensor, "N 3"],
    batch_ptr: Int[Tensor, "B_plus_1"],
    cell: Float[Tensor, "B 3 3"],
    pbc: Bool[Tensor, "B 3"],
    cutoff: float,
    *,
    half_list: bool = False,
    method: str | None = None,
    max_neighbors: int | None = None,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
    graphs: Bool[Tensor, "B"] | None = None,
    describe: Describe = "graph {}".format,
) -> tuple[Int[Tensor, "N K"], Int[Tensor, "N"], Int[Tensor, "N K 3"]]:
    """Pairs within the cutoff as a padded table; :func:`compute_neighbors` for tensors.

    Parameters
    ----------
    positions, batch_ptr, cell, pbc, cutoff, half_list, method, describe
        As in :func:`neighbor_list`.
    max_neighbors : int, optional
        Columns the table has at least.
    out : tuple of three Tensors, optional
        Result of an earlier call for as many atoms, to be overwritten. Where a row does not fit, new and wider tables
        are returned, and the old ones hold nothing of use.
    graphs : Tensor, bool [B], optional
        Graphs to search; the rows that ``out`` has for the others are still right, and may be kept.

    Returns
    -------
    tuple of Tensor
        Neighbours, int32 [N, K] padded with N; number of neighbours, int32 [N]; shifts, int8 (or int32) [N, K, 3].
    """
    structures = (positions, batch_ptr, cell, pbc, _checked(cutoff), half_list, describe)
    if max_neighbors is not None and max_neighbors < 0:
        raise ValueError(f"max_neighbors must not be negative, got {max_neighbors}")
    method = _resolve(method, positions)
    if method == "numba":
        from nvalchemi.neighbors._numba import CompiledSearch, reusable

        tables = out if out is not None and out[0].shape[0] == positions.shape[0] and reusable(*out) else None
        return CompiledSearch(*structures).matrix(tables, max_neighbors or 0, graphs)
    from nvalchemi.neighbors._torch import pack_matrix

    return pack_matrix(*_find_pairs(method)(*structures), max_neighbors or 0)


def _find_pairs(method: str) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    if method == "warp":
        from nvalchemi.neighbors._warp import find_pairs
    else:
        from nvalchemi.neighbors._torch import find_pairs
    return find_pairs


def _checked(cutoff: float) -> float:
    if not (math.isfinite(cutoff) and cutoff > 0):
        raise ValueError(f"the cutoff must be a positive number of Å, got {cutoff}")
    return float(cutoff)


def _resolve(method: str | None, positions: Tensor) -> str:
    on_cpu = positions.device.type == "cpu"
    match method:
        case None if _kernels.serve(positions):
            return "numba"
        case None:
            return "warp" if positions.device.type == "cuda" and is_installed() else "torch"
        case "numba" if not on_cpu:
            raise ValueError(f"method 'numba' works on the CPU, the positions are on {positions.device}")
        case "warp" if not is_installed():
            raise ModuleNotFoundError(
                "method 'warp' needs nvalchemi-toolkit-ops: pip install 'nvalchemi[cuda]'"
            )
        case "numba" | "torch" | "warp":
            return method
        case _:
            raise ValueError(f"unknown method {method!r} of neighbour search: 'numba', 'torch' or 'warp'")
