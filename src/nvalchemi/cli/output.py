"""Checks on what a command is going to write, made before anything is run."""

import os
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Literal

from nvalchemi.cli.errors import InputError, RunError
from nvalchemi.data.io import output_format


def check_outputs(
    outputs: Mapping[str, Path | None],
    inputs: list[Path],
    *,
    overwrite: bool,
    continued: Collection[str] = (),
) -> None:
    """Refuse outputs that cannot be written, would replace a file unasked, or are an input.

    Parameters
    ----------
    outputs : mapping of str to Path or None
        The files by the option that named them.
    inputs : list of Path
        Files that are read.
    overwrite : bool
        Whether files that exist may be replaced.
    continued : collection of str, optional
        Options whose files may exist because this run goes on with them.
    """
    named = {option: file for option, file in outputs.items() if file is not None}
    sources = {file.resolve() for file in inputs}
    seen: dict[Path, str] = {}
    for option, file in named.items():
        if file.is_dir() and not (file / "zarr.json").is_file():
            raise InputError(f"{option} {file} is a directory")
        if not file.parent.is_dir():
            raise InputError(f"{option} {file}: no such directory: {file.parent}")
        reason = why_not_writable(file.parent)
        if reason is not None:
            raise InputError(f"{option} {file}: directory {file.parent} is not writable: {reason}")
        if file.resolve() in sources:
            raise InputError(f"{option} {file} is an input file")
        if file.exists() and not overwrite and option not in continued:
            raise InputError(f"{option} {file} exists; --overwrite replaces it")
        if file.resolve() in seen:
            raise InputError(f"{option} and {seen[file.resolve()]} are the same file, {file}")
        seen[file.resolve()] = option


def continued_outputs(restart: Path | None) -> Collection[str]:
    """Options whose files belong to the run that is resumed: all of them when there is a state to go on from."""
    from nvalchemi.dynamics.restart import RestartFile

    if restart is None or not RestartFile(restart, 1).exists():
        return ()
    return ("--restart", "--log", "--traj", "--report", "--output")


def check_structure_file(option: str, file: Path, count: int) -> None:
    """:class:`InputError` unless the format that the file's name stands for can hold ``count`` structures."""
    from ase.io.formats import ioformats

    try:
        kind = output_format(file)
    except ValueError as error:
        raise InputError(f"{option} {error}") from error
    if kind != "zarr" and ioformats[kind].single and count != 1:
        raise InputError(
            f"{option} {file}: format {kind!r} holds one structure, not {count}; use .extxyz or .traj"
        )


def check_trajectory_file(file: Path | None) -> None:
    """:class:`InputError` unless the file is one that frames can be appended to while the run goes on."""
    if file is not None and file.suffix not in (".extxyz", ".xyz", ".zarr"):
        raise InputError(
            f"--traj {file}: trajectories are written as .extxyz or .zarr; `nvalchemi convert` makes others of them"
        )


def log_backend(file: Path) -> Literal["csv", "jsonl"]:
    """``"csv"`` or ``"jsonl"``, by the suffix."""
    match file.suffix:
        case ".csv":
            return "csv"
        case ".jsonl":
            return "jsonl"
    raise InputError(f"--log {file}: the suffix must be .csv or .jsonl")


def why_not_writable(directory: Path) -> str | None:
    """Why no file can be made there, or None. Tried, as permissions do not tell of every file system."""
    try:
        with tempfile.TemporaryFile(dir=directory):
            return None
    except OSError as error:
        return error.strerror


def write_text(file: Path, text: str) -> None:
    """Write a file whole or not at all; :class:`RunError` says why that failed."""
    unfinished = file.with_name(f".{file.name}.tmp")
    try:
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, file)
    except OSError as error:
        raise RunError(f"{file} could not be written: {error}") from error
