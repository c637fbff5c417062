#!/usr/bin/env python3
"""Checks deploy/skypilot: scripts/deploy/skypilot.py [FOLDER OF BATON'S PROGRAMS]

SkyPilot's own loader reads each file. Then the commands in `run` do what they do on a rented machine: a job on one node
and on two is drained, and goes on from the checkpoints alone, in a new home and a new run folder. Nodes are processes in
namespaces of their own, with a loopback network and a table of hosts; that needs root.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / "deploy/skypilot"
# Exit code that scripts/deploy/check.sh treats as a skipped check.
SKIPPED = 77
# Exit code of a job that was saved and stopped.
DRAINED = 75
# Limit for each wait, seconds; reached only when something is broken.
TIMEOUT_SECONDS = 300
# The job has no end until it is drained, so that nothing depends on how fast this machine is.
FLAGS = (
    "--set model.arch=linear --set optimizer={kind='sgd'} --set train.epochs=1000000 --set checkpoint.every_epochs=20 "
    "--set evaluation.every_epochs=1000000 --set cluster.min_ranks=NODES"
)
HOSTS = "127.0.0.1 localhost\n"


def say(text):
    print(f"skypilot: {text}", flush=True)


def loaded(path):
    """A task as SkyPilot reads it, in its own Python packages."""
    import sky

    task = sky.Task.from_yaml(str(path))
    (resources,) = task.resources
    assert resources.use_spot and resources.accelerators == {"A100": 8}, f"{path}: {resources}"
    recovery = resources.job_recovery
    assert recovery["recover_on_exit_codes"] == [DRAINED], f"{path}: {recovery}"
    return task


class Node:
    """A process that does what SkyPilot does with a file on a machine, with a home of its own."""

    def __init__(self, folder, programs, script, checkpoints, nodes, rank):
        self.home = folder / f"home-{rank}"
        (self.home / "baton").mkdir(parents=True)
        (self.home / "baton/bin").symlink_to(programs)
        # The only command that needs a right of root writes into this node's table of hosts.
        tools = self.home / "tools"
        tools.mkdir()
        sudo = tools / "sudo"
        sudo.write_text('#!/bin/sh\nexec "$@"\n')
        sudo.chmod(0o755)
        addresses = [f"127.0.0.{1 + number}" for number in range(nodes)]
        environment = {
            "HOME": str(self.home),
            "PATH": f"{tools}:/usr/sbin:/usr/bin:/sbin:/bin",
            "SKYPILOT_NODE_IPS": "\n".join(addresses),
            "SKYPILOT_NODE_RANK": str(rank),
            "SKYPILOT_NUM_NODES": str(nodes),
            "SKYPILOT_NUM_GPUS_PER_NODE": "8",
            "BATON_RECIPE": "digits_cpu",
            "BATON_CHECKPOINTS": str(checkpoints),
            "BATON_FLAGS": FLAGS.replace("NODES", str(nodes)),
        }
        environment |= {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
        with open(folder / f"log-{rank}", "wb") as self.log:
            self.process = subprocess.Popen(
                ["bash", "-c", script], cwd=folder / "workdir", env=environment, stdout=self.log, stderr=self.log
            )

    def baton(self, *arguments):
        environment = os.environ | {"BATON_TOKEN_FILE": "access/operator.token", "BATON_TLS_CA": "access/ca.pem"}
        command = [self.home / "baton/bin/baton", *arguments, "--run-dir", self.home / "run"]
        folder = self.home.parent / "workdir"
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)

    def output(self):
        return Path(self.log.name).read_text(errors="replace")


def wait_for(what, condition, nodes):
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not (found := condition()):
        ended = [node for node in nodes if node.process.poll() is not None]
        if ended or time.monotonic() > deadline:
            logs = "".join(node.output() for node in nodes)
            raise SystemExit(f"skypilot: no {what}; ended: {len(ended)} of {len(nodes)} nodes\n{logs}")
        time.sleep(0.2)
    return found


def story(name, nodes, programs, folder):
    """A job is drained, and goes on from its checkpoints on other machines."""
    script = yaml.safe_load((FILES / name).read_text())["run"]
    step = 0
    for life in range(2):
        place = folder / f"{name}-{life}"
        workdir = place / "workdir"
        workdir.mkdir(parents=True)
        for given in ("recipes", "assets"):
            (workdir / given).symlink_to(ROOT / given)
        # Every life of a job gets the same files.
        access = folder / f"{name}-access"
        if not access.exists():
            made = [programs / "baton", "cert", "--host", "baton-head", "--out", access]
            subprocess.run(made, check=True, stdout=subprocess.DEVNULL)
        (workdir / "access").symlink_to(access)
        Path("/etc/hosts").write_text(HOSTS)
        started = [Node(place, programs, script, folder / f"{name}-checkpoints", nodes, rank) for rank in range(nodes)]
        head = started[0]

        def status(head=head):
            shown = head.baton("status", "--json")
            return json.loads(shown.stdout) if shown.returncode == 0 else None

        def trains(after, status=status):
            found = status()
            latest = found and found["phase"] == "training" and found["latest"]
            return latest and latest["step"] > after and len(found["nodes"]) == nodes and latest["step"]

        newest = wait_for("training", lambda after=step, trains=trains: trains(after), started)
        if life == 1:
            assert "from checkpoint" in head.output(), head.output()
        drained = head.baton("drain", "--reason", "a spot notice")
        assert drained.returncode == 0, drained.stderr
        for node in started:
            code = node.process.wait(TIMEOUT_SECONDS)
            assert code == DRAINED, f"a node ended with {code}:\n{node.output()}"
        say(f"{name}: {nodes} node(s) trained to step {newest}, were drained, and ended with {DRAINED}")
        step = newest


def inside(programs):
    """In the namespaces."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    folder = Path(tempfile.mkdtemp(prefix="baton-sky-"))
    try:
        hosts = folder / "hosts"
        hosts.write_text(HOSTS)
        subprocess.run(["mount", "--bind", hosts, "/etc/hosts"], check=True)
        story("one-node.yaml", 1, programs, folder)
        story("several-nodes.yaml", 2, programs, folder)
    finally:
        subprocess.run(["umount", "/etc/hosts"], check=False)
        shutil.rmtree(folder)


def main():
    if sys.argv[1:2] == ["--inside"]:
        return inside(Path(sys.argv[2]))
    programs = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "target/debug").resolve()
    paths = sorted(FILES.glob("*.yaml"))
    assert paths, "no files in deploy/skypilot"
    for path in paths:
        task = loaded(path)
        for part in (task.setup, task.run):
            subprocess.run(["bash", "-n", "-c", part], check=True)
    say(f"SkyPilot reads {', '.join(path.name for path in paths)}")
    from sky.data.storage_utils import get_excluded_files

    # The wheel, and what several machines need, are copied, although git ignores them.
    excluded = {path.strip("/") for path in get_excluded_files(str(ROOT))}
    assert "target" in excluded and not excluded & {"dist", "access", "data", "recipes"}, sorted(excluded)
    namespaces = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
    possible = os.geteuid() == 0 and subprocess.run([*namespaces, "true"], capture_output=True).returncode == 0
    if not possible:
        say("the jobs were not run: they need root and namespaces")
        return SKIPPED
    ended = subprocess.run([*namespaces, sys.executable, Path(__file__).resolve(), "--inside", programs])
    return ended.returncode


if __name__ == "__main__":
    sys.exit(main())
