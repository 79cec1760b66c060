"""Configuration files: YAML, checked by pydantic models, with errors that name file, line and key."""

import difflib
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from nvalchemi.cli.errors import InputError

_Model = TypeVar("_Model", bound=BaseModel)
_Key = tuple[Hashable, ...]
_ABSENT = object()


class Section(BaseModel):
    """Part of a configuration; keys that it does not know are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, values: Any) -> Any:
        if isinstance(values, dict):
            given: dict[Any, Any] = values
            unknown = [name for name in given if name not in cls.model_fields]
            if unknown:
                known = list(cls.model_fields)
                raise PydanticCustomError(
                    "unknown_key", "unknown key", {"unknown": unknown, "allowed": known}
                )
        return values

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_truth_values(cls, value: Any, field: ValidationInfo) -> Any:
        """Pydantic takes ``true`` for 1."""
        annotation = cls.model_fields[str(field.field_name)].annotation
        if isinstance(value, bool) and bool not in (annotation, *get_args(annotation)):
            raise ValueError(
                f"{str(value).lower()} does not fit here (YAML takes on, off, yes and no for it, too, unless quoted)"
            )
        return value


class _Loader(yaml.SafeLoader):
    """Values that YAML has a form of and Python has not, such as the 45th of a month, are errors with a line."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except ValueError as error:
            raise yaml.constructor.ConstructorError(None, None, str(error), node.start_mark) from error


class YamlFile:
    """A YAML file with the line of every key.

    Parameters
    ----------
    path : Path
        The file; its top level is a mapping.

    Raises
    ------
    InputError
        It cannot be read, is no YAML, has a key twice, or is no mapping.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.text = path.read_text(encoding="utf-8")
            root = yaml.compose(self.text, Loader=yaml.SafeLoader)
            self._lines: dict[_Key, int] = {(): 1}
            if root is not None:
                self._note_lines(root, ())
            self.content: Any = yaml.load(self.text, Loader=_Loader)
        except OSError as error:
            raise InputError(f"{path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise InputError(f"{path}: not a text file ({error.reason})") from error
        except yaml.MarkedYAMLError as error:
            line = 0 if error.problem_mark is None else error.problem_mark.line + 1
            raise InputError(f"{path}:{line}: not valid YAML: {error.problem}") from error
        except yaml.YAMLError as error:
            raise InputError(f"{path}: not valid YAML: {error}") from error
        except RecursionError as error:
            raise InputError(f"{path}: nested too deeply") from error
        if self.content is None:
            raise InputError(f"{path}: the file is empty")
        if not isinstance(self.content, dict):
            raise InputError(f"{path}: expected `key: value` lines, found {type(self.content).__name__}")

    def _note_lines(self, node: yaml.Node, key: _Key, above: tuple[yaml.Node, ...] = ()) -> None:
        if node in above:
            raise InputError(f"{self.path}:{self._lines[key]}: {_dotted(key)} contains itself")
        above = (*above, node)
        if isinstance(node, yaml.MappingNode):
            for name, value in node.value:
                line = name.start_mark.line + 1
                if not isinstance(name, yaml.ScalarNode):
                    raise InputError(f"{self.path}:{line}: a key must be a word")
                inner = (*key, name.value)
                if inner in self._lines:
                    raise InputError(
                        f"{self.path}:{line}: {_dotted(inner)} is given twice, first in line {self._lines[inner]}"
                    )
                self._lines[inner] = line
                self._note_lines(value, inner, above)
        elif isinstance(node, yaml.SequenceNode):
            for index, value in enumerate(node.value):
                self._lines[(*key, index)] = value.start_mark.line + 1
                self._note_lines(value, (*key, index), above)

    def error(self, key: Sequence[Hashable], message: str) -> InputError:
        """Error about a key, or about the nearest one above it that the file has."""
        known = tuple(key)
        while known not in self._lines:
            known = known[:-1]
        return InputError(f"{self.path}:{self._lines[known]}: {f'{_dotted(key)}: ' if key else ''}{message}")

    def validate(self, model: type[_Model]) -> _Model:
        """The content as an object of ``model``.

        Raises
        ------
        InputError
            One line for every value that is wrong and every key that is not known or missing.
        """
        try:
            return model.model_validate(self.content)
        except ValidationError as error:
            problems = [problem for details in error.errors() for problem in self._explain(details)]
        raise InputError("\nnvalchemi: ".join(problems))

    def _explain(self, details: ErrorDetails) -> Iterator[str]:
        key = tuple(self._without_tags(details["loc"], last_is_absent=details["type"] == "missing"))
        given, context = details["input"], details.get("ctx", {})
        match details["type"]:
            case "unknown_key":
                allowed = context["allowed"]
                for name in context["unknown"]:
                    message = f"no such key{_did_you_mean(name, allowed)}; there are {', '.join(allowed)}"
                    yield str(self.error((*key, name), message))
                return
            case "missing":
                message = "is missing"
            case "literal_error":
                allowed = [
                    part.strip("'") for part in str(context["expected"]).replace(" or ", ", ").split(", ")
                ]
                message = f"{given!r} is none of {', '.join(allowed)}{_did_you_mean(given, allowed)}"
            case "value_error":
                message = str(context["error"])
            case _:
                message = (
                    f"{details['msg'].removeprefix('Input ').replace('should be', 'must be')}, got {given!r}"
                )
        yield str(self.error(key, message))

    def _without_tags(self, location: Sequence[int | str], *, last_is_absent: bool) -> Iterator[int | str]:
        """Location of an error without the names of variants that pydantic puts between keys."""
        here: Any = self.content
        for part in location:
            inner: Any = None
            if isinstance(here, dict):
                inner = here.get(part, _ABSENT)  # pyright: ignore[reportUnknownMemberType]
            elif isinstance(here, list) and isinstance(part, int):
                inner = here[part]
            if inner is not _ABSENT:
                here = inner
                yield part
        if last_is_absent:
            yield location[-1]


def _dotted(key: Sequence[Hashable]) -> str:
    return ".".join(map(str, key))


def _did_you_mean(given: object, allowed: Sequence[str]) -> str:
    close = difflib.get_close_matches(str(given), allowed, n=1)
    return f", did you mean {close[0]!r}?" if close else ""
