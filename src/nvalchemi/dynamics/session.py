"""The state a model has to be in while an engine runs it."""

from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from nvalchemi.models.base import BaseModelMixin, evaluation_mode


class ModelSession:
    """Context in which a model is in evaluation mode, gives the outputs needed, and no autograd graph is recorded.

    Everything is as it was at the end, also after an error. Nested uses do nothing, at the cost of a counter.

    Parameters
    ----------
    model : BaseModelMixin
        The model.
    needs : frozenset of str
        Outputs that must be computed.
    """

    def __init__(self, model: BaseModelMixin, needs: frozenset[str]) -> None:
        self._model = model
        self._needs = needs
        self._depth = 0
        self._stack = ExitStack()

    def check(self) -> None:
        """``ValueError`` when the model cannot give what is needed."""
        available = self._model.model_config.available_outputs
        if not self._needs <= available:
            raise ValueError(
                f"{type(self._model).__name__} cannot give {sorted(self._needs - available)}; "
                f"it gives {sorted(available)}"
            )

    def __enter__(self) -> None:
        if self._depth == 0:
            self.check()
            with ExitStack() as stack:
                if isinstance(self._model, nn.Module):
                    stack.enter_context(evaluation_mode(self._model))
                self._switch_outputs_on(stack)
                stack.enter_context(torch.no_grad())
                self._stack = stack.pop_all()
        self._depth += 1

    def __exit__(self, *exc: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._stack.close()

    def _switch_outputs_on(self, stack: ExitStack) -> None:
        model, before = self._model, self._model.model_config.active_outputs
        # None stands for energy, forces and, where every cell is periodic, stress.
        given = frozenset({"energy", "forces"}) if before is None else before
        if not self._needs <= given:
            stack.callback(model.set_config, "active_outputs", before)
            model.set_config("active_outputs", given | self._needs)
