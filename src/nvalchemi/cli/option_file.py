"""Options of a command from a YAML file: ``nvalchemi relax --config relax.yaml``."""

import inspect
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_type_hints

from typer import Context
from typer.core import TyperCommand
from typer.models import ArgumentInfo, OptionInfo

_NOT_IN_FILES = frozenset({"config", "show_hooks"})


def command_with_config(function: Callable[..., None]) -> type[TyperCommand]:
    """Class of a command that takes options from the file of its option ``--config``, before those that are given."""

    class CommandWithConfig(TyperCommand):
        def parse_args(self, ctx: Context, args: list[str]) -> list[str]:  # pyright: ignore[reportIncompatibleMethodOverride]
            file = _config_of(args)
            return super().parse_args(
                ctx, args if file is None else [*_options_in(Path(file), function), *args]
            )

    return CommandWithConfig


def _config_of(args: Sequence[str]) -> str | None:
    for position, word in enumerate(args):
        if word.startswith("--config="):
            return word.removeprefix("--config=")
        if word == "--config" and position + 1 < len(args):
            return args[position + 1]
    return None


def _options_in(path: Path, function: Callable[..., None]) -> Iterator[str]:
    """Words of the command line that stand for the content of a file, whose paths count from its folder."""
    from pydantic import create_model

    from nvalchemi.cli.yaml_file import Section, YamlFile

    hints = {
        name: hint
        for name, hint in get_type_hints(function).items()
        if name not in _NOT_IN_FILES | {"return"}
    }
    fields: dict[str, Any] = {name: (hint | None, None) for name, hint in hints.items()}
    given = YamlFile(path).validate(create_model("Options", __base__=Section, **fields))
    for name in given.model_fields_set:
        value = getattr(given, name)
        values: list[Any] = value if isinstance(value, list) else [value]
        words = [str(path.parent / word) if isinstance(word, Path) else str(word) for word in values]
        if name == "model" and (path.parent / words[0]).exists():
            words = [str(path.parent / words[0])]
        option = "--" + name.replace("_", "-")
        if isinstance(value, list):
            yield from words
        elif value is True:
            yield option
        elif value is not None and value is not False:
            yield f"{option}={words[0]}"


def commented_options(function: Callable[..., None], **given: Any) -> str:
    """All options of a command as YAML, with their help as comments; those without a value as comments, too."""
    hints = get_type_hints(function, include_extras=True)
    blocks: list[str] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name in _NOT_IN_FILES:
            continue
        about = next(each for each in hints[name].__metadata__ if isinstance(each, ArgumentInfo | OptionInfo))
        value = given.get(name, parameter.default)
        absent = value is None or value is inspect.Parameter.empty
        words = str(about.help).partition("  [default")[0]
        comment = textwrap.fill(words, 118, initial_indent="# ", subsequent_indent="# ")
        blocks.append(f"{comment}\n{f'# {name}:' if absent else f'{name}: {in_yaml(value)}'}\n")
    return "\n".join(blocks)


def in_yaml(value: Any) -> str:
    """A value as YAML takes it, on one line."""
    import yaml

    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10**6)
    return text.removesuffix("\n").removesuffix("\n...")
