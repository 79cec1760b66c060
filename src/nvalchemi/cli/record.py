"""What a run was told to do, kept in its state: the same command goes on with it, another one is refused."""

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from nvalchemi.cli.errors import InputError
from nvalchemi.dynamics.restart import RestartError, RestartFile
from nvalchemi.hooks import HookContext

if TYPE_CHECKING:
    from nvalchemi.cli.structures import Structure
    from nvalchemi.data import Batch
    from nvalchemi.models.base import BaseModelMixin

_SHOWN = 3


class RunRecord:
    """Command, model, options and structures of a run; a hook, so that the engine saves it.

    Parameters
    ----------
    command : str
        ``"relax"`` or ``"md"``.
    model : tuple of str and BaseModelMixin
        The model and how it was named.
    options : mapping
        Options that decide what the run does, by name. Those that may change from one start to the next are not
        among them: number of steps, files, how often something is written, device.
    structures, batch
        Where the structures came from, and themselves before the first step.
    """

    frequency = 1
    stage: Enum | None = None

    def __init__(
        self,
        command: str,
        model: "tuple[str, BaseModelMixin]",
        options: Mapping[str, Any],
        structures: "Sequence[Structure]",
        batch: "Batch",
    ) -> None:
        name, potential = model
        self._content: dict[str, Any] = {
            "command": command,
            "model": name,
            "weights": _weights(potential),
            "options": dict(options),
            "structures": [
                [structure.label, digest]
                for structure, digest in zip(structures, _structure_digests(batch), strict=True)
            ],
        }

    def _runs_on_stage(self, stage: Any) -> bool:
        return False

    def __call__(self, ctx: HookContext, stage: Any) -> None:
        """Nothing: it is there to be saved."""

    def state_dict(self) -> dict[str, Any]:
        """What was told."""
        return self._content

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing: :meth:`check` has compared."""

    def check(self, restart: Path | None) -> None:
        """Compare with the state that is to be gone on from, if there is one.

        Raises
        ------
        InputError
            It is that of another run, or damaged.

        Warns
        -----
        UserWarning
            It says nothing of the run, as those of earlier versions.
        """
        if restart is None:
            return
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the engine reads it again, and warns
                state = RestartFile(restart, 1).read()
        except RestartError as error:
            raise InputError(str(error)) from error
        if state is None:
            return
        saved = recorded(state["engine"])
        if saved is None:
            warnings.warn(
                f"{restart} does not say with which options and structures its run began: they are not compared",
                UserWarning,
                stacklevel=2,
            )
            return
        differences = list(_differences(saved, self._content))
        if differences:
            raise InputError(
                f"{restart} is the state of another run: {'; '.join(differences)}. To go on, give what it had; for "
                "another run name another --restart file, and begin from the output of this one if you like"
            )


def recorded(engine: Mapping[str, Any]) -> dict[str, Any] | None:
    """The record in the state of an engine."""
    return next((state for name, state in engine["hooks"] if name == RunRecord.__name__), None)


def _differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> "list[str]":
    if then["command"] != now["command"]:
        return [f"`nvalchemi {then['command']}`, not {now['command']}"]
    found: list[str] = []
    named = not (Path(then["model"]).exists() or Path(now["model"]).exists())
    if then["weights"] != now["weights"] or (named and then["model"] != now["model"]):
        same = then["model"] == now["model"]
        found.append(
            f"--model {now['model']} ({'with other weights then' if same else 'was ' + then['model']})"
        )
    for name in {**then["options"], **now["options"]}:
        before, after = then["options"].get(name), now["options"].get(name)
        if before != after:
            found.append(_option(name, before, after))
    a, b = then["structures"], now["structures"]
    if len(a) != len(b):
        found.append(f"other structures: {len(b)} now, {len(a)} then")
    else:
        others = [
            new if new != old else f"{new} with other atoms, positions or cell"
            for (old, before), (new, after) in zip(a, b, strict=True)
            if before != after
        ]
        was = [
            old for (old, before), (new, after) in zip(a, b, strict=True) if before != after and new != old
        ]
        if others:
            found.append(f"other structures: {_some(others)}" + (f" (was {_some(was)})" if was else ""))
    return found


def _option(name: str, before: Any, after: Any) -> str:
    option = "--" + name.replace("_", "-")
    if isinstance(before, bool) or isinstance(after, bool):
        return f"{option} was {'given' if before else 'not given'}"
    return f"{option} {after} (was {before})"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


# ---------------------------------------------------------------------- digests
def _weights(model: "BaseModelMixin") -> str:
    digest = hashlib.sha256(type(model).__name__.encode())
    for name, value in sorted(model.state_dict().items()) if isinstance(model, nn.Module) else ():
        if isinstance(value, Tensor):
            _add(digest, name, value)
    return digest.hexdigest()


def _structure_digests(batch: "Batch") -> list[str]:
    digests: list[str] = []
    for data in batch.cpu().to_data_list():
        digest = hashlib.sha256()
        for name in sorted(data.keys()):
            _add(digest, name, data[name])
        digests.append(digest.hexdigest())
    return digests


def _add(digest: Any, name: str, tensor: Tensor) -> None:
    digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
    digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
