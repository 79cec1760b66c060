"""The page itself: one file with style, script and data in it."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
<noscript><p class="noscript">{title}: {status}. Plots and tables need JavaScript, which is in here.</p></noscript>
<main id="report"></main>
<script type="application/json" id="data">{data}</script>
<script>
{script}</script>
</body>
</html>
"""


def render(content: Mapping[str, Any]) -> str:
    """The whole page.

    Parameters
    ----------
    content : mapping
        Plain values (:mod:`nvalchemi.hooks.reporting.content`); any string may hold anything.
    """
    here = files("nvalchemi.hooks.reporting")
    # JSON inside of a script element ends at the first "</"; NaN and infinity are no JSON.
    data = json.dumps(_finite(content), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return _PAGE.format(
        title=escape(content["title"]),
        status=escape(content["status"]["state"]),
        style=here.joinpath("page.css").read_text(encoding="utf-8"),
        script=here.joinpath("page.js").read_text(encoding="utf-8"),
        data=data.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"),
    )


def write_atomically(path: Path, text: str) -> None:
    """Write a file that is whole at any moment: under another name, then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.tmp")
    # A lone surrogate, as of a file name that is no UTF-8, must not end a run.
    unfinished.write_text(text, encoding="utf-8", errors="backslashreplace")
    os.replace(unfinished, path)


def _finite(value: Any) -> Any:
    """The same with ``None`` for NaN and infinity, and floats of seven digits."""
    match value:
        case float():
            return float(f"{value:.7g}") if math.isfinite(value) else None
        case Mapping():
            return {str(key): _finite(item) for key, item in value.items()}
        case Sequence() if not isinstance(value, str):
            return [_finite(item) for item in value]
        case _:
            return value
