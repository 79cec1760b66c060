"""Small measured facts kept on disk between runs, which every run can do without."""

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

logger = logging.getLogger(__name__)


def cache_dir() -> Path:
    """``$NVALCHEMI_CACHE_DIR``, else ``$XDG_CACHE_HOME/nvalchemi``, else ``~/.cache/nvalchemi``; it need not exist."""
    own = os.environ.get("NVALCHEMI_CACHE_DIR")
    if own:
        return Path(own)
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path("~/.cache").expanduser()) / "nvalchemi"


def load(kind: str, key: Mapping[str, Any]) -> Any:
    """What was stored under a key, as JSON gives it back; ``None`` when there is nothing that can be read."""
    try:
        entry = json.loads(_path(kind, key).read_text())
        return entry["value"] if entry["key"] == key else None
    except FileNotFoundError:
        return None
    except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
        logger.debug("cache entry of %s not used: %s", kind, error)
        return None


def store(kind: str, key: Mapping[str, Any], value: Any) -> None:
    """Store a value under a key, whole or not at all; where nothing can be written, nothing happens."""
    try:
        path = _path(kind, key)
        path.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile("w", dir=path.parent, suffix=".new", delete=False) as file:
            new = Path(file.name)
        try:
            new.write_text(json.dumps({"key": key, "value": value}, indent=1))
            new.replace(path)
        finally:
            new.unlink(missing_ok=True)
    except (OSError, RuntimeError) as error:
        # RuntimeError: there is no home directory.
        logger.debug("cache entry of %s not written: %s", kind, error)


def _path(kind: str, key: Mapping[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return cache_dir() / kind / f"{digest[:32]}.json"
