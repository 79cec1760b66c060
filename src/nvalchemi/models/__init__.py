"""Interatomic potentials: one interface, built-in models, published models, sums.

Names are imported when first used, so that ``import nvalchemi.models`` loads no package of a published model.

>>> from nvalchemi.models import LennardJonesModelWrapper
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nvalchemi.models.ase import ASECalculatorWrapper, to_ase_calculator
    from nvalchemi.models.base import (
        BaseModelMixin,
        ModelConfig,
        NeighborConfig,
        NeighborListFormat,
        evaluation_mode,
    )
    from nvalchemi.models.catalog import available_models, load_model
    from nvalchemi.models.chgnet import CHGNetWrapper
    from nvalchemi.models.demo import DemoModel, DemoModelWrapper
    from nvalchemi.models.lj import LennardJonesModelWrapper
    from nvalchemi.models.mace import MACEWrapper
    from nvalchemi.models.painn import PaiNN
    from nvalchemi.models.sevennet import SevenNetWrapper
    from nvalchemi.models.sum import SumModel
    from nvalchemi.models.testing import check_model

__all__ = [
    "ASECalculatorWrapper",
    "BaseModelMixin",
    "CHGNetWrapper",
    "DemoModel",
    "DemoModelWrapper",
    "LennardJonesModelWrapper",
    "MACEWrapper",
    "ModelConfig",
    "NeighborConfig",
    "NeighborListFormat",
    "PaiNN",
    "SevenNetWrapper",
    "SumModel",
    "available_models",
    "check_model",
    "evaluation_mode",
    "load_model",
    "to_ase_calculator",
]

_MODULES = {
    "ASECalculatorWrapper": "ase",
    "BaseModelMixin": "base",
    "CHGNetWrapper": "chgnet",
    "DemoModel": "demo",
    "DemoModelWrapper": "demo",
    "LennardJonesModelWrapper": "lj",
    "MACEWrapper": "mace",
    "ModelConfig": "base",
    "NeighborConfig": "base",
    "NeighborListFormat": "base",
    "PaiNN": "painn",
    "SevenNetWrapper": "sevennet",
    "SumModel": "sum",
    "available_models": "catalog",
    "check_model": "testing",
    "evaluation_mode": "base",
    "load_model": "catalog",
    "to_ase_calculator": "ase",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
