"""Kills training processes and measures the time until training continues: Baton and torchrun; see run.sh.

    race.py --baton PROGRAM --work DIR --rounds N [--goodput-seconds S] [--seed N] [--only PART]

Each part starts its own jobs and returns numbers by name; jobs.py defines how finished steps are read.
"""

import itertools
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import time
from pathlib import Path

import common
import processes
from common import say
from jobs import Baton, Torch, gaps, signal_rank, typical_gap

# The same as in torch_side.py: ResNet-50, momentum, 8 images of 32 px per rank, a checkpoint every 5 steps.
RECIPE = """
name = "bench-recovery"
model = { arch = "resnet50", num_classes = 10 }
data = { train = "DIGITS", val = "DIGITS" }
train = { epochs = 1000, global_batch = 16, resolution = 32, virtual_ranks = 2 }
optimizer = { kind = "sgd", momentum = 0.9 }
schedule = { kind = "constant", lr = 0.001 }
evaluation = { every_epochs = 1000 }
checkpoint = { every_epochs = 0, every_steps = 5, keep_last = 2, keep_best = false }
cluster = { device = "cpu" }
"""
DIGITS = "assets/digits/digits-train.beton"
SAVE_EVERY = 5
# Steps before the first kill; the first two take longer than the others.
WARM_UP, FIRST = 10, 2
# Steps that measure the speed of an undisturbed job; a multiple of the steps between saves.
CALM = 8 * SAVE_EVERY
# Steps after a new coordinator serves, to include late effects of its absence.
AFTERMATH = 2 * SAVE_EVERY
KILL_EVERY = 15.0
HANG_SECONDS = 5
PARTS = ["rank-kill", "all-kill", "coordinator-kill", "coordinator-host", "sigstop", "notice", "goodput"]
# An evaluation that takes far longer than a step, after an epoch of few steps.
EVALUATING = ["train.global_batch=360", "evaluation={ every_epochs=1, resolution=128 }"]
PARTS_OF_RECOVERY = ["detect", "tear_down", "respawn", "rendezvous", "restore", "first_step", "total"]


class Bench:
    """Shared by all parts."""

    def __init__(self, arguments):
        self.work = arguments.work
        self.program = arguments.baton
        self.recipe = self.work / "recipe.toml"
        self.seen = {}
        self.recipe.write_text(RECIPE.replace("DIGITS", str(Path(DIGITS).absolute())), encoding="utf-8")

    def baton(self, *settings):
        return Baton(self.work / "baton", self.program, self.recipe, settings)

    def torch(self):
        return Torch(self.work / "torchrun", Path(__file__).with_name("torch_side.py"))

    def measure(self, what, part, number, *jobs):
        """Runs one part for each job, and records its numbers."""
        for job in jobs:
            job.start()
            found = part(job, number)
            job.kill()
            shutil.rmtree(job.folder)
            for key, value in found.items():
                self.seen.setdefault(f"{job.name} {what}: {key}", []).append(value)
            say(f"{what}, round {number}, {job.name}: " + describe(found))

    def worst(self, prefix):
        """The largest number of all whose names begin so; None if nothing was measured."""
        values = [value for name, all_ in self.seen.items() if name.startswith(prefix) for value in all_]
        return round(max(values), 2) if values else None

    def median(self, name):
        """None if that was not measured."""
        values = self.seen.get(name)
        return round(statistics.median(values), 2) if values else None


class TwoHosts(Baton):
    """`baton up` with a rank, and an agent with another one: two hosts, as far as processes can be."""

    def __init__(self, folder, program, recipe):
        self.store = folder / "store"
        super().__init__(folder, program, recipe, [f"checkpoint.dir={self.store}"])
        self.world_size = 1
        self.second = self.second_log = None

    def start(self):
        super().start()
        endpoint = self.run_dir / "coordinator.json"
        self.wait_until(endpoint.exists, "coordinator")
        url = "http://" + json.loads(endpoint.read_text(encoding="utf-8"))["address"]
        second = self.folder / "second"
        # Rank 0, whose steps are read, is on the node whose name comes first.
        command = [Path(self.program).with_name("baton-worker"), "agent", "--coordinator", url, "--node-id", "zz"]
        self.second_log = self.folder / "second.log"
        with open(self.second_log, "wb") as log:
            self.second = subprocess.Popen(
                [*command, "--ranks", "1", "--run-dir", second],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | self.environment(),
            )

    def output_path(self):
        return self.second_log if self.process is self.second else super().output_path()

    def lose_first_host(self):
        """Ends all its processes at once; returns when."""
        lost = time.time()
        super().kill()
        self.read_steps()
        self.process, self._read = self.second, 0
        return lost

    def kill(self):
        processes.kill(processes.family(self.second.pid))
        self.second.wait()
        if self.process is not self.second:
            super().kill()

    def answers(self):
        """Whether a coordinator that is found by the store answers."""
        command = [self.program, "status", "--json", "--store", self.store]
        return subprocess.run(command, check=False, capture_output=True).returncode == 0


def describe(found):
    def number(value):
        return str(value) if isinstance(value, int) else f"{value:.2f}"

    return ", ".join(f"{key} {number(value)}" for key, value in found.items())


def run_until_kill(job, number):
    """Trains until the middle of a step, in each round at another distance to the last checkpoint."""
    job.wait_for_number(WARM_UP + number % SAVE_EVERY)
    step = typical_gap(job.steps[FIRST:])
    time.sleep(step / 2)
    return step


def recovery(job, since):
    """Numbers of the recovery from a failure at the time `since`."""
    job.read_steps()
    last = job.steps[-1]
    following = job.wait_for(lambda step: step.incarnation != last.incarnation, "step after the restart")
    # Finished steps that are repeated; the step during which the kill happened is not counted.
    before = max(step.number for step in job.steps if step.incarnation == last.incarnation)
    further = job.wait_for(
        lambda step: step.incarnation != last.incarnation and step.number > before, "step beyond those made before"
    )
    return {
        "seconds": following.when - since,
        "seconds until beyond": further.when - since,
        "steps lost": before + 1 - following.number,
    }


def parts_of_recovery(job):
    """The coordinator's numbers of the last recovery, once its first step has been reported."""
    job.wait_for_number(job.steps[-1].number + 1)
    last = job.status()["recoveries"][-1]
    parts = {f"its {part} seconds": last[f"{part}_seconds"] for part in PARTS_OF_RECOVERY}
    # The time of an unknown part is included in the next.
    known = {name: seconds for name, seconds in parts.items() if seconds is not None}
    return known | {"its steps lost": last["lost_steps"]}


def rank_kill(job, number):
    step = run_until_kill(job, number)
    found = recovery(job, signal_rank(job, number % 2, signal.SIGKILL)) | {"step": step}
    return found | parts_of_recovery(job) if isinstance(job, Baton) else found


def all_kill(job, number):
    step = run_until_kill(job, number)
    killed = time.time()
    job.kill()
    job.start()
    return recovery(job, killed) | {"step": step}


def coordinator_kill(job, number):
    job.wait_for_number(WARM_UP + CALM + number % SAVE_EVERY)
    calm = job.steps[WARM_UP:]
    time.sleep(typical_gap(calm) / 2)
    before, old = len(job.steps), job.coordinator()
    processes.kill([old])
    job.wait_until(lambda: job.serving() not in (None, old), "new coordinator")
    job.read_steps()
    job.wait_for_number(job.steps[-1].number + AFTERMATH)
    around = job.steps[before - 1 :]
    if job.steps[-1].incarnation != job.steps[0].incarnation:
        say("coordinator-kill: the ranks were restarted, so training was interrupted")
    typical = typical_gap(calm)
    return {
        "gap ratio": max(gaps(around)) / typical,
        "gap ratio of as many steps before": max(gaps(calm[-len(around) :])) / typical,
        "longest gap": max(gaps(around)),
        "step": typical,
    }


def coordinator_host(job, number):
    """The host of the coordinator is lost with its rank."""
    job.wait_until(lambda: len(job.status()["ranks"]) == 2, "second rank")
    job.read_steps()
    job.wait_for_number((job.steps[-1].number if job.steps else 0) + WARM_UP + number % SAVE_EVERY)
    lost = job.lose_first_host()
    before = job.steps[-1]
    job.wait_until(job.answers, "answer of another coordinator")
    answered = time.time()
    following = job.wait_for(lambda step: step.when > lost and step.incarnation > before.incarnation, "next step")
    return {
        "seconds until status answers": answered - lost,
        "seconds": following.when - lost,
        "steps lost": before.number + 1 - following.number,
    }


def calm_seconds(job):
    """Measures undisturbed steps; returns their seconds and their number."""
    job.read_steps()
    first = job.wait_for_number(job.steps[-1].number + SAVE_EVERY if job.steps else WARM_UP)
    last = job.wait_for_number(first.number + CALM)
    return last.when - first.when, last.number - first.number


def kill_for(job, seconds, seed):
    """Kills a random rank every KILL_EVERY seconds; returns the number of kills."""
    victims = random.Random(seed)
    began = time.monotonic()
    kills = 0
    while kills * KILL_EVERY < seconds:
        signal_rank(job, victims.randrange(2), signal.SIGKILL)
        kills += 1
        time.sleep(max(0.0, began + min(kills * KILL_EVERY, seconds) - time.monotonic()))
    return kills


def goodput(job, seconds, seed):
    """Time that the same steps would take without kills, in percent of the time they took."""
    calm = [calm_seconds(job)]
    job.read_steps()
    first, began = job.steps[-1], time.time()
    kills = kill_for(job, seconds, seed)
    took = time.time() - began
    job.read_steps()
    # The last reported step, not the highest: lost steps that were not repeated do not count.
    useful = job.steps[-1].number - first.number
    among_kills = job.steps[job.steps.index(first) :]
    # The machine may be faster or slower than before.
    calm.append(calm_seconds(job))
    step = sum(span for span, _ in calm) / sum(count for _, count in calm)
    recoveries = [recovery["total_seconds"] for recovery in job.status()["recoveries"]]
    return {
        "percent": 100 * useful * step / took,
        "percent by its pauses": 100 * (1 - pauses(among_kills) / took),
        "seconds": took,
        "kills": kills,
        "useful steps": useful,
        "step": step,
        "its seconds of a recovery": statistics.median(filter(None, recoveries)),
    }


def pauses(steps):
    """Seconds lost between the last step of one incarnation and the first of the next. Changes of the machine's speed
    do not affect this, but it does not include slow or repeated steps."""
    typical = typical_gap(steps)
    pairs = itertools.pairwise(steps)
    return sum(b.when - a.when - typical for a, b in pairs if a.incarnation != b.incarnation)


def sigstop(job, number):
    step = run_until_kill(job, number)
    found = recovery(job, signal_rank(job, number % 2, signal.SIGSTOP))
    beyond = {"seconds beyond the deadline": found["seconds"] - HANG_SECONDS}
    return beyond | found | {"step": step} | parts_of_recovery(job)


# ---- notices ----


def has(kind, text=""):
    return lambda event: event["kind"] == kind and text in event["message"]


def while_training(job, number):
    run_until_kill(job, number)


def while_launching(job, number):
    while_training(job, number)
    job.kill()
    job.start()
    job.wait_until(job.ranks, "rank")


def while_resuming(job, number):
    while_training(job, number)
    events = len(job.events())
    job.kill()
    job.start()
    job.wait_until(lambda: any(map(has("training_started"), job.events()[events:])), "start of training")


def while_saving(job, number):
    step = run_until_kill(job, number)
    save = (job.steps[-1].number // SAVE_EVERY + 1) * SAVE_EVERY
    job.wait_for_number(save)
    time.sleep(step / 10)


def while_evaluating(job, _):
    job.wait_until(lambda: job.serving() and job.status()["evaluating"], "evaluation")


def while_paused(job, number):
    while_training(job, number)
    job.command_line("pause")
    job.wait_until(lambda: {rank["heartbeat"]["activity"] for rank in job.status()["ranks"]} == {"paused"}, "pause")


NOTICES = {
    "launching": (while_launching, []),
    "resuming": (while_resuming, []),
    "training": (while_training, []),
    "saving": (while_saving, []),
    "evaluating": (while_evaluating, EVALUATING),
    "paused": (while_paused, []),
}


def notice(phase):
    """The part that takes the machine away in a phase: SIGTERM to its agent."""

    def part(job, number):
        phase(job, number)
        events = len(job.events())
        sent = time.time()
        os.kill(job.agent(), signal.SIGTERM)

        def commit():
            new = job.events()[events:]
            # Where no rank had a state, nothing has to be committed, and the job ends at once.
            safe = [event for event in new if has("draining", "is durable")(event) or has("ended")(event)]
            return safe[0] if safe else None

        return {"seconds": job.wait_until(commit, "commit")["unix_millis"] / 1000 - sent}

    return part


def measure_all(bench, arguments):
    def kill_repeatedly(job, _):
        return goodput(job, arguments.goodput_seconds, arguments.seed)

    parts = arguments.only or PARTS
    for number in range(1, arguments.rounds + 1):
        if "rank-kill" in parts:
            bench.measure("rank-kill", rank_kill, number, bench.baton(), bench.torch())
            spare = bench.baton("cluster.warm_spare=true")
            bench.measure("rank-kill with a spare", rank_kill, number, spare)
        if "all-kill" in parts:
            bench.measure("all-kill", all_kill, number, bench.baton(), bench.torch())
        if "coordinator-kill" in parts:
            bench.measure("coordinator-kill", coordinator_kill, number, bench.baton())
        if "coordinator-host" in parts:
            hosts = TwoHosts(bench.work / "baton", bench.program, bench.recipe)
            bench.measure("coordinator-host", coordinator_host, number, hosts)
        if "sigstop" in parts:
            bench.measure("sigstop", sigstop, number, bench.baton(f"cluster.hang_seconds={HANG_SECONDS}"))
        if "notice" in parts:
            for name, (phase, settings) in NOTICES.items():
                bench.measure(f"notice while {name}", notice(phase), number, bench.baton(*settings))
        # Once: it takes long and has many kills.
        if "goodput" in parts and number == 1:
            say(f"goodput, seed {arguments.seed}")
            bench.measure("goodput", kill_repeatedly, number, bench.baton())


def report(bench):
    for name, values in bench.seen.items():
        spread = f"({min(values):.2f} to {max(values):.2f})" if len(values) > 1 else ""
        print(f"  {name:60} {statistics.median(values):8.2f}  {spread}")
    results = {
        "rank_kill_seconds": bench.median("baton rank-kill: seconds"),
        "rank_kill_lost_steps": bench.median("baton rank-kill: steps lost"),
        "spare_kill_seconds": bench.median("baton rank-kill with a spare: seconds"),
        "torchrun_seconds": bench.median("torchrun rank-kill: seconds"),
        "torchrun_lost_steps": bench.median("torchrun rank-kill: steps lost"),
        "all_kill_seconds": bench.median("baton all-kill: seconds"),
        "all_kill_lost_steps": bench.median("baton all-kill: steps lost"),
        "coordinator_kill_gap_ratio": bench.median("baton coordinator-kill: gap ratio"),
        "coordinator_host_seconds": bench.median("baton coordinator-host: seconds until status answers"),
        "coordinator_host_step_seconds": bench.median("baton coordinator-host: seconds"),
        "coordinator_host_lost_steps": bench.median("baton coordinator-host: steps lost"),
        "goodput_percent": bench.median("baton goodput: percent"),
        "sigstop_seconds": bench.median("baton sigstop: seconds beyond the deadline"),
        "notice_worst_seconds": bench.worst("baton notice while "),
    }
    print(f"RESULT {json.dumps(results)}")


def read_arguments():
    parser = common.parser(__doc__)
    parser.add_argument("--goodput-seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    parser.add_argument("--only", action="append", choices=PARTS)
    arguments = common.read_arguments(parser)
    if arguments.goodput_seconds <= 0:
        parser.error("--goodput-seconds must be above 0")
    return arguments


def main():
    arguments = read_arguments()
    with common.working_in(arguments.work):
        bench = Bench(arguments)
        measure_all(bench, arguments)
    report(bench)


if __name__ == "__main__":
    main()
