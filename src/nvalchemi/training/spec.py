"""Objects as plain data: dotted names of classes and functions, and the arguments they were made with."""

import importlib
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel


def name_of(thing: Any) -> str:
    """Dotted name of a class or function of a module.

    Raises
    ------
    ValueError
        The name does not lead back to it (a lambda, something defined inside a function).

    Examples
    --------
    >>> name_of(importlib.import_module)
    'importlib.import_module'
    """
    name = f"{thing.__module__}.{thing.__qualname__}"
    if "<" in name or thing.__module__ == "__main__":
        raise ValueError(f"{name} cannot be found again by its name: define it at the top level of a module")
    return name


def resolve(name: str) -> Any:
    """Class or function of a dotted name.

    Raises
    ------
    ValueError
        There is no such thing.
    """
    module_name, _, attribute = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"there is no {name!r} to import") from error


def describe(thing: BaseModel) -> dict[str, Any]:
    """Class and fields of a pydantic model."""
    return {"type": name_of(type(thing)), "fields": thing.model_dump(mode="json")}


def rebuild(spec: Mapping[str, Any]) -> Any:
    """Object that :func:`describe` described; only a pydantic model can be made so.

    >>> from nvalchemi.training.hooks import EMAHook
    >>> rebuild(describe(EMAHook(decay=0.9))).decay
    0.9
    """
    cls = resolve(spec["type"])
    if not (isinstance(cls, type) and issubclass(cls, BaseModel)):
        raise ValueError(f"{spec['type']} is no class that can be made from its fields")
    return cls.model_validate(spec["fields"])
