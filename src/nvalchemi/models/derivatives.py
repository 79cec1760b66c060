"""Forces and stress as derivatives of an energy, and the per-graph arithmetic that models share."""

import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from nvalchemi.data import Batch
from nvalchemi.typing import Float, Int


def sum_per_graph(
    values: Float[Tensor, " N"], batch_idx: Int[Tensor, " N"], num_graphs: int
) -> Float[Tensor, "{num_graphs} 1"]:
    """Sum of atomic values for each graph, accumulated in float64.

    Parameters
    ----------
    values : Tensor, shape [N]
        One value per atom.
    batch_idx : Tensor, shape [N]
        Graph of each atom.
    num_graphs : int
        Number of graphs, B; a graph without atoms gets 0.

    Returns
    -------
    Tensor, float64, shape [B, 1]
        In float32 the sum over a thousand atoms of some eV each would round at 1e-3 eV, and the rounding would depend
        on what else is in the batch.
    """
    total = values.new_zeros(num_graphs, dtype=torch.float64)
    return total.index_add(0, batch_idx, values.to(torch.float64)).unsqueeze(-1)


def edge_vectors(inputs: Mapping[str, Any]) -> Float[Tensor, "E 3"]:
    """Vectors from i to j of a COO neighbour list, ``x_j + S · cell − x_i``, Å.

    Parameters
    ----------
    inputs : mapping
        As :meth:`~nvalchemi.models.base.BaseModelMixin.adapt_input` returns it.

    Returns
    -------
    Tensor, shape [E, 3]
        In the dtype of the positions. Cast the vectors rather than the positions to a lower precision: their error is
        then relative to the distance and not to the coordinates.
    """
    first, second = inputs["neighbor_list"].unbind(1)
    positions: Tensor = inputs["positions"]
    vectors = positions[second] - positions[first]
    if "cell" not in inputs:
        return vectors
    cell = inputs["cell"][inputs["batch_idx"][first]]
    shifts = inputs["neighbor_list_shifts"].to(cell.dtype)
    return vectors + torch.bmm(shifts.unsqueeze(1), cell).squeeze(1)


class Edges(NamedTuple):
    """Pairs (i, j) of a COO list with their vectors."""

    pairs: Tensor
    """Atoms i and j of each edge, int64 [E, 2]."""
    shifts: Tensor
    """Lattice shift S of atom j, [E, 3]."""
    vectors: Tensor
    """Vector from i to the image of j, Å, [E, 3]."""


def edges_within_cutoff(inputs: Mapping[str, Any], cutoff: float) -> Edges:
    """Pairs of the COO list that are closer than the cutoff, with their vectors (:func:`edge_vectors`).

    A list made with a skin, or for a model with a larger cutoff, holds more pairs; a model whose cutoff function is a
    bare polynomial would count them.
    """
    pairs, shifts, vectors = inputs["neighbor_list"], inputs["neighbor_list_shifts"], edge_vectors(inputs)
    keep = (vectors.detach().square().sum(1) < cutoff * cutoff).nonzero().squeeze(1)
    if keep.shape[0] == pairs.shape[0]:
        return Edges(pairs, shifts, vectors)
    return Edges(*(tensor.index_select(0, keep) for tensor in (pairs, shifts, vectors)))


def derivatives_of_energy(
    energies: Callable[[dict[str, Any]], Mapping[str, Tensor]],
    inputs: dict[str, Any],
    *,
    forces: bool,
    stress: bool,
    create_graph: bool,
    attached: Collection[str] = (),
) -> dict[str, Tensor]:
    """Evaluate an energy function with its forces and stress.

    Positions and cell of each graph are deformed by a symmetric strain, ``x → x (1 + ε)``, ``h → h (1 + ε)`` with
    ε = 0, and then

    ======== =================================== ===========
    output   definition                          unit
    ======== =================================== ===========
    forces   ``F_i = −∂E/∂x_i``                  eV/Å
    stress   ``σ = (1/V) ∂E/∂ε``, tensile > 0    eV/Å³
    ======== =================================== ===========

    (F. Knuth et al., Comput. Phys. Commun. 190, 33 (2015), Eq. 5). With the symmetrised strain the stress is symmetric
    by construction, and no term is missing for models that are not pair-wise.

    Parameters
    ----------
    energies : callable
        Maps inputs to a mapping with ``"energy"`` [B, 1] and any further outputs.
    inputs : dict
        As :meth:`~nvalchemi.models.base.BaseModelMixin.adapt_input` returns it; not changed.
    forces, stress : bool
        What to compute. For a stress every graph must have a cell with a volume.
    create_graph : bool
        Keep the graph, so that the results can be differentiated again (training, second derivatives).
    attached : collection of str
        Inputs that stay connected to the caller's graph instead of being detached.

    Returns
    -------
    dict of Tensor
        What ``energies`` gave, and ``forces`` [N, 3] and ``stress`` [B, 3, 3] as asked.
    """
    if not (forces or stress):
        with torch.set_grad_enabled(create_graph):
            return dict(energies(inputs))
    # Inference mode cannot be left by enable_grad alone; its tensors have to be copied to take part in a graph.
    with torch.inference_mode(False), torch.enable_grad():
        inputs = {name: _ordinary(value) for name, value in inputs.items()}
        positions: Tensor = inputs["positions"]
        if "positions" not in attached or not positions.requires_grad:
            positions = positions.detach().requires_grad_(forces)
        variables = [positions] if forces else []
        inputs["positions"] = positions
        volume: Tensor | None = None
        if stress:
            cell: Tensor = inputs["cell"]
            cell = cell if "cell" in attached else cell.detach()
            volume = torch.linalg.det(cell).abs()
            strain = torch.zeros_like(cell, requires_grad=True)
            variables.append(strain)
            symmetric = 0.5 * (strain + strain.transpose(1, 2))
            per_atom = symmetric.to(positions.dtype)[inputs["batch_idx"]]
            inputs["positions"] = positions + torch.bmm(positions.unsqueeze(1), per_atom).squeeze(1)
            inputs["cell"] = cell + torch.bmm(cell, symmetric)
        raw = dict(energies(inputs))
        gradients = _gradients(raw["energy"], variables, create_graph=create_graph)
        if forces:
            raw["forces"] = -gradients[0]
        if volume is not None:
            raw["stress"] = gradients[-1] / volume[:, None, None]
    return raw


def _gradients(energy: Tensor, variables: list[Tensor], *, create_graph: bool) -> list[Tensor]:
    """Gradients of the summed energy; zero for what it does not depend on (no edges, an energy of charges alone)."""
    if not energy.requires_grad:
        return [torch.zeros_like(variable) for variable in variables]
    gradients = torch.autograd.grad(
        energy.sum(), variables, create_graph=create_graph, materialize_grads=True
    )
    return list(gradients)


def _ordinary(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) and value.is_inference() else value


class Periodicity(NamedTuple):
    """What the graphs of a batch have in common."""

    all_full: bool
    """Every graph has a cell with a volume that is periodic in three directions."""
    any_periodic: bool
    """Some graph is periodic in some direction."""


_periodicity: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def graph_periodicity(data: Batch) -> Periodicity:
    """Periodicity of a batch, without a host synchronisation when it was asked before.

    The answer is remembered for the ``pbc`` tensor as long as that tensor lives, and asked for again when it was
    written to or when the ``cell`` is another tensor. Cells that change in place (a relaxation) do not count: no valid
    step makes a volume zero.
    """
    if "pbc" not in data:
        return Periodicity(all_full=False, any_periodic=False)
    pbc, cell = data.pbc, data.get("cell")
    version = None if pbc.is_inference() else pbc._version
    known = _periodicity.get(pbc)
    if known is not None and version is not None and known[0] == version and known[1]() is cell:
        return known[2]
    with torch.no_grad():
        any_periodic = pbc.any()
        full = (
            any_periodic.new_zeros(()) if cell is None else (pbc.all(1) & (torch.linalg.det(cell) != 0)).all()
        )
        periodicity = Periodicity(*torch.stack((full, any_periodic)).tolist())
    _periodicity[pbc] = (version, _no_tensor if cell is None else weakref.ref(cell), periodicity)
    return periodicity


def first_without_volume(data: Batch) -> str:
    """Words for the first graph without a cell periodic in three directions; there must be one."""
    if "cell" not in data or "pbc" not in data:
        return data.describe_graph(0)
    full = data.pbc.all(1) & (torch.linalg.det(data.cell) != 0)
    return data.describe_graph(int((~full).nonzero()[0]))


def _no_tensor() -> None:
    """Stands for a weak reference to a cell that does not exist."""


def check_elements(data: Batch, known: Tensor, model: str) -> None:
    """Refuse elements a model was not made for.

    Parameters
    ----------
    data : Batch
        The structures.
    known : Tensor of bool, shape [Z_max + 1]
        Whether the model knows the element of each atomic number, on the batch's device.
    model : str
        Name for the message.

    Raises
    ------
    ValueError
        Naming the element and the graph, and saying how many elements the model knows.

    Notes
    -----
    The answer is remembered for the ``atomic_numbers`` tensor, so that a run costs one host synchronisation.
    """
    numbers = data.atomic_numbers
    version = None if numbers.is_inference() else numbers._version
    seen = _checked_elements.get(numbers)
    if seen is not None and version is not None and seen[0] == version and seen[1]() is known:
        return
    last = known.shape[0] - 1
    unknown = (numbers < 0) | (numbers > last) | ~known[numbers.clamp(0, last)]
    if bool(unknown.any()):
        from ase.data import chemical_symbols

        atom = int(unknown.nonzero()[0])
        number = int(numbers[atom])
        name = chemical_symbols[number] if 0 <= number < len(chemical_symbols) else "?"
        raise ValueError(
            f"{model} does not know the element {name} (atomic number {number}) of "
            f"{data.describe_graph(int(data.batch_idx[atom]))}; it knows {int(known.sum())} elements"
        )
    _checked_elements[numbers] = (version, weakref.ref(known))


_checked_elements: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
