"""Starting the programs that a wheel carries."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "baton"


@pytest.fixture
def site(tmp_path):
    """A folder of packages with a wheel of Baton whose programs print what they get."""
    folder = tmp_path / "site"
    (folder / "baton/_dist/bin").mkdir(parents=True)
    (folder / "baton/__init__.py").touch()
    (folder / "baton/_launch.py").write_bytes((PACKAGE / "_launch.py").read_bytes())
    for name in ["baton", "baton-worker"]:
        program = folder / "baton/_dist/bin" / name
        program.write_text('#!/bin/sh\necho "$0 $* with $LD_LIBRARY_PATH"\nexit 75\n')
        program.chmod(0o755)
    return folder


def add_torch(site, version):
    (site / "torch/lib").mkdir(parents=True)
    (site / "torch/__init__.py").touch()
    (site / "nvidia/cu13/lib").mkdir(parents=True)
    if version:
        info = site / f"torch-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")


def launch(site, name, *arguments, libraries=""):
    script = site.with_name("bin") / name
    script.parent.mkdir(exist_ok=True)
    script.write_text("from baton._launch import main\nmain()\n")
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(site), "LD_LIBRARY_PATH": libraries}
    environment["XDG_CACHE_HOME"] = str(site.with_name("cache"))
    # Without packages of this machine, which may have PyTorch.
    command = [sys.executable, "-S", script, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_a_program_gets_its_arguments_and_pytorchs_libraries_first(site):
    add_torch(site, "2.11.0+cpu")
    done = launch(site, "baton-worker", "eval", "a b", libraries="/usr/local/cuda/lib64")
    folders = f"{site}/torch/lib:{site}/nvidia/cu13/lib:/usr/local/cuda/lib64"
    assert done.stdout == f"{site}/baton/_dist/bin/baton-worker eval a b with {folders}\n"
    assert done.returncode == 75


def test_a_pytorch_without_metadata_is_taken(site):
    add_torch(site, None)
    assert launch(site, "baton-worker").stdout.endswith(f"with {site}/torch/lib:{site}/nvidia/cu13/lib\n")


def test_nccl_gets_the_name_that_the_worker_opens(site):
    add_torch(site, "2.11.0")
    library = site / "nvidia/nccl/lib/libnccl.so.2"
    library.parent.mkdir(parents=True)
    library.touch()
    for _ in range(2):
        folder = Path(launch(site, "baton-worker").stdout.strip().split(":")[-1])
        assert (folder / "libnccl.so").resolve() == library
    assert folder.parent == site.with_name("cache") / "baton"


def test_every_command_gets_the_libraries_and_the_python_of_its_wheel(site):
    """`baton checkpoint import` and `baton doctor` start baton-worker, and `baton track` starts Python."""
    add_torch(site, "2.11.0")
    (site / "baton/_dist/bin/baton").write_text('#!/bin/sh\necho "$BATON_PYTHON with $LD_LIBRARY_PATH"\n')
    done = launch(site, "baton", "doctor")
    assert done.stdout == f"{sys.executable} with {site}/torch/lib:{site}/nvidia/cu13/lib\n"


def test_a_job_can_be_controlled_without_pytorch_or_with_another_one(site):
    expected = f"{site}/baton/_dist/bin/baton status with /opt\n"
    assert launch(site, "baton", "status", libraries="/opt").stdout == expected
    add_torch(site, "2.1.0")
    assert launch(site, "baton", "status", libraries="/opt").stdout == expected


def test_training_without_pytorch_or_with_another_one_is_refused_with_a_remedy(site):
    done = launch(site, "baton", "up")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: PyTorch is not installed: pip install 'torch==2.11.*'\n"
    add_torch(site, "2.1.0")
    done = launch(site, "baton-worker", "agent")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: PyTorch 2.1.0 is installed, and Baton needs 2.11: pip install 'torch==2.11.*'\n"


def test_a_program_that_does_not_start_is_named(site):
    (site / "baton/_dist/bin/baton").write_bytes(b"\x7fELF\x02\x01\x01")
    (site / "baton/_dist/bin/baton").chmod(0o755)
    done = launch(site, "baton")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "_dist/bin/baton does not start: Exec format error: this wheel is for Linux on x86-64" in done.stderr


def test_an_older_glibc_is_refused_with_a_remedy(site):
    add_torch(site, "2.11.0")
    needed = site / "baton/_dist/glibc"
    needed.write_text("2.5\n")
    assert launch(site, "baton", "status").returncode == 75
    needed.write_text("99.1\n")
    done = launch(site, "baton", "status")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: this machine has glibc 2.")
    assert done.stderr.endswith(", and Baton needs 99.1 or newer: use a newer system, or an image of one\n")
