"""What a page carries for the run that may go on with it."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvalchemi.hooks.reporting.recording import Recording
from nvalchemi.hooks.reporting.snapshot import ScalarSnapshot
from nvalchemi.hooks.reporting.structures import StructureRecord

_FORMAT = 1
_MOST_RECORDS = 5000
"""Structures carried; of more, those that still run."""
_DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)


@dataclass(frozen=True)
class Earlier:
    """A run as its page has it.

    Attributes
    ----------
    elapsed : float
        Time it ran, s.
    records : list of StructureRecord
        Its structures.
    curves : mapping
        For :meth:`~nvalchemi.hooks.reporting.recording.Recording.recall`.
    """

    elapsed: float
    records: list[StructureRecord]
    curves: Mapping[str, Any]


def carried(
    engine: str, elapsed: float, recording: Recording, latest: ScalarSnapshot | None
) -> dict[str, Any]:
    """Plain values for :func:`read_earlier`."""
    records = [] if latest is None else list(latest.structures)
    if len(records) > _MOST_RECORDS:
        records = [record for record in records if record.status == "running"][:_MOST_RECORDS]
    return {
        "format": _FORMAT,
        "engine": engine,
        "elapsed_s": elapsed,
        "records": [_plain(record) for record in records],
        "curves": recording.to_plain(),
    }


def read_earlier(path: Path, engine: str) -> Earlier | None:
    """What the page at ``path`` carries of a run of the same kind of engine; ``None`` if there is no such page."""
    if not path.is_file():
        return None
    found = _DATA.search(path.read_text(encoding="utf-8", errors="replace"))
    if found is None:
        return None
    try:
        saved = json.loads(found[1]).get("carried")
    except json.JSONDecodeError:
        return None  # edited, or no page of ours
    if saved is None or saved["format"] != _FORMAT or saved["engine"] != engine:
        return None
    records = [_record(*values) for values in saved["records"]]
    return Earlier(saved["elapsed_s"], records, saved["curves"])


def _plain(record: StructureRecord) -> list[Any]:
    # As text: the numbers of a page have seven digits, too few for differences of energies.
    texts = [{name: repr(value) for name, value in when.items()} for when in (record.before, record.after)]
    return [
        record.system_id, record.name, record.formula, record.num_atoms, record.status, record.reason, record.steps,
        *texts, record.first_step,
    ]  # fmt: skip


def _record(*values: Any) -> StructureRecord:
    *same, before, after, first_step = values
    numbers = [{name: float(text) for name, text in when.items()} for when in (before, after)]
    return StructureRecord(*same, before=numbers[0], after=numbers[1], first_step=first_step)
