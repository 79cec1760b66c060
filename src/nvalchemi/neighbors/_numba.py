"""Neighbour search on the CPU: allocation around the compiled kernel."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nvalchemi.neighbors._failure import Describe, bad_position, degenerate_cell
from nvalchemi.typing import Bool, Float, Int, Tensor

_Array = NDArray[Any]


class CompiledSearch:
    """One search over given structures."""

    def __init__(
        self,
        positions: Float[Tensor, "N 3"],
        batch_ptr: Int[Tensor, "B_plus_1"],
        cell: Float[Tensor, "B 3 3"],
        pbc: Bool[Tensor, "B 3"],
        cutoff: float,
        half_list: bool,
        describe: Describe,
    ) -> None:
        self._structures = (positions, batch_ptr, cell, pbc)
        self._describe = describe
        self._arguments = (
            positions.detach().to(torch.float64).contiguous().numpy(),
            batch_ptr.contiguous().numpy(),
            cell.detach().to(torch.float64).contiguous().numpy(),
            pbc.contiguous().numpy(),
            float(cutoff),
            half_list,
        )

    def matrix(
        self,
        tables: tuple[Tensor, Tensor, Tensor] | None,
        min_width: int,
        graphs: Bool[Tensor, "B"] | None = None,
    ) -> tuple[Int[Tensor, "N K"], Int[Tensor, "N"], Int[Tensor, "N K 3"]]:
        """Neighbours, number of neighbours, shifts (stored as [N, 3, K]): in ``tables`` where they are large enough.

        With ``graphs`` only those are searched, and the rows of the others stay, unless wider tables are needed.
        """
        from nvalchemi._kernels import neighbors as kernels

        if tables is not None:
            old, counts, old_shifts = tables[0].numpy(), tables[1].numpy(), tables[2].transpose(1, 2).numpy()
        else:
            old, counts, old_shifts = self._no_tables()
        wanted = None if tables is None or graphs is None else graphs.numpy()
        matrix, shifts = self._search(counts, old, old_shifts, wanted)
        width = matrix.shape[1]
        if tables is not None and width == old.shape[1] >= min_width and shifts.dtype == old_shifts.dtype:
            return tables
        # As narrow as can be, as later uses pay for width; but a table that was outgrown will be again.
        longest = int(counts.max(initial=0))
        width = _round_up(max(min_width, longest if tables is None else longest + longest // 16))
        # Allocated here, because numpy asks for large pages, and the kernel's own arrays do not get any.
        new = np.empty((len(counts), width), np.int32), np.empty((len(counts), 3, width), shifts.dtype)
        kernels.repack(matrix, shifts, counts, *new)
        return torch.from_numpy(new[0]), torch.from_numpy(counts), torch.from_numpy(new[1]).transpose(1, 2)

    def pairs(self) -> tuple[Int[Tensor, "E 2"], Int[Tensor, "E 3"], Int[Tensor, "N"]]:
        """Pairs, shifts, and the number of neighbours of each atom."""
        from nvalchemi._kernels import neighbors as kernels

        old, counts, old_shifts = self._no_tables()
        matrix, shifts = self._search(counts, old, old_shifts)
        offsets = np.zeros(len(counts) + 1, np.int64)
        np.cumsum(counts, out=offsets[1:])
        pairs, pair_shifts = np.empty((offsets[-1], 2), np.int64), np.empty((offsets[-1], 3), np.int32)
        kernels.unpack(matrix, shifts, offsets, pairs, pair_shifts)
        return torch.from_numpy(pairs), torch.from_numpy(pair_shifts), torch.from_numpy(counts)

    def _no_tables(self) -> tuple[_Array, _Array, _Array]:
        n = self._structures[0].shape[0]
        return np.empty((n, 0), np.int32), np.empty(n, np.int32), np.empty((n, 3, 0), np.int8)

    def _search(
        self, counts: _Array, matrix: _Array, shifts: _Array, wanted: _Array | None = None
    ) -> tuple[_Array, _Array]:
        from nvalchemi._kernels import neighbors as kernels

        everything = np.ones(len(self._arguments[1]) - 1, np.bool_)
        wanted = everything if wanted is None else wanted
        status, graph, atom, matrix, shifts = kernels.search(*self._arguments, wanted, counts, matrix, shifts)
        if status == kernels.SHIFTS_TOO_LARGE:
            shifts = shifts.astype(np.int32)
            status, graph, atom, matrix, shifts = kernels.search(
                *self._arguments, wanted, counts, matrix, shifts
            )
        if status == kernels.TOO_NARROW:
            return self._search(counts, matrix, shifts)
        if status != kernels.OK:
            raise self._error(status, graph, atom)
        return matrix, shifts

    def _error(self, status: int, graph: int, atom: int) -> ValueError:
        from nvalchemi._kernels import neighbors as kernels

        positions, batch_ptr, cell, pbc = self._structures
        if status == kernels.DEGENERATE:
            return degenerate_cell(cell[graph], pbc[graph], graph, self._describe)
        return bad_position(positions[int(batch_ptr[graph]) + atom], atom, graph, self._describe)


def _round_up(width: int) -> int:
    return -(-width // 8) * 8  # rows are read eight columns at a time


def reusable(matrix: Tensor, counts: Tensor, shifts: Tensor) -> bool:
    """Whether tables can be written by the kernel as they are."""
    return (
        matrix.dtype == counts.dtype == torch.int32
        and matrix.device.type == "cpu"
        and shifts.dtype in (torch.int8, torch.int32)
        and shifts.shape == (*matrix.shape, 3)
        and matrix.is_contiguous()
        and counts.is_contiguous()
        and shifts.transpose(1, 2).is_contiguous()
    )
