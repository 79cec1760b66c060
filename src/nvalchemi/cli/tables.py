"""Tables that commands print when they are done."""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Column:
    """Heading of a column and how its numbers are written."""

    heading: str
    format: str = ""
    """Format specification of a number; empty for text, which is set flush left."""


Cell = str | float | None


def print_table(columns: Sequence[Column], rows: Iterable[Sequence[Cell]]) -> None:
    """Print a table to standard output, leaving out columns without a single value.

    In a pipe it is plain text, aligned, one line per row.
    """
    cells = [list(row) for row in rows]
    kept = [k for k in range(len(columns)) if any(row[k] is not None for row in cells)]
    headings = [columns[k].heading for k in kept]
    right = [bool(columns[k].format) for k in kept]
    texts = [[_written(row[k], columns[k].format) for k in kept] for row in cells]
    if sys.stdout.isatty():
        _print_styled(headings, right, texts)
        return
    widths = [max(map(len, column)) for column in zip(headings, *texts, strict=True)]
    for line in (headings, *texts):
        aligned = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(line, widths, right, strict=True))
        print("  ".join(aligned).rstrip())


def _print_styled(headings: Sequence[str], right: Sequence[bool], texts: Iterable[Sequence[str]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading, numbers in zip(headings, right, strict=True):
        table.add_column(heading, justify="right" if numbers else "left")
    for row in texts:
        table.add_row(*map(Text, row))
    Console(highlight=False).print(table)


def _written(value: Cell, specification: str) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else format(value, specification)
