"""From a training configuration to a strategy, and back to the model that a training has left."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from ase.data import chemical_symbols

from nvalchemi.cli.errors import InputError
from nvalchemi.cli.evaluation import ATOMS_PER_BATCH, QUANTITIES, Quantity, evaluate
from nvalchemi.cli.labelled_data import LABELS, LabelledData, read_labelled
from nvalchemi.cli.output import write_text
from nvalchemi.cli.train_config import PaiNNConfig, TrainConfig, TrainedConfig
from nvalchemi.cli.train_hooks import MODEL_FILES
from nvalchemi.cli.yaml_file import YamlFile
from nvalchemi.data.datasets import InMemoryDataset, StructureDataset, split
from nvalchemi.data.loader import DataLoader
from nvalchemi.models.base import BaseModelMixin
from nvalchemi.models.painn import PaiNN
from nvalchemi.models.reference_energies import composition
from nvalchemi.training import (
    ComposedLoss,
    EMAHook,
    EnergyHuberLoss,
    EnergyMAELoss,
    EnergyMSELoss,
    FineTuningStrategy,
    ForceHuberLoss,
    ForceL2NormLoss,
    ForceMSELoss,
    GradientClipHook,
    MixedPrecisionHook,
    OptimizerConfig,
    StressHuberLoss,
    StressMSELoss,
    TrainingStrategy,
    TrainingUpdateHook,
    ValidationConfig,
)
from nvalchemi.training.archive import read_newest
from nvalchemi.training.losses.base import LossTerm

CONFIG, CHECKPOINTS, LOG, DATA = "config.yaml", "checkpoints", "log.csv", "training_data.json"
PARTS = ("train", "validation", "test")
CONFIG_HEAD = "# As `nvalchemi train` used it."
NUM_BLOCKS = 30
_HUBER = 0.01
"""eV per atom, eV/Å: the order of the errors that a good potential has."""
_HUBER_STRESS = 0.001
"""eV/Å³; 0.16 GPa."""
_STEPS_OF_A_CYCLE = 10
"""With fewer steps a learning rate cannot go up and down."""
_STRANGE_OFFSET = 0.5
"""eV per atom; more than any two functionals differ by in the energy of a formation."""


@dataclass(frozen=True)
class TrainingSetup:
    """A configuration with its file, and where its paths count from."""

    file: YamlFile
    config: TrainConfig

    @classmethod
    def read(cls, path: Path) -> "TrainingSetup":
        """Read a configuration; :class:`InputError` says in which line what is wrong."""
        file = YamlFile(path)
        return cls(file, file.validate(TrainConfig))

    @property
    def folder(self) -> Path:
        """The folder that paths count from: that of the configuration."""
        return self.file.path.parent

    @property
    def directory(self) -> Path:
        """Where the training writes."""
        return self.folder / self.config.output.directory

    def save(self, data: Mapping[str, LabelledData]) -> None:
        """Write the configuration, all defaults included, and what tells the data into the training's directory."""
        moved = self.config.relative_to(self.folder, self.directory)
        text = yaml.safe_dump(moved.model_dump(mode="json"), sort_keys=False)
        path = self.directory / CONFIG
        if path.resolve() != self.file.path.resolve():
            write_text(path, f"{CONFIG_HEAD}\n{text}")
        write_text(self.directory / DATA, json.dumps(self._fingerprints(data), indent=2) + "\n")

    def _fingerprints(self, data: Mapping[str, LabelledData]) -> dict[str, dict[str, Any]]:
        return {name: each.fingerprint(self.config.data.split) for name, each in data.items()}

    def check_same_data(self, data: Mapping[str, LabelledData]) -> None:
        """:class:`InputError` when they are not those that the training in the directory was begun with.

        Its parts would be others: structures that were trained on would count as not seen.
        """
        path = self.directory / DATA
        if not path.is_file():  # stopped before it was written
            return
        begun = json.loads(path.read_text(encoding="utf-8"))
        for name, now in self._fingerprints(data).items():
            before = begun.get(name, now)
            if before != now:
                frames = before["frames"], now["frames"]
                how = (
                    f"it has {frames[1]} structures and had {frames[0]}"
                    if frames[0] != frames[1]
                    else "other structures or labels are in it"
                )
                raise self.file.error(
                    ("data", name),
                    f"{data[name].source} was changed since the training began ({how}), so that structures which were "
                    "trained on could count as left aside",
                )

    def check_unchanged(self) -> None:
        """:class:`InputError` when the training in the directory was begun with another configuration."""
        begun = TrainingSetup.read(self.directory / CONFIG).config
        mine = self.config.relative_to(self.folder, self.directory)
        for section in ("data", "model", "loss", "training"):
            before, now = getattr(begun, section).model_dump(), getattr(mine, section).model_dump()
            for name in now:
                if before.get(name) != now[name]:
                    raise self.file.error(
                        (section, name),
                        f"this training was begun with {before.get(name)} and now says {now[name]}; --resume goes on "
                        "with what was begun, --overwrite begins anew",
                    )

    # ------------------------------------------------------------------ parts
    @property
    def fine_tunes(self) -> bool:
        """Whether the model is a trained one."""
        return isinstance(self.config.model, TrainedConfig)

    @property
    def labels(self) -> list[str]:
        """Labels that are trained on."""
        return [label for label in LABELS if getattr(self.config.loss, label) > 0]

    @property
    def quantities(self) -> list[Quantity]:
        """What the errors are said of while training goes on."""
        names = {"energy": "energy_per_atom"}
        trained = {names.get(label, label) for label in self.labels}
        return [quantity for quantity in QUANTITIES if quantity.metric in trained]

    def make_parts(
        self, model: BaseModelMixin, data: Mapping[str, LabelledData], device: torch.device
    ) -> dict[str, StructureDataset]:
        """Structures by part: ``train``, ``validation`` and, where asked for, ``test``.

        A new model takes its reference energies from the training structures.
        """
        parts = self._split(data)
        self._check_labels(parts)
        try:
            if isinstance(model, PaiNN) and not self.fine_tunes and "energy" in self.labels:
                model.fit_reference_energies(parts["train"])
            self._check_elements(model, parts)
            if self.fine_tunes and "energy" in self.labels:
                parts = self._on_the_scale_of(model, parts, device)
        except ValueError as error:
            raise InputError(f"{self.config.data.train}: {error}") from error
        return parts

    def _on_the_scale_of(
        self, model: BaseModelMixin, parts: dict[str, StructureDataset], device: torch.device
    ) -> dict[str, StructureDataset]:
        """Structures whose energies have the zero of the model's."""
        assert isinstance(self.config.model, TrainedConfig)
        if self.config.model.fit_offsets:
            return subtract_offsets(model, parts, device)
        sample = parts["train"].select(range(0, len(parts["train"]), len(parts["train"]) // 32 + 1))
        error = evaluate(model, sample, device).metrics["energy_per_atom_mae"]
        if error > _STRANGE_OFFSET:
            raise self.file.error(
                ("model", "name"),
                f"its energies and those of the data differ by {error:.2f} eV per atom, as by another zero of energy; "
                "`fit_offsets: true` in this section subtracts the difference, element by element, from the data",
            )
        return parts

    def make_model(self, device: torch.device) -> BaseModelMixin:
        """The model as it is before the training."""
        model: Any = self._make_model(device)
        return model.double() if self.config.training.precision == "float64" else model

    def _make_model(self, device: torch.device) -> BaseModelMixin:
        config = self.config.model
        torch.manual_seed(self.config.training.seed)
        if isinstance(config, PaiNNConfig):
            return PaiNN(**config.model_dump(exclude={"name"})).to(device)
        from nvalchemi.models.catalog import load_model

        path = self.folder / config.name
        if Path(config.name).suffix in (".safetensors", ".pth", ".pt") and not path.is_file():
            raise self.file.error(
                ("model", "name"),
                f"no such file: {path} (paths count from {self.folder}; was the folder moved?)",
            )
        try:
            return load_model(path if path.is_file() else config.name, device=device)
        except (ValueError, ImportError) as error:
            raise self.file.error(("model", "name"), str(error)) from error

    def read_data(self, model: BaseModelMixin) -> dict[str, LabelledData]:
        """Structures by the key that names their file: ``train``, and ``validation`` and ``test`` unless shares."""
        files = {name: getattr(self.config.data, name) for name in PARTS}
        return {name: self._read(name, path, model) for name, path in files.items() if isinstance(path, Path)}

    def _read(self, name: str, path: Path, model: BaseModelMixin) -> LabelledData:
        keys = {label: getattr(self.config.data, f"{label}_key") for label in LABELS}
        try:
            data = read_labelled(self.folder / path, model, keys)
            data.require(self.labels, keys)
        except InputError as error:
            raise self.file.error(("data", name), str(error)) from error
        if "stress" in self.labels and not all(bool(each.pbc.all()) for each in data.dataset):
            raise self.file.error(
                ("loss", "stress"),
                f"some structures of {path} have no cell periodic in three directions, and so no stress: set 0",
            )
        return data

    def _check_labels(self, parts: Mapping[str, StructureDataset]) -> None:
        """:class:`InputError` when none of the structures drawn for a part has a label that the loss weighs."""
        for name, part in parts.items():
            for label in self.labels:
                if not any(label in data and bool(data[label].isfinite().any()) for data in part):
                    raise self.file.error(
                        ("data", name),
                        f"none of the {len(part)} structures of the {name} part, of {self._file_of(name)}, "
                        f"has {label}; label more of them, leave out those without, or set loss.{label} to 0",
                    )

    def _check_elements(self, model: BaseModelMixin, parts: Mapping[str, StructureDataset]) -> None:
        """:class:`InputError` when a part has an element that the model does not know."""
        module: Any = model
        buffers: dict[str, torch.Tensor] = dict(module.named_buffers())
        tables = [table for name, table in buffers.items() if name.rpartition(".")[2] == "known_elements"]
        known = set(range(119)).intersection(*(table.nonzero()[:, 0].tolist() for table in tables))
        way_out = (
            f"{self.config.model.name} was not made for it: leave such structures out, or take another model"
            if self.fine_tunes
            else "no training structure with an energy has it: put some with it there, or leave this one out"
        )
        for name, part in parts.items():
            for data in part:
                unknown = set(data.atomic_numbers.tolist()) - known
                if unknown:
                    raise self.file.error(
                        ("data", name),
                        f"{self._file_of(name)}, frame {int(data.system_id)}, in the {name} part, has "
                        f"{chemical_symbols[min(unknown)]}; {way_out}",
                    )

    def _file_of(self, part: str) -> Path:
        path = getattr(self.config.data, part)
        return path if isinstance(path, Path) else self.config.data.train

    def _split(self, data: Mapping[str, LabelledData]) -> dict[str, StructureDataset]:
        files = {name: each.dataset for name, each in data.items()}
        config, dataset = self.config.data, files["train"]
        shares = {name: share for name in PARTS if isinstance(share := getattr(config, name), float)}
        if not shares:
            return files
        if sum(shares.values()) >= 1:
            raise self.file.error(
                ("data",), f"validation and test take {sum(shares.values()):g} of all structures"
            )
        how = config.split
        by: object = None if how == "random" else how
        if how == "blocks":
            by = [k * NUM_BLOCKS // len(dataset) for k in range(len(dataset))]
        try:
            fractions = {"train": 1 - sum(shares.values()), **shares}
            parts = split(dataset, fractions, by=by, seed=self.config.training.seed)  # pyright: ignore[reportArgumentType]
        except ValueError as error:
            raise self.file.error(("data", "split"), f"{error}; or random, or blocks") from error
        for name, part in parts.items():
            if len(part) == 0:
                raise self.file.error(
                    ("data", name), f"no structure of {len(dataset)} falls to the {name} part"
                )
        drawn = {**files, **parts}
        return {name: drawn[name] for name in PARTS if name in drawn}

    def loss(self) -> ComposedLoss:
        """Loss function: errors of energies per atom, forces, stresses with their weights."""
        config = self.config.loss
        known: dict[str, Any] = {"ignore_nonfinite": True}
        kinds: dict[str, tuple[LossTerm, LossTerm, LossTerm]] = {
            "mae": (
                EnergyMAELoss(per_atom=True, **known),
                ForceL2NormLoss(**known),
                # Linear beyond a delta that is small against the errors aimed at.
                StressHuberLoss(delta=1e-4, **known) * 1e4,
            ),
            "huber": (
                EnergyHuberLoss(per_atom=True, delta=_HUBER, **known),
                ForceHuberLoss(delta=_HUBER, **known),
                StressHuberLoss(delta=_HUBER_STRESS, **known),
            ),
            "mse": (EnergyMSELoss(per_atom=True, **known), ForceMSELoss(**known), StressMSELoss(**known)),
        }
        weights = (config.energy, config.forces, config.stress)
        return ComposedLoss(
            terms=tuple(w * term for w, term in zip(weights, kinds[config.kind], strict=True) if w > 0)
        )

    def loaders(self, parts: Mapping[str, StructureDataset]) -> tuple[DataLoader, DataLoader]:
        """Batches to train and to validate on."""
        config, train = self.config.training, parts["train"]
        batches = DataLoader(
            train,
            config.batch_size,
            shuffle=True,
            seed=config.seed,
            drop_last=len(train) >= config.batch_size,
            num_workers=config.num_workers,
        )
        return batches, DataLoader(parts["validation"], max_atoms=ATOMS_PER_BATCH)

    def make_strategy(
        self, model: BaseModelMixin, batches: DataLoader, validation: DataLoader, device: torch.device
    ) -> TrainingStrategy:
        """The strategy, with the hooks that change what is trained; those that watch are the caller's."""
        config = self.config.training
        num_steps = config.epochs * len(batches)
        updates: list[TrainingUpdateHook] = []
        if config.precision in ("bfloat16", "float16"):
            updates.append(MixedPrecisionHook(config.precision))
        if config.gradient_clip is not None:
            updates.append(GradientClipHook(config.gradient_clip))
        if config.average:
            # Over the last 1000 steps, or the last tenth of a short training, and not over the random first weights.
            decay = max(0.0, min(0.999, 1 - 10 / num_steps))
            updates.append(EMAHook(decay=decay, start_step=min(1000, num_steps // 10)))
        freeze = self.config.model.freeze if isinstance(self.config.model, TrainedConfig) else ()
        if "stress" in self.labels:
            model.set_config("active_outputs", frozenset({"energy", "forces", "stress"}))
        try:
            return FineTuningStrategy(
                model,
                self._optimizer(num_steps),
                self.loss(),
                num_epochs=config.epochs,
                freeze_patterns=freeze,
                hooks=updates,
                devices=device,
                validation_config=ValidationConfig(validation, every_n_epochs=config.validate_every),
            )
        except ValueError as error:
            raise InputError(f"{self.file.path}: {error}") from error

    def _optimizer(self, num_steps: int) -> OptimizerConfig:
        config = self.config.training
        schedules: dict[str, tuple[type[Any] | None, dict[str, Any]]] = {
            # Up over the first twentieth, then down along a cosine to a hundredth of the largest.
            "cosine": (
                torch.optim.lr_scheduler.OneCycleLR,
                {
                    "max_lr": config.learning_rate,
                    "total_steps": num_steps,
                    "pct_start": max(0.05, 2 / num_steps),  # two steps at least
                    "final_div_factor": 4.0,
                    "cycle_momentum": False,
                },
            ),
            "plateau": (torch.optim.lr_scheduler.ReduceLROnPlateau, {"factor": 0.5, "patience": 5}),
            "constant": (None, {}),
        }
        few = num_steps < _STEPS_OF_A_CYCLE
        scheduler, arguments = schedules[
            "constant" if few and config.schedule == "cosine" else config.schedule
        ]
        optimizer = {"lr": config.learning_rate, "weight_decay": config.weight_decay}
        return OptimizerConfig(torch.optim.AdamW, optimizer, scheduler, arguments)


def subtract_offsets(
    model: BaseModelMixin, parts: Mapping[str, StructureDataset], device: torch.device
) -> dict[str, StructureDataset]:
    """Structures with their energies on the scale of the model (see :func:`~nvalchemi.cli.evaluation.evaluate`)."""
    offsets = evaluate(model, parts["train"], device, fit_offsets=True).offsets
    table = torch.zeros(119, dtype=torch.float64)
    for number, energy in offsets.items():
        table[number] = energy
    moved: dict[str, StructureDataset] = {}
    for name, part in parts.items():
        structures = list(part)
        for data in structures:
            data.energy.sub_(composition(data).double()[0] @ table)
        moved[name] = InMemoryDataset(structures)
    return moved


# ---------------------------------------------------------------------- what a training has left
def trained_model(path: Path, device: torch.device) -> BaseModelMixin:
    """Model of a training's directory (that of the best validation), or of one of its checkpoints.

    Raises
    ------
    ValueError
        There is none.
    """
    from nvalchemi.models.catalog import load_model

    for name in MODEL_FILES:
        if (path / name).is_file():
            return load_model(path / name, device=device)
    folder = next(
        (folder for folder in (path, path.parent, path.parent.parent) if (folder / CONFIG).is_file()), None
    )
    if folder is None:
        raise ValueError(
            f"the directory has no {' or '.join(MODEL_FILES)}, and is no checkpoint of `nvalchemi train`"
        )
    try:
        _, snapshot = read_newest(path / CHECKPOINTS if path == folder else path)
    except OSError as error:
        raise ValueError(str(error)) from error
    model: Any = TrainingSetup.read(folder / CONFIG).make_model(device)
    average: Any = snapshot.tree()["hooks"].get("EMAHook.0", {"weights": None})
    model.load_state_dict(snapshot.weights["main"] if average["weights"] is None else average["weights"])
    return model.eval()


def left_aside(path: Path, device: torch.device) -> tuple[str, StructureDataset]:
    """Structures that a training's directory says were not trained on: those of the test, else of the validation.

    Raises
    ------
    ValueError
        It is no directory of a training.
    """
    if not (path / CONFIG).is_file():
        raise ValueError(f"not the directory of a training, which has a {CONFIG}")
    setup = TrainingSetup.read(path / CONFIG)
    for name in PARTS:
        file = getattr(setup.config.data, name)
        if isinstance(file, Path) and not (path / file).exists():
            raise ValueError(
                f"data.{name} of its {CONFIG} is not there: {path / file} (paths count from the folder of the training "
                "as it lay when it was made)"
            )
    model = setup.make_model(device)
    data = setup.read_data(model)
    setup.check_same_data(data)
    parts = setup.make_parts(model, data, device)
    name = "test" if "test" in parts else "validation"
    return f"the {name} part", parts[name]
