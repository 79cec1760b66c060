"""Conformance test for models: what every user of a model relies on, checked on structures of your choice.

Call it from your own test suite::

    def test_my_model():
        check_model(MyModel(), Batch.from_data_list([AtomicData.from_atoms(bulk("Si"), dtype=torch.float64)]))
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from nvalchemi.data import FIELDS, AtomicData, Batch
from nvalchemi.models.base import BaseModelMixin, evaluation_mode
from nvalchemi.neighbors import compute_neighbors

Structures = list[AtomicData]
Outputs = dict[str, Tensor]


@dataclass(frozen=True)
class Tolerance:
    """What counts as equal, relative to the larger of 1 and the largest component."""

    exact: float
    """Same arithmetic in another order: a batch and its structures one by one, permuted atoms."""
    symmetry: float
    """Same physics from other numbers: translated, rotated, repeated."""
    derivative: float
    """Finite differences, relative to 1 + the norm of the forces or of volume · stress."""
    step: float
    """Step of the finite differences, Å and strain."""


TOLERANCES = {
    # Published models keep Wigner 3j symbols with the digits of float32, and have wavelengths of 0.1 Å (31 Bessel
    # functions up to 6 Å), so that larger steps measure the curvature.
    torch.float64: Tolerance(exact=1e-12, symmetry=1e-7, derivative=1e-7, step=3e-5),
    # Rounding of atomic energies of some eV, 5e-7 eV each, sets the step and what can be seen with it.
    torch.float32: Tolerance(exact=1e-5, symmetry=1e-4, derivative=1e-2, step=3e-3),
}


def check_model(
    model: BaseModelMixin,
    batch: Batch,
    *,
    skip: Collection[str] = (),
    tolerance: Tolerance | None = None,
    seed: int = 0,
) -> None:
    """Check that a model keeps the promises of the model interface; silent when it does.

    Parameters
    ----------
    model : model
        An ``nn.Module`` with :class:`~nvalchemi.models.base.BaseModelMixin`. It is left in the mode it was in.
    batch : Batch
        Two or more structures, of different sizes, without symmetry that hides errors (displace the atoms), not at a
        discontinuity of the potential. Neighbour lists are made here. Not changed.
    skip : collection of str
        Checks to leave out, by the names below. A model that is not invariant skips ``translation``, ``rotation`` and
        ``supercell``.
    tolerance : Tolerance, optional
        Default: by the lower precision of batch and parameters, see :data:`TOLERANCES`.
    seed : int, default 0
        Seed of the random displacements, rotations and permutations.

    Raises
    ------
    AssertionError
        Naming the check, the quantity, the graph, and by how much it failed.
    ValueError
        An unknown name in ``skip``.

    Notes
    -----
    =============== ===================================================================================
    check           what must hold
    =============== ===================================================================================
    ``outputs``     shapes, the batch's dtype, finite values; the batch is not written to
    ``graph``       in evaluation mode no output requires grad and ``positions.grad`` stays ``None``
    ``mode``        training mode and evaluation mode are as before
    ``singles``     a structure has the same results alone and in the batch
    ``forces``      ``F = −∂E/∂x``: random directions, four-point differences
    ``stress``      ``V σ = ∂E/∂ε``: random symmetric strains; σ symmetric
    ``permutation`` renumbered atoms: same energy, renumbered forces
    ``translation`` moved structure, and atoms moved by lattice vectors: nothing changes
    ``rotation``    forces and stress turn with the structure
    ``supercell``   twice the cell: twice the energy, same forces and stress
    ``training``    in training mode energy and forces give the parameters finite gradients
    =============== ===================================================================================
    """
    unknown = set(skip) - set(_CHECKS)
    if unknown:
        raise ValueError(f"unknown checks {sorted(unknown)}; checks are {', '.join(_CHECKS)}")
    case = _Case(model, batch, tolerance or TOLERANCES[_precision(model, batch)], seed)
    for name, check in _CHECKS.items():
        if name not in skip:
            try:
                check(case)
            except AssertionError as error:
                raise AssertionError(f"{type(model).__name__} fails the check {name!r}: {error}") from None


class _Case:
    """A model, its structures and the reference results."""

    def __init__(self, model: BaseModelMixin, batch: Batch, tolerance: Tolerance, seed: int) -> None:
        self.model = model
        self.module = cast(nn.Module, model)
        self.tolerance = tolerance
        self.random = torch.Generator().manual_seed(seed)
        bare = batch.clone()
        for name in ("neighbor_matrix", "num_neighbors", "neighbor_matrix_shifts"):
            if name in bare:
                bare.remove_key(name)
        for name in [name for name in bare.keys() if bare.level(name) == "edge"]:
            bare.remove_key(name)
        self.structures: Structures = bare.to_data_list()
        self.sizes = [structure.num_nodes for structure in self.structures]
        self.batch = self.make_batch(self.structures)
        self.reference = self.evaluate(self.structures)

    def make_batch(self, structures: Sequence[AtomicData]) -> Batch:
        batch = Batch.from_data_list(structures)
        if self.model.model_config.neighbor_config is not None:
            compute_neighbors(batch, config=self.model.model_config.neighbor_config)
        return batch

    def evaluate(self, structures: Sequence[AtomicData]) -> Outputs:
        with evaluation_mode(self.module):
            return self.model(self.make_batch(structures))

    def normal(self, *shape: int) -> Tensor:
        positions = self.batch.positions
        return torch.randn(*shape, generator=self.random, dtype=torch.float64).to(positions)

    def changed(self, change: Callable[[AtomicData], dict[str, Tensor]]) -> Structures:
        """Copies of the structures with some fields replaced."""
        copies: Structures = []
        for structure in self.structures:
            copy = structure.clone()
            for name, value in change(structure).items():
                copy.add_key(name, value)
            copies.append(copy)
        return copies

    def compare(self, what: str, given: Tensor, expected: Tensor, tolerance: float) -> None:
        """Fail where two tensors differ by more than ``tolerance`` times the larger of 1 and the largest component."""
        if given.shape != expected.shape:
            raise AssertionError(f"{what} has shape {list(given.shape)}, expected {list(expected.shape)}")
        if given.numel() == 0:
            return
        allowed = tolerance * max(1.0, float(expected.abs().max()))
        error = (given - expected).abs()
        if bool((error <= allowed).all()):
            return
        row = int(error.flatten(1).amax(1).nan_to_num(torch.inf).argmax())
        raise AssertionError(
            f"{what} is off by {float(error[row].max()):.3g} in row {row}: {given[row].tolist()} and not "
            f"{expected[row].tolist()}; allowed is {allowed:.3g}"
        )

    def compare_all(self, outputs: Outputs, expected: Outputs, tolerance: float) -> None:
        for name in ("energy", "forces", "stress"):
            if name in expected:
                self.compare(name, outputs[name], expected[name], tolerance)


def _check_outputs(case: _Case) -> None:
    batch = case.batch
    before = {name: tensor.clone() for name, tensor in batch.items()}
    with evaluation_mode(case.module):
        outputs = case.model(batch)
    if batch.keys() != tuple(before) or not all(
        torch.equal(before[name], tensor) for name, tensor in batch.items()
    ):
        raise AssertionError("the batch was written to")
    shapes = {
        "energy": (batch.num_graphs, 1),
        "forces": (batch.num_nodes, 3),
        "stress": (batch.num_graphs, 3, 3),
    }
    for name, tensor in outputs.items():
        if tensor.is_floating_point() and tensor.dtype != batch.dtype:
            raise AssertionError(f"{name} is of {tensor.dtype} for a batch of {batch.dtype}")
        if name in shapes and tensor.shape != shapes[name]:
            raise AssertionError(f"{name} has shape {list(tensor.shape)}, expected {list(shapes[name])}")
        if not bool(tensor.isfinite().all()):
            raise AssertionError(f"{name} is not finite")


def _check_graph(case: _Case) -> None:
    with evaluation_mode(case.module):
        outputs = case.model(case.batch)
    attached = [name for name, tensor in outputs.items() if tensor.requires_grad]
    if attached:
        raise AssertionError(f"{', '.join(attached)} carry an autograd graph in evaluation mode")
    if case.batch.positions.requires_grad or case.batch.positions.grad is not None:
        raise AssertionError("the positions of the batch track gradients or hold one after the evaluation")


def _check_mode(case: _Case) -> None:
    before = {module: module.training for module in case.module.modules()}
    for mode in (True, False):
        try:
            case.module.train(mode)
            case.model(case.batch)
            if any(module.training != mode for module in case.module.modules()):
                raise AssertionError(
                    f"an evaluation in {'training' if mode else 'evaluation'} mode changed the mode"
                )
        finally:
            for module, training in before.items():
                module.training = training


def _check_singles(case: _Case) -> None:
    singles = [case.evaluate([structure]) for structure in case.structures]
    shared = set(case.reference).intersection(*singles)
    joined = {name: torch.cat([single[name] for single in singles]) for name in shared}
    case.compare_all(joined, {name: case.reference[name] for name in shared}, case.tolerance.exact)


def _four_point(energies: Callable[[float], Tensor], step: float) -> Tensor:
    """Derivative at 0 with an error of order step⁴."""
    inner, outer = energies(step) - energies(-step), energies(2 * step) - energies(-2 * step)
    return (8 * inner - outer) / (12 * step)


def _scaled(direction: Tensor) -> Tensor:
    """Direction whose largest component is 1, so that no atom moves by more than the step."""
    return direction / direction.abs().max() if direction.numel() else direction


def _check_forces(case: _Case) -> None:
    if "forces" not in case.reference:
        return
    forces = case.reference["forces"].split(case.sizes)
    for _ in range(3):
        directions = [_scaled(case.normal(size, 3)) for size in case.sizes]

        def energies(step: float, directions: Sequence[Tensor] = directions) -> Tensor:
            moves = iter(directions)
            return case.evaluate(case.changed(lambda s: {"positions": s.positions + step * next(moves)}))[
                "energy"
            ]

        derivative = _four_point(energies, case.tolerance.step).squeeze(1)
        for graph, (force, direction) in enumerate(zip(forces, directions, strict=True)):
            expected = -(force * direction).sum()
            _compare_derivative(
                case, "forces", graph, derivative[graph], expected, float(force.norm()) * len(force) ** 0.5
            )


def _check_stress(case: _Case) -> None:
    if "stress" not in case.reference:
        return
    stress = case.reference["stress"]
    case.compare("stress − its transpose", stress, stress.transpose(1, 2), case.tolerance.symmetry)
    volumes = torch.linalg.det(case.batch.cell).abs()
    eye = torch.eye(3).to(stress)
    for _ in range(3):
        strains = case.normal(len(case.structures), 3, 3)
        strains = torch.stack([_scaled(strain + strain.T) for strain in strains])

        def energies(step: float, strains: Tensor = strains) -> Tensor:
            deformations = iter(eye + step * strains)

            def strained(structure: AtomicData) -> dict[str, Tensor]:
                deformation = next(deformations)
                return {"positions": structure.positions @ deformation, "cell": structure.cell @ deformation}

            return case.evaluate(case.changed(strained))["energy"]

        derivative = _four_point(energies, case.tolerance.step).squeeze(1)
        for graph in range(len(case.structures)):
            virial = volumes[graph] * stress[graph]
            expected = (virial * strains[graph]).sum()
            _compare_derivative(
                case, "volume · stress", graph, derivative[graph], expected, float(virial.norm())
            )


def _compare_derivative(
    case: _Case, what: str, graph: int, derivative: Tensor, expected: Tensor, scale: float
) -> None:
    allowed = case.tolerance.derivative * (1.0 + scale)
    error = float((derivative - expected).abs())
    if not error <= allowed:
        raise AssertionError(
            f"{what} of {case.batch.describe_graph(graph)}: finite differences give {float(derivative):.9g} along a "
            f"random direction, the model {float(expected):.9g}; the difference {error:.3g} is above {allowed:.3g}"
        )


def _check_permutation(case: _Case) -> None:
    orders = [torch.randperm(size, generator=case.random).to(case.batch.device) for size in case.sizes]
    waiting = iter(orders)

    def permuted(structure: AtomicData) -> dict[str, Tensor]:
        order = next(waiting)
        return {name: tensor[order] for name, tensor in structure.items() if structure.level(name) == "node"}

    expected = dict(case.reference)
    if "forces" in expected:
        parts = zip(expected["forces"].split(case.sizes), orders, strict=True)
        expected["forces"] = torch.cat([part[order] for part, order in parts])
    case.compare_all(case.evaluate(case.changed(permuted)), expected, case.tolerance.exact)


def _check_translation(case: _Case) -> None:
    def moved(structure: AtomicData) -> dict[str, Tensor]:
        positions = structure.positions + 3.0 * case.normal(1, 3)
        if "cell" in structure:
            jumps = torch.randint(-2, 3, structure.positions.shape, generator=case.random).to(positions)
            positions = positions + (jumps * structure.pbc[0]) @ structure.cell[0]
        return {"positions": positions}

    case.compare_all(case.evaluate(case.changed(moved)), case.reference, case.tolerance.symmetry)


def _check_rotation(case: _Case) -> None:
    rotation = torch.linalg.qr(case.normal(3, 3))[0]
    rotation = rotation * torch.linalg.det(rotation).sign()

    def turned(structure: AtomicData) -> dict[str, Tensor]:
        fields = {"positions": structure.positions @ rotation}
        return fields | ({"cell": structure.cell @ rotation} if "cell" in structure else {})

    expected = dict(case.reference)
    if "forces" in expected:
        expected["forces"] = expected["forces"] @ rotation
    if "stress" in expected:
        expected["stress"] = rotation.T @ expected["stress"] @ rotation
    case.compare_all(case.evaluate(case.changed(turned)), expected, case.tolerance.symmetry)


def _check_supercell(case: _Case) -> None:
    for graph, structure in enumerate(case.structures):
        if "cell" not in structure or not bool(structure.pbc.any()):
            continue
        axis = int(structure.pbc[0].nonzero()[0])
        cell = structure.cell.clone()
        cell[0, axis] *= 2
        nodes = {name: torch.cat((t, t)) for name, t in structure.items() if structure.level(name) == "node"}
        nodes["positions"] = torch.cat((structure.positions, structure.positions + structure.cell[0, axis]))
        others: dict[str, Any] = {
            name: t for name, t in structure.items() if structure.level(name) == "system"
        }
        custom = {name: others.pop(name) for name in list(others) if name not in FIELDS}
        custom |= {name: nodes.pop(name) for name in list(nodes) if name not in FIELDS}
        double = AtomicData(**nodes, **{**others, "cell": cell})
        for name, tensor in custom.items():
            double.add_key(name, tensor, structure.level(name))
        outputs, single = case.evaluate([double]), case.evaluate([structure])
        expected = {"energy": 2 * single["energy"]}
        if "forces" in single:
            expected["forces"] = torch.cat((single["forces"], single["forces"]))
        if "stress" in single:
            expected["stress"] = single["stress"]
        try:
            case.compare_all(outputs, expected, case.tolerance.symmetry)
        except AssertionError as error:
            raise AssertionError(
                f"{case.batch.describe_graph(graph)} twice along vector {axis}: {error}"
            ) from None


def _check_training(case: _Case) -> None:
    parameters = [parameter for parameter in case.module.parameters() if parameter.requires_grad]
    if not parameters:
        return
    before = {module: module.training for module in case.module.modules()}
    try:
        case.module.train()
        outputs = case.model(case.batch)
        for name in ("energy", "forces"):
            if name not in outputs:
                continue
            if not outputs[name].requires_grad:
                raise AssertionError(f"{name} in training mode does not depend on the parameters")
            loss = outputs[name].square().sum()
            gradients = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
            # torch declares that it returns tensors only; with allow_unused it does not.
            known = [g for g in cast("tuple[Tensor | None, ...]", gradients) if g is not None]
            if not known:
                raise AssertionError(f"{name} in training mode does not depend on the parameters")
            if not all(bool(gradient.isfinite().all()) for gradient in known):
                raise AssertionError(f"the gradient of {name} by the parameters is not finite")
    finally:
        for module, training in before.items():
            module.training = training


_CHECKS: dict[str, Callable[[_Case], None]] = {
    "outputs": _check_outputs,
    "graph": _check_graph,
    "mode": _check_mode,
    "singles": _check_singles,
    "forces": _check_forces,
    "stress": _check_stress,
    "permutation": _check_permutation,
    "translation": _check_translation,
    "rotation": _check_rotation,
    "supercell": _check_supercell,
    "training": _check_training,
}


def _precision(model: BaseModelMixin, batch: Batch) -> torch.dtype:
    dtypes = [batch.dtype, *(p.dtype for p in cast(nn.Module, model).parameters() if p.is_floating_point())]
    return torch.float64 if all(dtype == torch.float64 for dtype in dtypes) else torch.float32
