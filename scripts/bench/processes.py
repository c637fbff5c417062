"""Processes in /proc: their children, and how to end them all."""

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path

# From linux/prctl.h.
PR_SET_CHILD_SUBREAPER = 36
KILL_TIMEOUT_SECONDS = 30.0


def adopt_orphans():
    """Makes descendants whose parent dies children of this process, so that they can be found."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children(pid):
    """Running children, in the order in which each thread started them."""
    found = []
    try:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found += [int(child) for child in (thread / "children").read_text().split()]
    except OSError:
        # It has just ended; its children have another parent now.
        pass
    return [child for child in found if is_alive(child)]


def family(pid):
    """The process and all its descendants, parents first."""
    found = [pid]
    for member in found:
        found += children(member)
    return found


def arguments_of(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except OSError:
        return []


def is_alive(pid):
    """Whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def kill(pids):
    """Sends `kill -9` and waits until all have ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + KILL_TIMEOUT_SECONDS
    while any(is_alive(pid) for pid in pids):
        if time.monotonic() > deadline:
            raise RuntimeError(f"some of the processes {pids} did not end in {KILL_TIMEOUT_SECONDS:.0f} s")
        time.sleep(0.002)


def end_all():
    """Kills all descendants of this process."""
    while started := family(os.getpid())[1:]:
        kill(started)
