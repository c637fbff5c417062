"""Fixtures for tests with PyTorch."""

import os
import sys
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def accepting(programs):
    """A program `baton` that accepts every file."""
    return programs("baton", """echo '{"digest": "0"}'""")


@pytest.fixture
def fake_worker(programs):
    """The double of `baton-worker`, on the path that is searched."""
    double = Path(__file__).with_name("fake_worker.py")
    return programs("baton-worker", f"exec '{sys.executable}' '{double}' \"$@\"")


@pytest.fixture
def real_programs():
    """Baton's programs, which `make parity` names."""
    if not os.environ.get("BATON_BIN"):
        pytest.skip("BATON_BIN does not name the folder of Baton's programs")
