"""What a training configuration may say."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, PositiveFloat, PositiveInt, Tag, field_validator

from nvalchemi.cli.yaml_file import Section


def _checked_share(value: float | Path | None) -> float | Path | None:
    if isinstance(value, float) and not 0 < value < 1:
        raise ValueError(f"a share must lie between 0 and 1, got {value:g}")
    return value


_Part = Annotated[float | Path, AfterValidator(_checked_share)]
_Weight = Annotated[float, Field(ge=0.0)]


class DataConfig(Section):
    """Structures with labels."""

    train: Path
    """File with the structures; validation and test structures are drawn from it, where they are shares."""
    validation: _Part = 0.1
    """Share of the structures, or a file."""
    test: _Part | None = None
    """Likewise; the errors on these are only looked at when the training is over."""
    split: str = "random"
    """How shares are drawn: random, in blocks of successive frames, or together where they agree in this info key."""
    energy_key: str = "energy"
    forces_key: str = "forces"
    stress_key: str = "stress"


class PaiNNConfig(Section):
    """A new model."""

    name: Literal["painn"]
    hidden_dim: PositiveInt = 64
    num_layers: PositiveInt = 3
    num_radial: PositiveInt = 20
    cutoff: PositiveFloat = 5.0


class TrainedConfig(Section):
    """A trained model, to be trained on: a name of ``nvalchemi models``, or a file."""

    name: str
    freeze: tuple[str, ...] = ()
    """Parameters that stay as they are; ``*`` and ``?`` are wildcards."""
    fit_offsets: bool = False
    """Subtract from the energies of the data those of the elements by which they differ from the model's."""


def _kind_of_model(value: Any) -> str:
    name = value.get("name") if isinstance(value, Mapping) else getattr(value, "name", None)
    return "painn" if name == "painn" or name is None else "trained"


class LossConfig(Section):
    """Weights of the errors in the loss; 0 leaves one out."""

    energy: _Weight = 1.0
    """Of the energy per atom."""
    forces: _Weight = 1.0
    stress: _Weight = 0.0
    kind: Literal["mae", "huber", "mse"] = "mae"
    """What is minimised."""


class TrainingConfig(Section):
    """How to train."""

    epochs: PositiveInt = 100
    batch_size: PositiveInt = 8
    learning_rate: PositiveFloat = 3e-3
    schedule: Literal["cosine", "plateau", "constant"] = "cosine"
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    gradient_clip: PositiveFloat | None = 10.0
    average: bool = True
    """Evaluate and keep averaged weights."""
    precision: Literal["float32", "float64", "bfloat16", "float16"] = "float32"
    """Of the network; with float16 and bfloat16 weights stay in float32 (mixed precision)."""
    validate_every: PositiveInt = 1
    """Epochs."""
    patience: PositiveInt | None = None
    """Validations without progress after which training ends."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    num_workers: Annotated[int, Field(ge=0)] = 0


class OutputConfig(Section):
    """What is written, and where."""

    directory: Path
    checkpoint_every: PositiveInt = 1
    """Epochs."""
    keep_checkpoints: PositiveInt = 2


class TrainConfig(Section):
    """A training configuration."""

    data: DataConfig
    model: Annotated[
        Annotated[PaiNNConfig, Tag("painn")] | Annotated[TrainedConfig, Tag("trained")],
        Discriminator(_kind_of_model),
    ]
    loss: LossConfig = LossConfig()
    training: TrainingConfig = TrainingConfig()
    output: OutputConfig

    @field_validator("loss")
    @classmethod
    def _something_to_learn(cls, loss: LossConfig) -> LossConfig:
        if not (loss.energy or loss.forces or loss.stress):
            raise ValueError("all weights are 0: there is nothing to learn")
        return loss

    def relative_to(self, old: Path, new: Path) -> "TrainConfig":
        """The same with paths that count from the folder ``new`` where they counted from ``old``."""

        def moved(path: Path) -> Path:
            return Path(os.path.relpath(old.resolve() / path, new.resolve()))

        data = {
            name: moved(value) if isinstance(value, Path) else value
            for name, value in vars(self.data).items()
        }
        model = self.model
        if isinstance(model, TrainedConfig) and (old / model.name).is_file():
            model = model.model_copy(update={"name": str(moved(Path(model.name)))})
        return self.model_copy(
            update={
                "data": self.data.model_copy(update=data),
                "model": model,
                "output": self.output.model_copy(update={"directory": moved(self.output.directory)}),
            }
        )
