"""Small files that keep where a follower has come to."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any


def read_json(path: Path) -> dict[str, Any]:
    """An object; empty if there is no file. Raises ValueError with a remedy if it is damaged."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        value = json.loads(path.read_bytes())
        if isinstance(value, dict):
            return value
    if path.exists():
        raise ValueError(f"{path} is damaged: remove it, and everything is sent again")
    return {}


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Replaces the file at once."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False) as draft:
        try:
            json.dump(value, draft)
            draft.flush()
            os.replace(draft.name, path)
        except BaseException:
            os.unlink(draft.name)
            raise
