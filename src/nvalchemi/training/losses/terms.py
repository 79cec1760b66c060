"""Losses of energies, forces and stresses."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import PositiveFloat
from torch import Tensor
from torch.nn import functional as F

from nvalchemi.training.losses.base import LossTerm

__all__ = [
    "EnergyHuberLoss",
    "EnergyMAELoss",
    "EnergyMSELoss",
    "ForceHuberLoss",
    "ForceL2NormLoss",
    "ForceMSELoss",
    "StressHuberLoss",
    "StressMSELoss",
]


class EnergyLoss(LossTerm):
    """Loss of energies [B, 1], mean over graphs.

    Parameters
    ----------
    per_atom : bool, default False
        Penalise the error per atom instead of the error of the whole structure, so that structures of all sizes count
        alike. Needs ``num_nodes_per_graph``, ``batch_ptr`` or ``batch_idx``.
    """

    quantity: ClassVar[str] = "energy"
    level: ClassVar[Literal["system", "node"]] = "system"

    per_atom: bool = False

    def scale_residual(self, residual: Tensor, fields: Mapping[str, Any]) -> Tensor:
        """Divide by the number of atoms when asked to."""
        if not self.per_atom:
            return residual
        sizes = _graph_sizes(self, fields, residual.shape[0])
        return residual / sizes.reshape(-1, *(1,) * (residual.ndim - 1)).to(residual.dtype)


class ForceLoss(LossTerm):
    """Loss of forces [N, 3], mean over all components (or atoms) of the batch.

    Parameters
    ----------
    balanced : bool, default False
        Average over each graph first and then over graphs, so that a small structure weighs as much as a large one.
        Needs ``batch_idx``, ``batch_ptr`` or ``num_nodes_per_graph``.
    """

    quantity: ClassVar[str] = "forces"
    level: ClassVar[Literal["system", "node"]] = "node"

    balanced: bool = False

    def average(self, penalties: Tensor, labelled: Tensor | None, fields: Mapping[str, Any]) -> Tensor:
        """Mean over what has a label; over graphs with a label when balanced."""
        if not self.balanced:
            return super().average(penalties, labelled, fields)
        batch_idx, num_graphs = _graph_of_atom(self, fields, penalties.shape[0])
        total, count = self.sums_per_graph(penalties, labelled, batch_idx, num_graphs)
        return (total / count.clamp(min=1)).sum() / (count > 0).sum().clamp(min=1)

    def count(self, penalties: Tensor, labelled: Tensor | None, fields: Mapping[str, Any]) -> int | Tensor:
        """Number of labels; of graphs with a label when balanced."""
        if not self.balanced:
            return super().count(penalties, labelled, fields)
        batch_idx, num_graphs = _graph_of_atom(self, fields, penalties.shape[0])
        return (self.sums_per_graph(penalties, labelled, batch_idx, num_graphs)[1] > 0).sum()


class StressLoss(LossTerm):
    """Loss of stresses [B, 3, 3], mean over components and graphs."""

    quantity: ClassVar[str] = "stress"
    level: ClassVar[Literal["system", "node"]] = "system"


class _Squared(LossTerm):
    kind: ClassVar[str] = "mse"

    def penalty(self, residual: Tensor) -> Tensor:
        """Square."""
        return residual.square()


class _Absolute(LossTerm):
    kind: ClassVar[str] = "mae"

    def penalty(self, residual: Tensor) -> Tensor:
        """Absolute value."""
        return residual.abs()


class _Huber(LossTerm):
    """``½ r²`` for ``|r| ≤ delta``, ``delta (|r| − ½ delta)`` beyond (P. J. Huber, Ann. Math. Stat. 35, 73 (1964)).

    Parameters
    ----------
    delta : float, default 1.0
        Residual at which the penalty turns from quadratic to linear, in the unit of the quantity (per atom where the
        energy is). The default is torch's; of the order of the error aimed at (0.01 eV, 0.01 eV/Å) it makes training
        insensitive to outliers.
    """

    kind: ClassVar[str] = "huber"

    delta: PositiveFloat = 1.0

    def penalty(self, residual: Tensor) -> Tensor:
        """Huber's function."""
        return F.huber_loss(residual, torch.zeros_like(residual), reduction="none", delta=self.delta)


class EnergyMSELoss(EnergyLoss, _Squared):
    """Mean squared error of energies, eV².

    >>> EnergyMSELoss()(torch.full((64, 1), 40.0).half(), torch.zeros(64, 1).half()).item()
    1600.0
    >>> EnergyMSELoss(per_atom=True)(
    ...     torch.tensor([[6.0]]), torch.tensor([[0.0]]), num_nodes_per_graph=torch.tensor([3])
    ... ).item()
    4.0
    """


class EnergyMAELoss(EnergyLoss, _Absolute):
    """Mean absolute error of energies, eV.

    >>> label = torch.tensor([[1.0], [float("nan")]])
    >>> EnergyMAELoss(ignore_nonfinite=True)(torch.zeros(2, 1), label).item()
    1.0
    """


class EnergyHuberLoss(EnergyLoss, _Huber):
    """Huber loss of energies.

    >>> EnergyHuberLoss(delta=0.5)(torch.tensor([[2.0]]), torch.tensor([[0.0]])).item()
    0.875
    """


class ForceMSELoss(ForceLoss, _Squared):
    """Mean squared error of force components, (eV/Å)².

    >>> forces = torch.tensor([[3.0, 0, 0], [0, 0, 0], [0, 0, 6.0]])
    >>> graphs = torch.tensor([0, 0, 1])
    >>> ForceMSELoss()(forces, torch.zeros(3, 3)).item()
    5.0
    >>> ForceMSELoss(balanced=True)(forces, torch.zeros(3, 3), batch_idx=graphs, num_graphs=2).item()
    6.75
    """


class ForceL2NormLoss(ForceLoss):
    """Mean length of the force error of an atom, ``|F − F_ref|``, eV/Å.

    It does not depend on the axes, and outliers weigh less than in a square. An atom any of whose components has no
    label counts as not labelled.

    >>> ForceL2NormLoss()(torch.tensor([[3.0, 4.0, 0.0], [0.0, 0.0, 0.0]]), torch.zeros(2, 3)).item()
    2.5
    """

    kind: ClassVar[str] = "l2"

    def penalty(self, residual: Tensor) -> Tensor:
        """Length; its derivative at zero is taken as zero."""
        return torch.linalg.vector_norm(residual, dim=-1)


class ForceHuberLoss(ForceLoss, _Huber):
    """Huber loss of force components.

    >>> ForceHuberLoss()(torch.full((1, 3), 0.5), torch.zeros(1, 3)).item()
    0.125
    """


class StressMSELoss(StressLoss, _Squared):
    """Mean squared error of stress components, (eV/Å³)².

    >>> StressMSELoss()(torch.ones(2, 3, 3), torch.zeros(2, 3, 3)).item()
    1.0
    """


class StressHuberLoss(StressLoss, _Huber):
    """Huber loss of stress components.

    >>> StressHuberLoss(delta=0.1)(torch.full((1, 3, 3), 0.2), torch.zeros(1, 3, 3)).item()
    0.015...
    """


def _graph_sizes(term: LossTerm, fields: Mapping[str, Any], num_graphs: int) -> Tensor:
    """Atoms of each graph, from whichever field of the batch says it."""
    if "num_nodes_per_graph" in fields:
        return fields["num_nodes_per_graph"]
    if "batch_ptr" in fields:
        return fields["batch_ptr"].diff()
    if "batch_idx" in fields:
        return torch.bincount(fields["batch_idx"], minlength=num_graphs)
    raise ValueError(
        f"{type(term).__name__} with these options needs to know which atom belongs to which graph: pass the batch's "
        "field batch_idx=…, batch_ptr=… or num_nodes_per_graph=…"
    )


def _graph_of_atom(term: LossTerm, fields: Mapping[str, Any], num_atoms: int) -> tuple[Tensor, int]:
    """Graph of each atom and number of graphs."""
    if "batch_idx" in fields:
        batch_idx: Tensor = fields["batch_idx"]
        num_graphs = fields.get("num_graphs")
        return batch_idx, int(batch_idx.max()) + 1 if num_graphs is None else num_graphs
    sizes = _graph_sizes(term, fields, 0)
    graphs = torch.arange(sizes.shape[0], device=sizes.device)
    return torch.repeat_interleave(graphs, sizes, output_size=num_atoms), sizes.shape[0]
