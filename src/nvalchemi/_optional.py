"""Packages that come with an extra."""

import importlib
import importlib.util
from types import ModuleType


def import_extra(module: str, *, extra: str, needed_by: str) -> ModuleType:
    """Import a module of an optional dependency.

    Parameters
    ----------
    module : str
        Module to import.
    extra : str
        Extra of this package that installs it.
    needed_by : str
        What asks for it, for the message.

    Raises
    ------
    ImportError
        Saying what to install.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{needed_by} needs the package {module.split('.')[0]!r}: pip install 'nvalchemi[{extra}]'"
        ) from error


def is_installed(package: str) -> bool:
    """Whether a top-level package can be found, without importing it."""
    return importlib.util.find_spec(package) is not None
