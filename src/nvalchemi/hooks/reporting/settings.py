"""What an engine, a hook or a model was made with, in words."""

import platform
from collections.abc import Mapping, Sequence
from enum import Enum
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from pydantic import BaseModel
from torch import Tensor, nn

from nvalchemi import units

_COUNTERS = frozenset({"step_count", "global_step_count", "batch_count", "epoch_count", "epoch_step_count"})
_NOT_SETTINGS = _COUNTERS | {
    "global_rank", "failures", "training", "stage", "active_graph_mask", "active_atom_mask",
    "last_validation", "structures", "stop_reason",
    "order_role", "model", "models", "model_config", "sinks", "sampler", "hooks",
}  # fmt: skip
_UNITS = {
    "dt": "fs", "dt_max": "fs", "thermostat_time": "fs", "barostat_time": "fs", "temperature": "K",
    "mass_temperature": "K", "friction": "1/fs", "pressure": "eV/Å³", "max_step": "Å", "cutoff": "Å",
}  # fmt: skip
"""Units of settings that are numbers: those in which they are given."""
_LONGEST = 300
_MOST_VALUES = 8


@runtime_checkable
class _Term(Protocol):
    weight: Any


@runtime_checkable
class _Sum(Protocol):
    terms: Sequence[_Term]


def describe(subject: object) -> dict[str, str]:
    """Public attributes that are numbers, words, or objects with words for themselves, with their units."""
    found: dict[str, str] = {}
    for name, value in vars(subject).items():
        words = _words(value) if _is_setting(name) else None
        if words is not None:
            unit = _UNITS.get(name) if _is_number(words) else None
            found[name] = f"{words} {unit}" if unit else words
            if name == "pressure" and unit:
                found[name] += f" ({float(words) / units.GPa:.6g} GPa)"
    return found


def _is_number(words: str) -> bool:
    try:
        float(words)
    except ValueError:
        return False
    return True


def describe_model(model: Any) -> dict[str, str]:
    """Kind of a model, its size, its own settings."""
    found = {"class": type(model).__name__}
    if isinstance(model, nn.Module):
        parameters = list(model.parameters())
        if parameters:
            found["parameters"] = f"{sum(p.numel() for p in parameters):,}"
            found["dtype"] = str(parameters[0].dtype).removeprefix("torch.")
            found["device"] = str(parameters[0].device)
    return found | describe(model)


def describe_environment(device: torch.device | None) -> dict[str, str]:
    """Versions, device and threads; nothing of the user or the machine's name."""
    kind = "cpu" if device is None else device.type
    return {
        "nvalchemi": version("nvalchemi"),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "Python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "device": torch.cuda.get_device_name(device) if kind == "cuda" else kind,
        "threads": str(torch.get_num_threads()),
    }


def _is_setting(name: str) -> bool:
    return not name.startswith("_") and name not in _NOT_SETTINGS


def _words(value: Any) -> str | None:
    """Words for a value, or ``None`` where it has none worth showing."""
    match value:
        case None:
            return None
        case bool() | int() | str() | Path():
            return str(value)[:_LONGEST]
        case float():
            return f"{value:.6g}"
        case Enum():
            return value.name
        case torch.dtype() | torch.device():
            return str(value).removeprefix("torch.")
        case Tensor():
            return str(value.tolist()) if value.numel() <= _MOST_VALUES else f"tensor {list(value.shape)}"
        case type():
            return value.__name__
        case list() | tuple() | set() | frozenset():
            items = [_words(item) for item in value]
            known = [item for item in items if item is not None]
            return ", ".join(known) if known and len(known) == len(items) <= _MOST_VALUES else None
        case Mapping():
            items = {str(key): _words(item) for key, item in value.items()}
            text = ", ".join(f"{key}={item}" for key, item in items.items() if item is not None)
            return text if text and len(text) <= _LONGEST else None
        case nn.Module():
            return type(value).__name__
        case BaseModel() if isinstance(value, _Sum):
            return " + ".join(_weighted(term) for term in value.terms)[:_LONGEST]
        case BaseModel() if isinstance(value, _Term):
            return _weighted(value)[:_LONGEST]
        case BaseModel():
            inner = ", ".join(f"{name}={words}" for name, words in describe(value).items())
            return f"{type(value).__name__}({inner})"[:_LONGEST]
        case _:
            text = repr(value)
            return text if len(text) <= _LONGEST and " at 0x" not in text else type(value).__name__


def _weighted(term: _Term) -> str:
    """A term of a loss as in a formula: ``10 × ForceMSELoss``."""
    name = type(term).__name__
    factors = vars(term.weight)
    match [value for key, value in factors.items() if key != "schedule"]:
        case [float() as factor]:
            return name if factor == 1.0 else f"{factor:.6g} × {name}"
        case _:
            return f"{type(term.weight).__name__}({', '.join(_pairs(factors))}) × {name}"


def _pairs(values: Mapping[str, Any]) -> list[str]:
    return [f"{key}={_words(value)}" for key, value in values.items() if key != "schedule"]
