"""ASE calculators as models, and models as ASE calculators."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from ase import Atoms
from ase.calculators.calculator import BaseCalculator, Calculator, PropertyNotImplementedError, all_changes
from torch import Tensor, nn

from nvalchemi.data import AtomicData, Batch
from nvalchemi.data.ase import matrix_to_voigt, voigt_to_matrix
from nvalchemi.models.base import BaseModelMixin, ModelConfig, evaluation_mode
from nvalchemi.neighbors import compute_neighbors

_SUPPORTED = frozenset({"energy", "forces", "stress"})


class ASECalculatorWrapper(nn.Module, BaseModelMixin):
    """Any ASE calculator as a batch model, for labels and references.

    Structures are evaluated one after another by one calculator, with their charge, spin, tags and initial charges.
    There is nothing to differentiate: outputs never carry a graph.

    Parameters
    ----------
    calculator_factory : callable
        Makes the calculator, for example ``lambda: EMT()`` or the class itself. A factory and not a calculator, because
        calculators cannot in general be copied to other processes.

    Raises
    ------
    RuntimeError
        On evaluation, when the calculator fails; the message names the structure.

    Examples
    --------
    >>> from ase.build import bulk
    >>> from ase.calculators.emt import EMT
    >>> model = ASECalculatorWrapper(EMT)
    >>> batch = Batch.from_data_list([AtomicData.from_atoms(bulk("Cu"), dtype=torch.float64)])
    >>> sorted(model(batch))
    ['energy', 'forces', 'stress']
    """

    def __init__(self, calculator_factory: Callable[[], BaseCalculator]) -> None:
        super().__init__()
        self.calculator_factory = calculator_factory
        self.calculator: Any = calculator_factory()
        self.model_config = ModelConfig(
            outputs=_SUPPORTED.intersection(self.calculator.implemented_properties), supports_pbc=True
        )
        self.eval()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "calculator"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.calculator = self.calculator_factory()

    def forward(self, data: Batch) -> dict[str, Tensor]:
        """Results of the calculator for each structure."""
        requested = self.requested_outputs(data)
        columns: dict[str, list[np.ndarray]] = {name: [] for name in requested}
        for index, structure in enumerate(data.detach().cpu().to_data_list()):
            atoms = structure.to_atoms()
            try:
                for name, column in columns.items():
                    column.append(self._property(name, atoms))
            except Exception as error:
                raise RuntimeError(
                    f"{type(self.calculator).__name__} failed for {data.describe_graph(index)}: {error}"
                ) from error
        raw = {
            name: torch.as_tensor(np.concatenate(column), dtype=torch.float64, device=data.device)
            for name, column in columns.items()
        }
        return self.adapt_output(raw, data)

    def _property(self, name: str, atoms: Atoms) -> np.ndarray:
        if len(atoms) == 0:
            return {"energy": np.zeros((1, 1)), "forces": np.zeros((0, 3)), "stress": np.zeros((1, 3, 3))}[
                name
            ]
        value = self.calculator.get_property(name, atoms)
        if name == "energy":
            return np.reshape(value, (1, 1))
        return voigt_to_matrix(value)[None] if name == "stress" else np.asarray(value)


class ModelCalculator(Calculator):
    """A model as an ASE calculator; made by :func:`to_ase_calculator`."""

    def __init__(self, model: BaseModelMixin, *, device: torch.device | str, dtype: torch.dtype) -> None:
        super().__init__()
        self.model: Any = model
        self.device, self.dtype = torch.device(device), dtype
        outputs = model.model_config.available_outputs
        self.implemented_properties = [
            name for name in ("energy", "forces", "stress", "magmoms") if name in outputs
        ]
        if "energy" in outputs:
            self.implemented_properties.append("free_energy")
        self._info_keys = model.model_config.required_inputs | model.model_config.optional_inputs

    def check_state(self, atoms: Atoms, tol: float = 1e-15) -> list[str]:
        """What changed since the last calculation; ``"info"`` when a charge, spin or the like did."""
        changes = list(super().check_state(atoms, tol))
        if self.atoms is not None:
            old: dict[str, Any] = self.atoms.info
            new: dict[str, Any] = atoms.info
            if not all(np.array_equal(new.get(key, ()), old.get(key, ())) for key in self._info_keys):
                changes.append("info")
        return changes

    def calculate(
        self,
        atoms: Atoms | None = None,
        properties: list[str] | None = None,
        system_changes: list[str] = all_changes,
    ) -> None:
        """Evaluate the model; all its active outputs are kept in ``results``."""
        super().calculate(atoms, properties, system_changes)
        assert self.atoms is not None  # set by ASE from the atoms it was given
        data = AtomicData.from_atoms(self.atoms, device=self.device, dtype=self.dtype)
        batch = Batch.from_data_list([data])
        config = self.model.model_config
        if config.neighbor_config is not None:
            compute_neighbors(batch, config=config.neighbor_config)
        with evaluation_mode(self.model):
            outputs = {name: tensor.detach().cpu().numpy() for name, tensor in self.model(batch).items()}
        results: dict[str, Any] = {}
        if "energy" in outputs:
            results["energy"] = results["free_energy"] = float(outputs["energy"][0, 0])
        if "forces" in outputs:
            results["forces"] = outputs["forces"]
        if "stress" in outputs:
            results["stress"] = matrix_to_voigt(outputs["stress"][0])
        if "magmoms" in outputs:
            results["magmoms"] = outputs["magmoms"]
        self.results = results
        for name in properties or ():
            if name not in results:
                raise PropertyNotImplementedError(
                    f"{type(self.model).__name__} gives no {name!r} here: a stress needs a cell periodic in three "
                    "directions, other outputs have to be in active_outputs"
                )


def to_ase_calculator(
    model: BaseModelMixin,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float64,
) -> ModelCalculator:
    """Use a model as an ASE calculator with energy, free_energy, forces and stress (Voigt order, eV/Å³).

    Parameters
    ----------
    model : model
        Any model of this package; it is evaluated in evaluation mode and otherwise left as it is.
    device : torch.device or str, optional
        Where structures are put; default: where the model's parameters are, the CPU for a model without any.
    dtype : torch.dtype, default torch.float64
        Floating-point type of the structures (the model computes in its own).

    Returns
    -------
    ModelCalculator
        Results are kept until positions, numbers, cell, periodicity, initial charges or moments, or an ``info`` entry
        that the model reads change. After changing the model itself call ``calculator.reset()``.

    Examples
    --------
    >>> from ase.build import bulk
    >>> from nvalchemi.models.lj import LennardJonesModelWrapper
    >>> atoms = bulk("Ar", a=5.26)
    >>> atoms.calc = to_ase_calculator(LennardJonesModelWrapper(epsilon=0.0104, sigma=3.40, cutoff=8.5))
    >>> round(atoms.get_potential_energy(), 10)
    -0.0842277845
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"a model is an nn.Module, not {type(model).__name__}")
    if device is None:
        parameter = next(model.parameters(), None)
        device = "cpu" if parameter is None else parameter.device
    return ModelCalculator(model, device=device, dtype=dtype)
