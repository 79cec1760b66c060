"""Lennard-Jones potential."""

import math
import weakref
from collections.abc import Mapping
from itertools import combinations_with_replacement
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nvalchemi import _kernels
from nvalchemi.data import Batch
from nvalchemi.models.base import BaseModelMixin, ModelConfig
from nvalchemi.models.derivatives import sum_per_graph
from nvalchemi.neighbors.config import NeighborConfig, NeighborListFormat

__all__ = ["LennardJonesModelWrapper"]

PairParameter = (
    float | Mapping[int, float] | Mapping[tuple[int, int], float] | Mapping[int | tuple[int, int], float]
)
"""One value for all atoms, or values by atomic number and by pair of atomic numbers."""


class LennardJonesModelWrapper(nn.Module, BaseModelMixin):
    """Pair potential ``u(r) = 4 ε [(σ/r)¹² − (σ/r)⁶]``, truncated at the cutoff.

    J. E. Jones, Proc. R. Soc. Lond. A 106, 463 (1924).

    Parameters
    ----------
    epsilon : float or mapping
        Well depth, eV. A mapping has atomic numbers Z (the pair Z–Z) or pairs (Z1, Z2), in either order, as keys.
        Pairs not given follow from the elements by the Lorentz–Berthelot rules, ε₁₂ = sqrt(ε₁ ε₂), σ₁₂ = (σ₁ + σ₂)/2.
    sigma : float or mapping
        Distance at which u is zero, Å; given like ``epsilon``.
    cutoff : float
        Largest distance, Å.
    switch_width : float, default 0.0
        0: plain truncation; the energy jumps by u(cutoff), and no shift is added. Otherwise u is multiplied by
        ``1 − 10 t³ + 15 t⁴ − 6 t⁵`` with ``t = (r − cutoff + width)/width`` over the last ``width`` Å, which
        takes energy, force and its derivative to zero at the cutoff.
    half_list : bool, default False
        Ask for a list with each pair once. It takes half the memory; the full list is faster, as its sums can be done
        with vector instructions and by several threads.

    Notes
    -----
    Energy, forces and stress are analytic: from a compiled kernel with ``torch.get_num_threads()`` threads on the
    CPU, and from torch operations elsewhere, or when ``model_config.gradient_keys`` asks for outputs that can be
    differentiated. Results are new tensors at each call. Two atoms at the same place give results that are not
    finite.

    Examples
    --------
    >>> from nvalchemi.data import AtomicData, Batch
    >>> from nvalchemi.neighbors import compute_neighbors
    >>> dimer = AtomicData(
    ...     positions=torch.tensor([[0.0, 0, 0], [3.4 * 2 ** (1 / 6), 0, 0]], dtype=torch.float64),
    ...     atomic_numbers=torch.tensor([18, 18]),
    ... )
    >>> model = LennardJonesModelWrapper(epsilon=0.0104, sigma=3.40, cutoff=8.5)
    >>> batch = Batch.from_data_list([dimer])
    >>> compute_neighbors(batch, config=model.model_config.neighbor_config)
    >>> round(model(batch)["energy"].item(), 12)
    -0.0104
    """

    def __init__(
        self,
        epsilon: PairParameter,
        sigma: PairParameter,
        cutoff: float,
        switch_width: float = 0.0,
        half_list: bool = False,
    ) -> None:
        super().__init__()
        if not (math.isfinite(switch_width) and 0 <= switch_width <= cutoff):
            raise ValueError(
                f"switch_width must be between 0 and the cutoff ({cutoff} Å), got {switch_width}"
            )
        self.epsilon, self.sigma = epsilon, sigma
        self.cutoff, self.switch_width = float(cutoff), float(switch_width)
        self.model_config = ModelConfig(
            outputs=frozenset({"energy", "forces", "stress"}),
            supports_pbc=True,
            neighbor_config=NeighborConfig(
                cutoff=cutoff, format=NeighborListFormat.MATRIX, half_list=half_list
            ),
        )
        self.elements = _elements(epsilon, sigma)
        self._table = _pair_table(self.elements, epsilon, sigma)
        self._type_of = torch.full((max(self.elements, default=0) + 1,), -1, dtype=torch.int32)
        self._type_of[list(self.elements)] = torch.arange(len(self.elements), dtype=torch.int32)
        self._constants: dict[torch.dtype, tuple[Any, Any]] = {}
        self._tables: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self._types: tuple[weakref.ref[Tensor], int, Tensor] | None = None
        self._axes: tuple[weakref.ref[Tensor], int, Any] | None = None

    def extra_repr(self) -> str:
        """Parameters, for ``print(model)``."""
        return f"epsilon={self.epsilon}, sigma={self.sigma}, cutoff={self.cutoff}, switch_width={self.switch_width}"

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_types": None, "_axes": None}  # weak references cannot be pickled

    def forward(self, data: Batch) -> dict[str, Tensor]:
        """Energy [B, 1] (eV), forces [N, 3] (eV/Å) and stress [B, 3, 3] (eV/Å³), as far as they are active."""
        positions = data.positions
        compiled = _kernels.serve(positions) and positions.dtype in (torch.float32, torch.float64)
        if not compiled or self.model_config.gradient_keys:
            return self.differentiate(self.energies, data)
        return self._compiled(data)

    # ------------------------------------------------------------------ compiled kernel
    def _compiled(self, data: Batch) -> dict[str, Tensor]:
        requested = self.requested_outputs(data)
        inputs = self.adapt_input(data)
        stressed = "stress" in requested
        positions: Tensor = inputs["positions"].detach()
        graphs, dtype = inputs["num_graphs"], positions.dtype
        cell = inputs.get("cell")
        cell = positions.new_zeros(graphs, 3, 3) if cell is None else cell.detach().to(dtype).contiguous()
        x = positions.contiguous().numpy()
        forces, energy = np.empty_like(x), np.empty((graphs, 1), x.dtype)
        stress = np.empty((graphs if stressed else 0, 3, 3), x.dtype)
        table, cut = self._constants_in(dtype)
        shifts: Tensor = inputs["neighbor_matrix_shifts"]
        shifts_by_axis = shifts.transpose(1, 2).contiguous().numpy()
        self._kernel(stressed)(
            x,
            cell.numpy(),
            data.batch_ptr.numpy(),
            inputs["batch_idx"].numpy(),
            inputs["neighbor_matrix"].contiguous().numpy(),
            inputs["num_neighbors"].contiguous().numpy(),
            shifts_by_axis,
            self._shifted_axes(shifts, shifts_by_axis),
            self._types_of(data).numpy(),
            table,
            cut,
            forces,
            energy,
            stress,
        )
        outputs = {"energy": energy, "forces": forces, "stress": stress}
        return {name: torch.from_numpy(array) for name, array in outputs.items() if name in requested}

    def _kernel(self, stressed: bool) -> Any:
        from nvalchemi._kernels import lj

        config = self.model_config.neighbor_config
        assert config is not None
        make = lj.half_list_kernel if config.half_list else lj.full_list_kernel
        return make(bool(self.elements), self.switch_width > 0, stressed)

    def _constants_in(self, dtype: torch.dtype) -> tuple[Any, Any]:
        if dtype not in self._constants:
            from nvalchemi._kernels.lj import constants

            of = np.float64 if dtype == torch.float64 else np.float32
            self._constants[dtype] = (self._table.astype(of), constants(of, self.cutoff, self.switch_width))
        return self._constants[dtype]

    def _shifted_axes(self, shifts: Tensor, by_axis: Any) -> Any:
        """Code of each row of the list for the kernel, found once per list."""
        version = _version(shifts)
        if self._axes is not None and self._axes[0]() is shifts and self._axes[1] == version >= 0:
            return self._axes[2]
        from nvalchemi._kernels.lj import shifted_axes

        axes = np.empty(len(by_axis), np.int8)
        shifted_axes(by_axis, axes)
        self._axes = (weakref.ref(shifts), version, axes)
        return axes

    def _types_of(self, data: Batch) -> Tensor:
        """Row of each atom in the table of parameters [N]; empty when one set of parameters serves all."""
        numbers: Tensor = data.atomic_numbers
        if not self.elements:
            return _NO_TYPES
        version = _version(numbers)
        if self._types is not None and self._types[0]() is numbers and self._types[1] == version >= 0:
            return self._types[2]
        type_of = self._type_of.to(numbers.device)
        types = type_of[numbers.clamp(0, len(type_of) - 1)]
        unknown = (types < 0) | (numbers >= len(type_of)) | (numbers < 0)
        if bool(unknown.any()):
            atom = int(unknown.nonzero()[0])
            raise ValueError(
                f"no Lennard-Jones parameters for atomic number {int(numbers[atom])} in "
                f"{data.describe_graph(int(data.batch_idx[atom]))}; there are some for {list(self.elements)}"
            )
        self._types = (weakref.ref(numbers), version, types)
        return types

    # ------------------------------------------------------------------ torch operations
    def adapt_input(self, data: Batch) -> dict[str, Any]:
        """Inputs of :meth:`energies`: those of the base class and ``types``."""
        inputs = super().adapt_input(data)
        inputs["types"] = self._types_of(data)
        return inputs

    def _table_on(self, like: Tensor) -> Tensor:
        key = (like.dtype, like.device)
        if key not in self._tables:  # the host waits for a copy, so that there is one only
            self._tables[key] = torch.as_tensor(self._table, dtype=like.dtype, device=like.device)
        return self._tables[key]

    def energies(self, inputs: dict[str, Any]) -> dict[str, Tensor]:
        """Energy of each graph, differentiable by positions and cell."""
        positions, matrix = inputs["positions"], inputs["neighbor_matrix"].long()
        atoms, width = matrix.shape
        listed = torch.arange(width, device=matrix.device) < inputs["num_neighbors"].unsqueeze(-1)
        j = torch.where(listed, matrix, 0)
        d = positions[j] - positions.unsqueeze(1)
        if "cell" in inputs:
            cell = inputs["cell"].to(positions.dtype)[inputs["batch_idx"]]
            d = d + torch.bmm(inputs["neighbor_matrix_shifts"].to(cell.dtype), cell)
        r2 = d.square().sum(-1)
        # Where a pair does not count its distance is replaced first, so that no gradient of r = 0 arises. NaN counts.
        inside = listed & ~(r2 >= self.cutoff**2)
        r2 = torch.where(inside, r2, self.cutoff**2)
        table = self._table_on(positions)
        types = (
            inputs["types"].long()
            if self.elements
            else torch.zeros(atoms, dtype=torch.int64, device=matrix.device)
        )
        four_epsilon, sigma2 = table[types.unsqueeze(-1), types[j]].unbind(-1)
        s6 = (sigma2 / r2) ** 3
        u = four_epsilon * (s6 * s6 - s6)
        if self.switch_width > 0:
            t = ((r2.sqrt() - (self.cutoff - self.switch_width)) / self.switch_width).clamp(0, 1)
            u = u * (1 - t**3 * (10 - t * (15 - 6 * t)))
        per_atom = torch.where(inside, u, 0.0).sum(-1)
        config = self.model_config.neighbor_config
        assert config is not None
        weight = 1.0 if config.half_list else 0.5
        return {"energy": sum_per_graph(weight * per_atom, inputs["batch_idx"], inputs["num_graphs"])}


_NO_TYPES = torch.zeros(0, dtype=torch.int32)


def _version(tensor: Tensor) -> int:
    """Tells of changes in place; −1 for tensors made in inference mode, which have to be looked at each time."""
    return -1 if tensor.is_inference() else tensor._version


def _by_pair(name: str, parameter: Mapping[Any, float]) -> dict[tuple[int, int], float]:
    pairs: dict[tuple[int, int], float] = {}
    for key, value in parameter.items():
        z1, z2 = key if isinstance(key, tuple) else (key, key)
        pair = (min(z1, z2), max(z1, z2))
        if pairs.get(pair, value) != value:
            raise ValueError(f"{name} of the pair {pair} is given twice, as {pairs[pair]} and {value}")
        pairs[pair] = value
    return pairs


def _elements(*parameters: PairParameter) -> tuple[int, ...]:
    """Atomic numbers that parameters name; none when all parameters are numbers."""
    named = [{z for pair in _by_pair("", p) for z in pair} for p in parameters if isinstance(p, Mapping)]
    return tuple(sorted(set().union(*named)))


def _pair_table(elements: tuple[int, ...], epsilon: PairParameter, sigma: PairParameter) -> Any:
    """4 ε and σ² of all pairs of elements, float64 [T, T, 2]; T = 1 without elements."""
    table = np.empty((max(len(elements), 1), max(len(elements), 1), 2))
    mixing = (
        ("epsilon", epsilon, lambda a, b: math.sqrt(a * b)),
        ("sigma", sigma, lambda a, b: 0.5 * (a + b)),
    )
    for column, (name, parameter, mix) in enumerate(mixing):
        if not isinstance(parameter, Mapping):
            table[..., column] = _checked(name, parameter, None)
            continue
        pairs = _by_pair(name, parameter)
        for (i, zi), (j, zj) in combinations_with_replacement(enumerate(elements), 2):
            if (zi, zj) in pairs:
                value = pairs[zi, zj]
            elif (zi, zi) in pairs and (zj, zj) in pairs:
                value = mix(pairs[zi, zi], pairs[zj, zj])
            else:
                raise ValueError(
                    f"{name} of the pair ({zi}, {zj}) is neither given nor follows from those of the elements"
                )
            table[i, j, column] = table[j, i, column] = _checked(name, value, (zi, zj))
    return np.stack([4.0 * table[..., 0], table[..., 1] ** 2], axis=-1)


def _checked(name: str, value: float, pair: tuple[int, int] | None) -> float:
    smallest_allowed = value >= 0 if name == "epsilon" else value > 0
    if not (math.isfinite(value) and smallest_allowed):
        where = "" if pair is None else f" of the pair {pair}"
        raise ValueError(
            f"{name}{where} must be a finite {'non-negative' if name == 'epsilon' else 'positive'} number, got {value}"
        )
    return float(value)
