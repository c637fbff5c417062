"""Thousands of simulated workers against a coordinator on one core, and against torchft's lighthouse; see run.sh.

    race.py --baton PROGRAM --work DIR --rounds N --torchft DIR [--seconds S] [--workers N]

The servers run on one core and the swarm on another. Processor time and memory are those of the server only. The
result is for eight workers per node, as on typical machines; the table also has one worker per node, and eight with
checkpoints and the copy of the journal in a bucket on loopback each of whose requests takes 20 ms.
"""

import functools
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import common
from common import say

RECIPE = """
name = "bench-control"
model = { arch = "linear", num_classes = 10 }
data = { train = "DIGITS", val = "DIGITS" }
train = { epochs = 1, global_batch = RANKS, resolution = 8, virtual_ranks = RANKS }
optimizer = { kind = "sgd" }
schedule = { kind = "constant", lr = 0.001 }
cluster = { device = "cpu", min_ranks = RANKS, max_ranks = RANKS, hang_seconds = 0.0 }
"""
DIGITS = "assets/digits/digits-train.beton"
# The maximum of a job.
RANKS = 4096
SERVER_CORE, SWARM_CORE = 0, 1
BUCKET_MS = 20
TICKS = os.sysconf("SC_CLK_TCK")
AIMS = {
    "heartbeat_p99_ms": 50,
    "cpu_cores": 1,
    "rss_mb": 200,
    "rendezvous_seconds": 2,
    "status_p99_ms": 10,
    "push_ms": 250,
}


def on_core(core):
    def set_core():
        if hasattr(os, "sched_setaffinity") and os.cpu_count() > 1:
            os.sched_setaffinity(0, {core})

    return set_core


SPIN = """
import time
last = begin = time.perf_counter()
gaps = []
while last < begin + SECONDS:
    now = time.perf_counter()
    if now - last > 1e-3:
        gaps.append((now - last) * 1e3)
    last = now
print(len(gaps), max(gaps, default=0.0))
"""


def machine_gaps(seconds):
    """How often and how long, in ms, this machine takes the core from a process that only reads the clock."""
    script = SPIN.replace("SECONDS", str(seconds))
    command = [sys.executable, "-c", script]
    cores = (SERVER_CORE, SWARM_CORE)
    spinning = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=on_core(core)) for core in cores
    ]
    found = [child.communicate()[0].split() for child in spinning]
    return {
        "gaps_per_second": sum(int(count) for count, _ in found) / seconds / len(cores),
        "longest_ms": max(float(longest) for _, longest in found),
    }


class Server:
    """A server process that prints its address and has its own core."""

    def __init__(self, command, log, bucket=None):
        self.log = log.open("w", encoding="utf-8")
        self.bucket = bucket
        environment = os.environ | (bucket.environment if bucket else {})
        self.child = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env=environment,
            preexec_fn=on_core(SERVER_CORE),
        )
        address = self.child.stdout.readline().strip()
        if not address:
            common.fail(f"the server ended; see {log}")
        self.url = address if "://" in address else f"http://{address}"

    def cpu_seconds(self):
        fields = Path(f"/proc/{self.child.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def rss_mb(self):
        status = Path(f"/proc/{self.child.pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) / 1024

    def end(self):
        self.child.kill()
        self.child.wait()
        self.log.close()
        if self.bucket:
            self.bucket.end()


class Bucket:
    """An empty bucket far away, on the swarm's core."""

    def __init__(self, arguments):
        program = arguments.baton.with_name("examples") / "bucket"
        self.child = subprocess.Popen(
            [str(program), str(BUCKET_MS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=on_core(SWARM_CORE),
        )
        found = json.loads(self.child.stdout.readline())
        self.location, self.environment = found["location"], found["environment"]

    def end(self):
        self.child.kill()
        self.child.wait()


def coordinator(arguments, has_bucket):
    run_dir = arguments.work / "run"
    shutil.rmtree(run_dir, ignore_errors=True)
    recipe = arguments.work / "recipe.toml"
    text = RECIPE.replace("RANKS", str(RANKS)).replace("DIGITS", str(Path(DIGITS).absolute()))
    recipe.write_text(text, encoding="utf-8")
    command = [arguments.baton.with_name("baton-coordinator"), "serve", "--recipe", recipe]
    command += ["--run-dir", run_dir, "--listen", "127.0.0.1:0"]
    bucket = Bucket(arguments) if has_bucket else None
    if bucket:
        command += ["--set", f"checkpoint.dir={bucket.location}"]
    return Server([str(part) for part in command], arguments.work / "coordinator.log", bucket)


def lighthouse(arguments):
    script = Path(__file__).with_name("lighthouse.py")
    return Server([sys.executable, str(script), str(arguments.torchft)], arguments.work / "lighthouse.log")


def swarm(arguments, server, workers, per_node, *what):
    """Runs the swarm; returns its measurements with the server's cores and memory."""
    program = arguments.baton.with_name("examples") / "swarm"
    command = [str(program), "--url", server.url, "--workers", str(workers), "--per-node", str(per_node), *what]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=on_core(SWARM_CORE))
    cpu, found = None, None
    for line in child.stdout:
        message = json.loads(line)
        if "measuring" in message:
            cpu = server.cpu_seconds()
        else:
            found = message
    if child.wait() != 0 or found is None:
        common.fail(f"the swarm failed; see {arguments.work}")
    if cpu is not None:
        found["cpu_cores"] = (server.cpu_seconds() - cpu) / arguments.seconds
    found["rss_mb"] = server.rss_mb()
    return found


def measure(arguments, seen, side, start, *swarming):
    server = start()
    found = swarm(arguments, server, *swarming)
    server.end()
    say(f"{side}: {json.dumps(found)}")
    for key, value in found.items():
        if isinstance(value, dict):
            for part, number in value.items():
                seen.setdefault(f"{side}.{key}.{part}", []).append(number)
        else:
            seen.setdefault(f"{side}.{key}", []).append(value)


def main():
    options = common.parser(__doc__)
    options.add_argument("--torchft", type=Path, required=True)
    options.add_argument("--seconds", type=int, default=20)
    options.add_argument("--workers", type=int, default=10_000)
    arguments = common.read_arguments(options)
    beats = ["heartbeats", "--seconds", str(arguments.seconds)]
    workers, seen = arguments.workers, {}
    with common.working_in(arguments.work):
        for number in range(1, arguments.rounds + 1):
            say(f"round {number} of {arguments.rounds}")
            gaps = machine_gaps(arguments.seconds)
            say(f"the machine itself: {json.dumps(gaps)}")
            for key, value in gaps.items():
                seen.setdefault(f"machine.{key}", []).append(value)
            for per_node, place in ((8, "node"), (1, "node"), (8, "node, in a bucket")):
                start = functools.partial(coordinator, arguments, "bucket" in place)
                measure(arguments, seen, f"rendezvous, {per_node} a {place}", start, RANKS, per_node, "rendezvous")
                measure(arguments, seen, f"heartbeats, {per_node} a {place}", start, workers, per_node, *beats)
            if arguments.torchft.is_dir():
                start = lambda: lighthouse(arguments)
                what = ["lighthouse", "--seconds", str(arguments.seconds)]
                measure(arguments, seen, "lighthouse", start, workers, 1, *what)
    medians = {key: statistics.median(values) for key, values in seen.items()}
    for key, value in sorted(medians.items()):
        print(f"{key:50} {value:12.3f}   {' '.join(f'{v:.3f}' for v in seen[key])}")

    def median(key):
        return round(medians[key], 3)

    result = {
        "heartbeat_p99_ms": median("heartbeats, 8 a node.reply_ms.p99"),
        "cpu_cores": median("heartbeats, 8 a node.cpu_cores"),
        "rss_mb": median("heartbeats, 8 a node.rss_mb"),
        "rendezvous_seconds": median("rendezvous, 8 a node.met_seconds"),
        "status_p99_ms": median("heartbeats, 8 a node.status_ms.p99"),
        "push_ms": median("rendezvous, 8 a node.push_ms"),
        "bucket_heartbeat_p99_ms": median("heartbeats, 8 a node, in a bucket.reply_ms.p99"),
        "bucket_rendezvous_seconds": median("rendezvous, 8 a node, in a bucket.met_seconds"),
        "bucket_push_ms": median("rendezvous, 8 a node, in a bucket.push_ms"),
    }
    missed = [f"{key} {result[key]} (aim {aim})" for key, aim in AIMS.items() if result[key] >= aim]
    lighthouse_p99 = medians.get("lighthouse.reply_ms.p99")
    result["lighthouse_p99_ms"] = None if lighthouse_p99 is None else round(lighthouse_p99, 3)
    print(f"missed: {', '.join(missed)}" if missed else "all aims met")
    print(f"RESULT {json.dumps(result)}")


main()
