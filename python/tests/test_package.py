"""The package as a whole."""

import re
import subprocess
import sys
from pathlib import Path

import baton
from baton import _launch

ROOT = Path(__file__).resolve().parents[2]


def test_the_version_is_that_of_the_programs():
    manifest = (ROOT / "Cargo.toml").read_text()
    assert re.search(r'^version = "(.*)"', manifest, re.M)[1] == baton.__version__


def test_the_format_is_the_one_that_the_programs_read():
    reader = (ROOT / "crates/program/src/metadata.rs").read_text()
    (version,) = re.findall(r"const FORMAT_VERSION: u64 = (\d+);", reader)
    assert int(version) == baton._export._FORMAT_VERSION


def test_the_import_is_quick_because_it_does_not_load_torch():
    code = "import baton, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT / "python").returncode == 0


def test_the_pytorch_of_the_launcher_is_the_one_that_the_programs_are_built_with():
    setup = (ROOT / "scripts/setup.sh").read_text()
    (version,) = re.findall(r"^readonly TORCH_VERSION=(\d+\.\d+)\.", setup, re.M)
    assert version == _launch.TORCH
    assert f'"torch=={version}.*"' in (ROOT / "python/pyproject.toml").read_text()
