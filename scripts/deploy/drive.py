#!/usr/bin/env python3
"""Checks checkpoints on Google Drive: scripts/deploy/drive.py [FOLDER OF BATON'S PROGRAMS]

A FUSE file system stands in for Drive as a notebook mounts it: no hard links, renames of 0.3 s, a quota. Checkpoints are there,
the run folder is on the local disk. A job is drained and goes on from Drive alone, as in the next notebook, with the bits of an
undisturbed run; training goes on while the quota is used up, and while Drive is not mounted.
"""

import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import ClassVar

ROOT = Path(__file__).resolve().parents[2]
# Exit code that scripts/deploy/check.sh treats as a skipped check.
SKIPPED = 77
# Exit code of a job that was saved and stopped.
DRAINED = 75
# Limit for each wait, seconds; reached only when something is broken.
TIMEOUT_SECONDS = 120
RENAME_SECONDS = 0.3
# While this file is beside the folder behind the mount, there is no space left.
FULL = "full"
FLAGS = (
    "--set model.arch=linear --set optimizer={kind='sgd'} --set train.epochs=1000000 --set checkpoint.every_epochs=100 "
    "--set checkpoint.keep_every_epochs=100 --set evaluation.every_epochs=1000000 --ranks 2 --listen 127.0.0.1:0"
)
STEPS_OF_100_EPOCHS = 2200


def say(text):
    print(f"drive: {text}", flush=True)


def mount(behind, point):
    """Serves `behind` at `point` until it is unmounted."""
    from mfusepy import FUSE, FuseOSError, Operations

    def errors_as_numbers(function):
        def call(*arguments):
            try:
                return function(*arguments)
            except OSError as error:
                raise FuseOSError(error.errno) from None

        return call

    class Drive(Operations):
        """Passes everything on to the folder behind it, but for the manners of Drive."""

        use_ns = True

        def getattr(self, path, fh=None):
            found = os.lstat(behind + path)
            names = ["st_mode", "st_nlink", "st_size", "st_uid", "st_gid"]
            times = {f"st_{kind}time": getattr(found, f"st_{kind}time_ns") for kind in "acm"}
            return {**{name: getattr(found, name) for name in names}, **times}

        def readdir(self, path, fh):
            return [".", "..", *os.listdir(behind + path)]

        def statfs(self, path):
            found = os.statvfs(behind + path)
            return {name: getattr(found, name) for name in dir(found) if name.startswith("f_") and name != "f_fsid"}

        def mkdir(self, path, mode):
            os.mkdir(behind + path, mode)

        def rmdir(self, path):
            os.rmdir(behind + path)

        def unlink(self, path):
            os.unlink(behind + path)

        def rename(self, old, new):
            time.sleep(RENAME_SECONDS)
            os.rename(behind + old, behind + new)

        def link(self, target, source):
            raise FuseOSError(errno.ENOTSUP)

        def symlink(self, target, source):
            raise FuseOSError(errno.ENOTSUP)

        def open(self, path, flags):
            return os.open(behind + path, flags & ~os.O_DIRECT)

        def create(self, path, mode, fi=None):
            return os.open(behind + path, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)

        def read(self, path, size, offset, fh):
            return os.pread(fh, size, offset)

        def write(self, path, data, offset, fh):
            if Path(behind).with_name(FULL).exists():
                raise FuseOSError(errno.EDQUOT)
            return os.pwrite(fh, data, offset)

        def truncate(self, path, length, fh=None):
            os.truncate(behind + path, length)

        def fsync(self, path, datasync, fh):
            os.fsync(fh)

        def release(self, path, fh):
            os.close(fh)

    for name in list(vars(Drive)):
        if callable(vars(Drive)[name]) and not name.startswith("_"):
            setattr(Drive, name, errors_as_numbers(vars(Drive)[name]))
    FUSE(Drive(), point, foreground=True)


class Mount:
    """The stand-in for Drive at `point`, served by a process of its own."""

    def __init__(self, folder):
        self.behind, self.point, self.full = folder / "behind", folder / "drive", folder / FULL
        self.behind.mkdir()
        self.point.mkdir()
        if not self.start():
            print("FUSE cannot be mounted here")
            sys.exit(SKIPPED)

    def start(self):
        # What was saved in the meantime is on the local disk, in the folder where Drive was. FUSE mounts over an empty one.
        shutil.rmtree(self.point)
        self.point.mkdir()
        command = [sys.executable, __file__, "--mount", self.behind, self.point]
        self.process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        until("the mount", lambda: os.path.ismount(self.point) or self.process.poll() is not None)
        return self.process.poll() is None

    def stop(self):
        if self.process.poll() is None:
            subprocess.run(["fusermount3", "-uz", self.point], check=True)
            self.process.wait(TIMEOUT_SECONDS)


def until(what, condition):
    """Waits for a condition that stays true."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not seen within {TIMEOUT_SECONDS} s: {what}"
        time.sleep(0.05)
    return found


class Job:
    """A `baton up` without an end."""

    all: ClassVar = []

    def __init__(self, programs, run_dir, store):
        self.baton, self.run_dir = programs / "baton", run_dir
        command = [
            self.baton,
            "up",
            "digits_cpu",
            "--run-dir",
            run_dir,
            *FLAGS.split(),
            "--set",
            f"checkpoint.dir={store}",
        ]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.all.append(self)

    def ask(self, *command):
        done = subprocess.run(
            [self.baton, *command, "--run-dir", self.run_dir, "--json"], capture_output=True, text=True
        )
        return [json.loads(line) for line in done.stdout.splitlines()] if done.returncode == 0 else []

    def until_event(self, kind, after=0):
        """Waits for an event of this kind with a greater id, and returns the newest."""
        return until(
            f"{kind} after event {after}",
            lambda: [event for event in self.ask("events") if event["kind"] == kind and event["id"] > after],
        )[-1]

    def drain(self):
        self.ask("drain")
        code = self.process.wait(TIMEOUT_SECONDS)
        assert code == DRAINED, f"exit code {code}, not {DRAINED}"

    def step(self):
        return self.ask("status")[0]["latest"]["step"]


def checkpoints(store):
    """The committed checkpoints by step."""
    return {int(path.parent.name.split("-")[1]): path.parent.name for path in store.glob("step-*/manifest.json")}


def check(programs, folder):
    drive = Mount(folder)
    store, quiet_store = drive.point / "checkpoints", folder / "quiet-checkpoints"
    try:
        job = Job(programs, folder / "first", store)
        say(job.until_event("saved")["message"])
        job.drain()
        step = max(checkpoints(store))

        # The next notebook has another local disk.
        shutil.rmtree(folder / "first")
        job = Job(programs, folder / "second", store)
        # Its events begin with those of the first, which the store has too.
        lost = job.until_event("ended")
        begun = job.until_event("training_started", lost["id"])
        assert f"step {step}" in begun["message"], f"{begun['message']}: not from step {step}"
        say(f"another machine: {begun['message']}")

        drive.full.touch()
        failed = job.until_event("save_failed")
        say(f"without space: {failed['message']}")
        drive.full.unlink()
        say(f"with space: {job.until_event('saved', failed['id'])['message']}")

        drive.stop()
        before = job.step()
        until("training without Drive", lambda: job.step() > before + STEPS_OF_100_EPOCHS)
        assert drive.start(), "Drive cannot be mounted again"
        newest = job.ask("events")[-1]["id"]
        job.until_event("saved", newest)
        job.drain()
        say(f"trained on to step {max(checkpoints(store))} while Drive was away")

        verify = [programs / "baton", "checkpoint", "verify", "--dir", store]
        verified = subprocess.run(verify, capture_output=True, text=True)
        assert verified.returncode == 0, verified.stdout + verified.stderr

        compared = max(step for step in checkpoints(store) if step % STEPS_OF_100_EPOCHS == 0)
        quiet = Job(programs, folder / "quiet", quiet_store)
        until(f"step {compared} of an undisturbed run", lambda: compared in checkpoints(quiet_store))
        quiet.drain()
        pair = [store / checkpoints(store)[compared], quiet_store / checkpoints(quiet_store)[compared]]
        difference = subprocess.run(
            [programs / "baton", "checkpoint", "diff", *pair, "--json"], capture_output=True, text=True
        )
        found = json.loads(difference.stdout)
        # The recipes name different folders.
        assert not found["progress"] and found["regions"], found
        assert all(region["finding"] == "same" for region in found["regions"]), found
        say(f"at step {compared}: the bits of an undisturbed run")
    finally:
        for job in Job.all:
            job.process.terminate()
            job.process.wait(TIMEOUT_SECONDS)
        drive.stop()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--mount"]:
        mount(*sys.argv[2:])
        sys.exit()
    if not os.access("/dev/fuse", os.R_OK | os.W_OK) or not shutil.which("fusermount3"):
        print("no /dev/fuse or no fusermount3 here; on Debian: apt-get install -y fuse3")
        sys.exit(SKIPPED)
    with tempfile.TemporaryDirectory(prefix="baton-drive-") as made:
        check(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "target/debug").resolve(), Path(made))
