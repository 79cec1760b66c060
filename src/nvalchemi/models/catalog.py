"""Models by name, for the command line and for scripts."""

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nvalchemi._optional import is_installed
from nvalchemi.models.base import BaseModelMixin

_Options = dict[str, Any]


@dataclass(frozen=True)
class _Entry:
    description: str
    make: Callable[[_Options], BaseModelMixin]
    package: str | None = None
    extra: str | None = None


@dataclass(frozen=True)
class AvailableModel:
    """One row of :func:`available_models`."""

    name: str
    """What :func:`load_model` takes."""
    description: str
    """One line."""
    extra: str | None
    """Extra of this package that the model needs."""
    usable: bool
    """Whether it can be loaded now."""
    reason: str
    """Why not; empty when usable."""


def _sevennet(name: str) -> Callable[[_Options], BaseModelMixin]:
    def make(options: _Options) -> BaseModelMixin:
        from nvalchemi.models.sevennet import SevenNetWrapper

        return SevenNetWrapper(name, **options)

    return make


def _chgnet(name: str) -> Callable[[_Options], BaseModelMixin]:
    def make(options: _Options) -> BaseModelMixin:
        from nvalchemi.models.chgnet import CHGNetWrapper

        return CHGNetWrapper(name, **options)

    return make


def _argon(options: _Options) -> BaseModelMixin:
    from nvalchemi.models.lj import LennardJonesModelWrapper

    # A. Rahman, Phys. Rev. 136, A405 (1964): ε/k = 120 K, σ = 3.4 Å; the cutoff is 2.5 σ.
    return LennardJonesModelWrapper(epsilon={18: 0.0104}, sigma={18: 3.40}, cutoff=8.5).to(**options)


_CATALOG = {
    "7net-0": _Entry(
        "SevenNet-0, 11 July 2024, 89 elements, MPtrj (PBE+U)", _sevennet("7net-0"), "sevenn", "sevennet"
    ),
    "7net-0_22may2024": _Entry(
        "SevenNet-0, 22 May 2024", _sevennet("7net-0_22may2024"), "sevenn", "sevennet"
    ),
    "7net-l3i5": _Entry(
        "SevenNet-l3i5, more accurate and slower", _sevennet("7net-l3i5"), "sevenn", "sevennet"
    ),
    "chgnet": _Entry("CHGNet 0.3.0, 94 elements, MPtrj (PBE+U)", _chgnet("0.3.0"), "chgnet", "chgnet"),
    "chgnet-r2scan": _Entry("CHGNet transferred to r2SCAN", _chgnet("r2scan"), "chgnet", "chgnet"),
    "lj-argon": _Entry("Lennard-Jones argon, cutoff 8.5 Å", _argon),
}


def available_models() -> list[AvailableModel]:
    """Models that :func:`load_model` knows by name, and whether their packages are installed.

    >>> [row.usable for row in available_models() if row.name == "lj-argon"]
    [True]
    """
    rows: list[AvailableModel] = []
    for name, entry in _CATALOG.items():
        usable = entry.package is None or is_installed(entry.package)
        reason = "" if usable else f"pip install 'nvalchemi[{entry.extra}]'"
        rows.append(AvailableModel(name, entry.description, entry.extra, usable, reason))
    return rows


def load_model(
    name_or_path: str | PathLike[str],
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> BaseModelMixin:
    """Load a model by name or from a file.

    Parameters
    ----------
    name_or_path : str or path
        A name of :func:`available_models`, or a file: what ``export_model`` wrote, a SevenNet or CHGNet checkpoint,
        or a MACE model. A file other than safetensors is unpickled, which can run code: load only files you trust.
    device : torch.device or str, optional
        Where to put it; default: the CPU.
    dtype : torch.dtype, optional
        Precision of the model; default: that of its weights.

    Returns
    -------
    model
        In evaluation mode.

    Raises
    ------
    ValueError
        Neither a known name nor a file (the message lists the names), or a file that holds no model.
    ImportError
        The model's package is not installed; the message names the extra.

    Examples
    --------
    >>> load_model("lj-argon").model_config.neighbor_config.cutoff
    8.5
    >>> load_model("7net0")
    Traceback (most recent call last):
    ValueError: unknown model '7net0', did you mean '7net-0'? ...
    """
    given: dict[str, Any] = {"device": device, "dtype": dtype}
    options = {name: value for name, value in given.items() if value is not None}
    entry = _CATALOG.get(str(name_or_path).lower())
    if entry is not None:
        return entry.make(options)
    path = Path(name_or_path)
    if path.is_file():
        return _load_file(path, options)
    close = difflib.get_close_matches(str(name_or_path).lower(), _CATALOG, n=1)
    hint = f", did you mean {close[0]!r}?" if close else "."
    raise ValueError(
        f"unknown model {str(name_or_path)!r}{hint} Known are {', '.join(_CATALOG)}, or the path of a model file"
    )


def _load_file(path: Path, options: _Options) -> BaseModelMixin:
    if path.suffix == ".safetensors":
        from nvalchemi.models.painn import PaiNN

        return PaiNN.from_checkpoint(path).to(**options)
    try:
        content: Any = torch.load(path, map_location="cpu", weights_only=False)
    except Exception as error:
        raise ValueError(f"{path} cannot be read as a model file: {error}") from error
    if type(content).__module__.split(".")[0] == "mace":
        from nvalchemi.models.mace import MACEWrapper

        return MACEWrapper(content, **options)
    if isinstance(content, BaseModelMixin) and isinstance(content, nn.Module):
        return content.to(**options).eval()
    if isinstance(content, dict):
        if {"config", "model_state_dict"} <= content.keys():
            return _sevennet(str(path))(options)
        if isinstance(content.get("model"), dict) and "model_args" in content["model"]:
            return _chgnet(str(path))(options)
    raise ValueError(
        f"{path} holds a {type(content).__name__}, not a model: expected what export_model wrote, a SevenNet or CHGNet "
        "checkpoint, or a MACE model"
    )
