"""Change a model before its optimizers are built: freeze parameters, replace modules."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, model_validator
from torch import nn

from nvalchemi.hooks import TrainContext
from nvalchemi.training._stages import TrainingStage
from nvalchemi.training.building import matching


class TrainableParameterHook(BaseModel):
    """Choose which parameters are trained.

    Parameters
    ----------
    freeze_patterns : tuple of str, default ()
        Names of parameters to leave as they are; ``*`` and ``?`` are wildcards.
    trainable_patterns : tuple of str, default ()
        Names of parameters to train nevertheless. Without ``freeze_patterns``, all others are frozen.
    model_key : str, default "main"
        Which model.

    Raises
    ------
    ValueError
        A pattern matches no parameter.

    Notes
    -----
    Frozen parameters are not given to an optimizer, so that weight decay does not touch them either.

    Examples
    --------
    >>> TrainableParameterHook(freeze_patterns=("embedding*",)).freeze_patterns
    ('embedding*',)
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())
    frequency: ClassVar[int] = 1
    stage: ClassVar[TrainingStage] = TrainingStage.SETUP

    freeze_patterns: tuple[str, ...] = ()
    trainable_patterns: tuple[str, ...] = ()
    model_key: str = "main"

    def __init__(
        self, freeze_patterns: Sequence[str] = (), trainable_patterns: Sequence[str] = (), **options: Any
    ) -> None:
        super().__init__(freeze_patterns=freeze_patterns, trainable_patterns=trainable_patterns, **options)

    @model_validator(mode="after")
    def _something_to_do(self) -> Self:
        if not self.freeze_patterns and not self.trainable_patterns:
            raise ValueError("give freeze_patterns, trainable_patterns or both")
        return self

    def __call__(self, ctx: TrainContext, stage: Any) -> None:
        """Freeze and release."""
        parameters = dict(_model(ctx, self.model_key).named_parameters())
        what = f"parameter of model {self.model_key!r}"
        frozen = matching(parameters, self.freeze_patterns or ("*",), what)
        trained = matching(parameters, self.trainable_patterns, what)
        for name, parameter in parameters.items():
            if name in trained or name in frozen:
                parameter.requires_grad_(name in trained)


class ModulePatchHook:
    """Replace modules of a model, for example its readout.

    Parameters
    ----------
    patches : dict of str to (nn.Module or callable)
        Path of the module in the model (``"readout.2"``) → the new module, or a function that is given the
        old one and returns the new one.
    model_key : str, default "main"
        Which model.

    Raises
    ------
    ValueError
        There is no module at a path; known ones are named.

    Examples
    --------
    >>> ModulePatchHook({"readout": lambda old: nn.Identity()}).model_key
    'main'
    """

    frequency = 1

    def __init__(
        self, patches: Mapping[str, nn.Module | Callable[[nn.Module], nn.Module]], model_key: str = "main"
    ) -> None:
        self.patches = dict(patches)
        self.model_key = model_key
        self.stage = TrainingStage.SETUP

    def __call__(self, ctx: TrainContext, stage: Any) -> None:
        """Put the new modules in place."""
        model = _model(ctx, self.model_key)
        modules = dict(model.named_modules())
        for path in self.patches:
            if not path or path not in modules:
                known = ", ".join(name for name in modules if name)
                raise ValueError(f"model {self.model_key!r} has no module {path!r}; it has {known}")
        for path, patch in self.patches.items():
            old = model.get_submodule(path)
            new = patch if isinstance(patch, nn.Module) else patch(old)
            device = next((p.device for p in model.parameters()), None)
            model.set_submodule(path, new.train(old.training).to(device))


def _model(ctx: TrainContext, key: str) -> nn.Module:
    models = ctx.workflow.model_dict
    if key not in models:
        raise ValueError(f"there is no model {key!r}; the models are {sorted(models)}")
    return models[key]
