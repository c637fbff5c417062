"""Processes as /proc shows them: who started whom, and that nobody is left behind."""

import ctypes
import os
import signal
import time
from pathlib import Path

# From linux/prctl.h.
PR_SET_CHILD_SUBREAPER = 36
GONE_WITHIN = 30.0


def adopt_orphans():
    """From now on a descendant whose parent dies becomes a child of this process, so that it is found."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children(pid):
    """Living children, in the order in which they were started by each thread."""
    found = []
    try:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found += [int(child) for child in (thread / "children").read_text().split()]
    except OSError:
        # It has just ended; its children belong to somebody else now.
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
    """Whether it runs; one that only waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def kill(pids):
    """`kill -9`, and waits until all are gone."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    deadline = time.monotonic() + GONE_WITHIN
    while any(is_alive(pid) for pid in pids):
        if time.monotonic() > deadline:
            raise RuntimeError(f"of processes {pids} some do not end")
        time.sleep(0.002)


def end_all():
    """Kills every process that this one has started, and what those have started."""
    while started := family(os.getpid())[1:]:
        kill(started)
