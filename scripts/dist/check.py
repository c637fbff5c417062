"""Installs the wheel of Baton beside PyTorch, and trains on the digits: check.py PACKAGES DIST."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def main() -> None:
    packages, dist = (Path(argument).resolve() for argument in sys.argv[1:3])
    (wheel,) = dist.glob("baton_train-*.whl")
    work = Path(tempfile.mkdtemp(prefix="check-", dir=packages.parent))
    try:
        subprocess.run([sys.executable, "-m", "venv", work / "venv"], check=True)
        # What a user has already. Their own dependencies are for CUDA, or are not used here.
        install(work, *sorted(packages.glob("*.whl")))
        seconds = first_step(work, wheel)
        # Packages may be read-only, as in an image or on a cluster.
        if written := newer_files(work / "venv", than=work / "installed"):
            sys.exit(f"check: the job wrote into the packages: {', '.join(map(str, written))}")
    finally:
        shutil.rmtree(work)
    glibc = os.confstr("CS_GNU_LIBC_VERSION")
    print("RESULT", json.dumps({"install_to_first_step_seconds": round(seconds, 1), "libc": glibc, "wheel": wheel.name}))


def install(work: Path, *wheels: Path) -> None:
    pip = [work / "venv/bin/pip", "install", "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps"]
    subprocess.run([*pip, *wheels], check=True)


def newer_files(folder: Path, than: Path) -> list[Path]:
    limit = than.stat().st_mtime_ns
    return [path for path in folder.rglob("*") if path.lstat().st_mtime_ns > limit]


def first_step(work: Path, wheel: Path) -> float:
    """Seconds from the start of pip to the first step of a job, which must then end well."""
    started = time.monotonic()
    install(work, wheel)
    (work / "installed").touch()
    folder = work / "empty"
    folder.mkdir()
    path = f"{work}/venv/bin:/usr/bin:/bin"
    environment = {"PATH": path, "HOME": str(folder), "LANG": "C.UTF-8"}
    up = ["baton", "up", "digits_cpu", "--set", "train.epochs=2", "--listen", "127.0.0.1:0", "--json"]
    job = subprocess.Popen(up, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)
    seconds = None
    for line in job.stdout:
        status = json.loads(line)
        if seconds is None and status["type"] == "progress" and status["latest"]:
            seconds = time.monotonic() - started
    if job.wait() != 0 or seconds is None:
        sys.exit(f"check: baton up ended with {job.returncode}, seconds to the first step: {seconds}")
    verify = ["baton", "checkpoint", "verify", "--dir", "runs/digits_cpu/checkpoints"]
    subprocess.run(verify, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
    return seconds


main()
