"""Kills what trains, and measures until it trains again: Baton against torchrun; see run.sh.

    race.py --baton PROGRAM --work DIR [--rounds N] [--goodput-seconds S] [--seed N] [--only PART]

Each part starts jobs of its own and returns numbers by name; jobs.py tells how a finished step is seen.
"""

import argparse
import json
import random
import shutil
import signal
import statistics
import sys
import time
from pathlib import Path

import processes
from jobs import Baton, Torch, gaps, kill_rank, stop_rank, typical_gap

# Like torch_side.py's: ResNet-50, momentum, 8 images of 32 px per rank, a checkpoint every 5 steps.
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
# Steps before anything is killed; the first two are not like the others.
WARM_UP, FIRST = 10, 2
# Steps that show how fast an undisturbed job is: as many saves as in any others.
CALM = 8 * SAVE_EVERY
# Steps after a coordinator is back, in which a late effect of its absence would show.
AFTERMATH = 2 * SAVE_EVERY
KILL_EVERY = 15.0
HANG_SECONDS = 5
PARTS_OF_RECOVERY = ["launch_seconds", "ready_seconds", "start_seconds", "step_seconds"]


class Bench:
    """What all parts share."""

    def __init__(self, arguments):
        self.work = Path(arguments.work).absolute()
        self.program = Path(arguments.baton).absolute()
        self.goodput_seconds = arguments.goodput_seconds
        self.seed = arguments.seed
        self.recipe = self.work / "recipe.toml"
        self.seen = {}

    def prepare(self):
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir(parents=True)
        text = RECIPE.replace("DIGITS", str(Path(DIGITS).absolute()))
        self.recipe.write_text(text, encoding="utf-8")

    def baton(self, *settings):
        return Baton(self.work / "baton", self.program, self.recipe, settings)

    def torch(self):
        return Torch(self.work / "torchrun")

    def measure(self, what, part, job, number):
        """Runs one part of one side, and notes what it found."""
        job.start()
        found = part(job, number)
        job.kill()
        shutil.rmtree(job.folder)
        for key, value in found.items():
            self.seen.setdefault(f"{job.name} {what}: {key}", []).append(value)
        say(f"{what}, round {number}, {job.name}: " + describe(found))

    def median(self, name):
        """None if that was not measured."""
        values = self.seen.get(name)
        return round(statistics.median(values), 2) if values else None


def say(text):
    print(f"bench-recovery: {text}", file=sys.stderr, flush=True)


def describe(found):
    def number(value):
        return str(value) if isinstance(value, int) else f"{value:.2f}"

    return ", ".join(f"{key} {number(value)}" for key, value in found.items())


def run_until_kill(job, number):
    """Trains until the middle of a step, in each round another one after a checkpoint."""
    job.wait_for_number(WARM_UP + number % SAVE_EVERY)
    step = typical_gap(job.steps[FIRST:])
    time.sleep(step / 2)
    return step


def recovery(job, since):
    """Numbers of the recovery from what happened at the time `since`."""
    job.look()
    last = job.steps[-1]
    following = job.wait_for_next_life(last.life)
    # Of those made before, once more; a step in the middle of which it was killed is not counted.
    before = max(step.number for step in job.steps if step.life == last.life)
    further = job.wait_for(
        lambda step: step.life != last.life and step.number > before, "step beyond those made before"
    )
    return {
        "seconds": following.when - since,
        "seconds until beyond": further.when - since,
        "steps lost": before + 1 - following.number,
    }


def parts_of_recovery(job):
    """What the coordinator tells of the last recovery, once it has heard of its first step."""
    job.wait_for_number(job.steps[-1].number + 1)
    told = job.status()["recoveries"][-1]
    parts = {f"its {part.replace('_', ' ')}": told[part] for part in PARTS_OF_RECOVERY}
    return parts | {"its steps lost": told["lost_steps"]}


def rank_kill(job, number):
    step = run_until_kill(job, number)
    found = recovery(job, kill_rank(job, number % 2)) | {"step": step}
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
    before, old = len(job.steps), job.child("serve")
    processes.kill([old])
    job.wait_for(lambda _: job.serving() not in (None, old), "new coordinator")
    job.wait_for_number(job.steps[-1].number + AFTERMATH)
    around = job.steps[before - 1 :]
    if job.steps[-1].life != job.steps[0].life:
        say("coordinator-kill: the ranks were started again, training has paused")
    typical = typical_gap(calm)
    return {
        "gap ratio": max(gaps(around)) / typical,
        "gap ratio of as many steps before": max(gaps(calm[-len(around) :])) / typical,
        "longest gap": max(gaps(around)),
        "step": typical,
    }


def calm_seconds(job):
    """Seconds that some undisturbed steps take from now on, and how many they are."""
    job.look()
    first = job.wait_for_number(job.steps[-1].number + SAVE_EVERY if job.steps else WARM_UP)
    last = job.wait_for_number(first.number + CALM)
    return last.when - first.when, last.number - first.number


def kill_for(job, seconds, seed):
    """Kills a rank every now and then; how many times."""
    victims = random.Random(seed)
    began = time.monotonic()
    kills = 0
    while kills * KILL_EVERY < seconds:
        kill_rank(job, victims.randrange(2))
        kills += 1
        time.sleep(max(0.0, began + min(kills * KILL_EVERY, seconds) - time.monotonic()))
    return kills


def goodput(job, seconds, seed):
    """Share of the time that would have sufficed for the same steps without kills, in percent."""
    calm = [calm_seconds(job)]
    job.look()
    first, began = job.steps[-1], time.time()
    kills = kill_for(job, seconds, seed)
    took = time.time() - began
    job.look()
    # The last one told, not the furthest: what was lost and not made again is of no use.
    useful = job.steps[-1].number - first.number
    among_kills = job.steps[job.steps.index(first) :]
    # The machine may be faster or slower than before.
    calm.append(calm_seconds(job))
    step = sum(span for span, _ in calm) / sum(count for _, count in calm)
    recoveries = [recovery_seconds(told) for told in job.status()["recoveries"]]
    return {
        "percent": 100 * useful * step / took,
        "percent by its pauses": 100 * (1 - pauses(among_kills) / took),
        "seconds": took,
        "kills": kills,
        "useful steps": useful,
        "step": step,
        "its seconds of a recovery": statistics.median(recoveries),
    }


def pauses(steps):
    """Seconds lost between the last step of one life and the first of the next: not to be shifted by a machine that is
    slower now than before, but blind to steps that are slow or made again."""
    typical = typical_gap(steps)
    pairs = zip(steps, steps[1:])
    return sum(b.when - a.when - typical for a, b in pairs if a.life != b.life)


def recovery_seconds(told):
    return sum(told[part] or 0.0 for part in PARTS_OF_RECOVERY)


def sigstop(job, number):
    step = run_until_kill(job, number)
    found = recovery(job, stop_rank(job, number % 2))
    beyond = {"seconds beyond the deadline": found["seconds"] - HANG_SECONDS}
    return beyond | found | {"step": step} | parts_of_recovery(job)


def measure_rank_kill(bench, number):
    bench.measure("rank-kill", rank_kill, bench.baton(), number)
    bench.measure("rank-kill", rank_kill, bench.torch(), number)


def measure_all_kill(bench, number):
    bench.measure("all-kill", all_kill, bench.baton(), number)
    bench.measure("all-kill", all_kill, bench.torch(), number)


def measure_coordinator_kill(bench, number):
    bench.measure("coordinator-kill", coordinator_kill, bench.baton(), number)


def measure_sigstop(bench, number):
    job = bench.baton(f"cluster.hang_seconds={HANG_SECONDS}")
    bench.measure("sigstop", sigstop, job, number)


def measure_goodput(bench, number):
    """Once: it is long, and holds many kills."""
    if number > 1:
        return
    say(f"goodput, seed {bench.seed}")

    def part(job, _):
        return goodput(job, bench.goodput_seconds, bench.seed)

    bench.measure("goodput", part, bench.baton(), number)


PARTS = {
    "rank-kill": measure_rank_kill,
    "all-kill": measure_all_kill,
    "coordinator-kill": measure_coordinator_kill,
    "sigstop": measure_sigstop,
    "goodput": measure_goodput,
}


def report(bench):
    for name, values in bench.seen.items():
        spread = f"({min(values):.2f} to {max(values):.2f})" if len(values) > 1 else ""
        print(f"  {name:60} {statistics.median(values):8.2f}  {spread}")
    results = {
        "rank_kill_seconds": bench.median("baton rank-kill: seconds"),
        "rank_kill_lost_steps": bench.median("baton rank-kill: steps lost"),
        "torchrun_seconds": bench.median("torchrun rank-kill: seconds"),
        "torchrun_lost_steps": bench.median("torchrun rank-kill: steps lost"),
        "all_kill_seconds": bench.median("baton all-kill: seconds"),
        "all_kill_lost_steps": bench.median("baton all-kill: steps lost"),
        "coordinator_kill_gap_ratio": bench.median("baton coordinator-kill: gap ratio"),
        "goodput_percent": bench.median("baton goodput: percent"),
        "sigstop_seconds": bench.median("baton sigstop: seconds beyond the deadline"),
    }
    print(f"RESULT {json.dumps(results)}")


def read_arguments():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--baton", required=True)
    parser.add_argument("--work", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--goodput-seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    parser.add_argument("--only", action="append", choices=PARTS)
    arguments = parser.parse_args()
    if arguments.rounds < 1 or arguments.goodput_seconds <= 0:
        parser.error("--rounds must be at least 1, --goodput-seconds above 0")
    return arguments


def interrupt_on_signals():
    """Whatever asks this process to end counts as Ctrl-C."""

    def interrupt(number, frame):
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)


def end_all():
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    processes.end_all()


def measure_all(bench, arguments):
    for number in range(1, arguments.rounds + 1):
        for name, measure in PARTS.items():
            if name in (arguments.only or PARTS):
                measure(bench, number)


def main():
    arguments = read_arguments()
    bench = Bench(arguments)
    bench.prepare()
    processes.adopt_orphans()
    interrupt_on_signals()
    interrupted = False
    try:
        measure_all(bench, arguments)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        end_all()
    # After a failure they stay, to be looked at.
    shutil.rmtree(bench.work)
    if interrupted:
        say("interrupted; everything it started is ended")
        sys.exit(130)
    report(bench)


if __name__ == "__main__":
    main()
