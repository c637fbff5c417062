"""What the tests share."""

import sys
from pathlib import Path

import pytest


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Puts shell scripts in place of Baton's programs: `programs("baton", "echo …")` returns the path."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("BATON_BIN", str(folder))

    def program(name: str, script: str) -> Path:
        path = folder / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return path

    return program


@pytest.fixture
def no_programs(tmp_path, monkeypatch):
    """A machine without Baton's programs."""
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.delenv("BATON_BIN", raising=False)
    monkeypatch.setenv("PATH", str(empty))
    monkeypatch.setattr(sys, "executable", str(empty / "python"))
    return empty
