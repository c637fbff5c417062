"""Files that ffcv has written, and what it says is in them: crates/data/tests/fixtures."""

import gzip
import json
from pathlib import Path

import baton

FIXTURES = Path(__file__).resolve().parents[2] / "crates/data/tests/fixtures"


def written_by_ffcv(folder, name):
    """A dataset, and the samples of its manifest."""
    path = folder / f"{name}.beton"
    path.write_bytes(gzip.decompress((FIXTURES / f"{name}.beton.gz").read_bytes()))
    manifest = json.loads(gzip.decompress((FIXTURES / f"{name}.manifest.json.gz").read_bytes()))
    return baton.BetonDataset(path), manifest["samples"]


def value_of(dataset, number, field):
    """The value of one field."""
    return baton.BetonDataset(dataset.path, [field])[number][0]
