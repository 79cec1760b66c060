"""The directory of a training: what may be there before it, and what a new training removes."""

import shutil
from collections.abc import Mapping
from pathlib import Path

from nvalchemi.cli.errors import InputError
from nvalchemi.cli.labelled_data import LabelledData
from nvalchemi.cli.output import why_not_writable
from nvalchemi.cli.train_config import TrainedConfig
from nvalchemi.cli.train_hooks import LOG_HEAD, MODEL_FILES
from nvalchemi.cli.train_setup import CHECKPOINTS, CONFIG, CONFIG_HEAD, DATA, LOG, PARTS, TrainingSetup
from nvalchemi.training.archive import newest_first

_DIRECTORY = ("output", "directory")
_WRITTEN = (CONFIG, DATA, LOG, CHECKPOINTS, *MODEL_FILES)


def input_files(setup: TrainingSetup) -> dict[tuple[str, str], Path]:
    """Files that a training reads, by the key that names them."""
    files = {("data", name): getattr(setup.config.data, name) for name in PARTS}
    if isinstance(setup.config.model, TrainedConfig):
        files["model", "name"] = Path(setup.config.model.name)
    return {
        key: setup.folder / file
        for key, file in files.items()
        if isinstance(file, Path) and (setup.folder / file).exists()
    }


def check_directory(setup: TrainingSetup, *, resume: bool, overwrite: bool) -> bool:
    """Whether there is a checkpoint to go on from.

    Raises
    ------
    InputError
        The directory cannot be written to, holds a training and neither going on nor replacing was asked for, or has
        files that this training would replace and none has made.
    """
    directory = setup.directory
    existing = next(folder for folder in (directory, *directory.absolute().parents) if folder.exists())
    if not existing.is_dir():
        raise setup.file.error(_DIRECTORY, f"{existing} is a file")
    reason = why_not_writable(existing)
    if reason is not None:
        raise setup.file.error(_DIRECTORY, f"{existing} is not writable: {reason}")
    _check_nothing_foreign(setup)
    if not ((directory / CHECKPOINTS).exists() or (directory / LOG).exists()) or overwrite:
        return False
    if not resume:
        raise setup.file.error(
            _DIRECTORY, f"{directory} holds a training; --resume goes on with it, --overwrite removes it"
        )
    if not (directory / CONFIG).exists():
        raise InputError(f"{directory} has no {CONFIG}: it was not made by `nvalchemi train`")
    setup.check_unchanged()
    return bool(newest_first(directory / CHECKPOINTS))


def _check_nothing_foreign(setup: TrainingSetup) -> None:
    """Refuse to write over what this training reads, and over files that no training has made."""
    directory = setup.directory
    written = {(directory / name).resolve(): name for name in _WRITTEN}
    config = directory / CONFIG
    is_own = config.resolve() == setup.file.path.resolve()
    files: dict[tuple[str, ...], Path] = {**input_files(setup)}
    if not is_own:
        files[()] = setup.file.path
    for key, file in files.items():
        path = file.resolve()
        if path in written or (directory / CHECKPOINTS).resolve() in path.parents:
            raise setup.file.error(
                key,
                f"{file} would be overwritten: it lies in the output.directory of this training; choose another",
            )
    foreign: list[str] = []
    if config.exists() and not is_own and not _begins_with(config, CONFIG_HEAD):
        foreign.append(CONFIG)
    if not (_begins_with(config, CONFIG_HEAD) or _begins_with(directory / LOG, ",".join(LOG_HEAD))):
        foreign += [name for name in _WRITTEN if name != CONFIG and (directory / name).exists()]
    if foreign:
        raise setup.file.error(
            _DIRECTORY,
            f"{directory} has {', '.join(foreign)}, which no training has made and this one would overwrite; "
            "choose another directory",
        )


def _begins_with(file: Path, words: str) -> bool:
    if not file.is_file():
        return False
    with file.open("rb") as content:
        return content.read(len(words.encode())) == words.encode()


def prepare_directory(setup: TrainingSetup, data: Mapping[str, LabelledData], *, keep: bool) -> None:
    """Make the directory, without what an earlier training has left there unless that is to be kept."""
    directory = setup.directory
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not keep:
            shutil.rmtree(directory / CHECKPOINTS, ignore_errors=True)
            for name in (LOG, *MODEL_FILES):
                (directory / name).unlink(missing_ok=True)
        setup.save(data)
    except OSError as error:
        raise setup.file.error(_DIRECTORY, f"{directory} cannot be written to: {error.strerror}") from error
