"""Races Baton's checkpoints against torch.distributed.checkpoint; see run.sh.

    race.py --baton PROGRAM --work DIR [--rounds N]

Baton's side is the whole product, `baton up` with two ranks, and its numbers are what it tells its users.
"""

import argparse
import json
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
SAVES = 5
# Updates between saves where it is measured what they cost in all.
OFTEN = 10
# Like torch_side.py's: ResNet-50, momentum, average, 8 images of 32 px per rank.
RECIPE = """
name = "bench-checkpoint"
model = { arch = "resnet50", num_classes = 10 }
data = { train = "DIGITS", val = "DIGITS" }
train = { epochs = 1000, global_batch = 16, resolution = 32, virtual_ranks = 2 }
optimizer = { kind = "sgd", momentum = 0.9 }
ema = { decay = 0.999 }
schedule = { kind = "constant", lr = 0.001 }
evaluation = { every_epochs = 1000 }
checkpoint = { every_epochs = 0, every_steps = 10, keep_last = 2, keep_best = false }
cluster = { device = "cpu" }
"""
DIGITS = "assets/digits/digits-val.beton"
SAVED = re.compile(r"checkpoint (\S+) saved in ([\d.]+) s; training stood still for (\d+) ms")
RESUMED = re.compile(r"resumed in ([\d.]+) s ")
STARTED = re.compile(r"training from fresh weights")
EVALUATED = re.compile(r"epoch 2: validation")


class Up:
    """A running `baton up`."""

    def __init__(self, baton, recipe, run_dir, ranks=2, options=()):
        command = [baton, "up", recipe, "--ranks", str(ranks), "--run-dir", run_dir, "--json"]
        command += ["--listen", "127.0.0.1:0", *options]
        errors = open(Path(run_dir).with_suffix(".log"), "a", encoding="utf-8")
        self.process = subprocess.Popen(
            [str(part) for part in command], stdout=subprocess.PIPE, stderr=errors, text=True
        )

    def messages(self):
        for line in self.process.stdout:
            message = json.loads(line).get("message")
            if message:
                yield time.perf_counter(), message

    def find(self, pattern):
        for when, message in self.messages():
            if found := pattern.search(message):
                return when, found
        sys.exit(f"bench-checkpoint: baton ended without {pattern.pattern!r}")

    def end(self):
        """Drains; seconds until the last checkpoint was told."""
        began = time.perf_counter()
        self.process.send_signal(signal.SIGTERM)
        when, _ = self.find(SAVED)
        self.finish()
        return when - began

    def finish(self):
        for _ in self.messages():
            pass
        self.process.wait()


def save(baton, recipe, run_dir):
    up = Up(baton, recipe, run_dir)
    stalls, durables = [], []
    for _ in range(SAVES + 1):
        _, found = up.find(SAVED)
        durables.append(float(found[2]))
        stalls.append(float(found[3]) / 1000)
    emergency = up.end()
    # The first one makes its memory.
    return {
        "stall": statistics.median(stalls[1:]),
        "durable": statistics.median(durables[1:]),
        "emergency": emergency,
    }


def restore(baton, recipe, run_dir, ranks):
    up = Up(baton, recipe, run_dir, ranks)
    _, found = up.find(RESUMED)
    up.end()
    return {"restore": float(found[1])}


def epochs(baton, run_dir, every_steps):
    """Seconds that two epochs of the digits run take, evaluation included."""
    settings = [f"checkpoint.every_steps={every_steps}", "checkpoint.every_epochs=0"]
    settings += ["train.epochs=2", "evaluation.every_epochs=2"]
    options = [option for setting in settings for option in ("--set", setting)]
    up = Up(baton, "recipes/digits_cpu.toml", run_dir, options=options)
    began, _ = up.find(STARTED)
    ended, _ = up.find(EVALUATED)
    up.finish()
    shutil.rmtree(run_dir)
    return {"epochs": ended - began}


def torch(folder, *options):
    command = [".venv-parity/bin/python", HERE / "torch_side.py", "--folder", folder, *options]
    printed = subprocess.run([str(part) for part in command], check=True, stdout=subprocess.PIPE)
    return json.loads(printed.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--baton", required=True)
    parser.add_argument("--work", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    work = Path(arguments.work)
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    recipe = work / "recipe.toml"
    recipe.write_text(RECIPE.replace("DIGITS", str(Path(DIGITS).absolute())), encoding="utf-8")

    seen = {}

    def note(side, what, numbers):
        for key, value in numbers.items():
            seen.setdefault(f"{side} {what}{key}", []).append(value)

    for number in range(1, arguments.rounds + 1):
        print(f"bench-checkpoint: round {number} of {arguments.rounds}", file=sys.stderr)
        run_dir, folder = work / f"baton-{number}", work / f"torch-{number}"
        note("baton", "", save(arguments.baton, recipe, run_dir))
        note("torch", "", torch(folder, "--saves", SAVES, "--steps", 10))
        for ranks in (2, 1):
            note("baton", f"{ranks} ranks ", restore(arguments.baton, recipe, run_dir, ranks))
            note("torch", f"{ranks} ranks ", torch(folder, "--restore", "--ranks", ranks))
        shutil.rmtree(run_dir)
        shutil.rmtree(folder)
        note("baton", "no saves, ", epochs(arguments.baton, run_dir, 0))
        note("baton", f"a save every {OFTEN} updates, ", epochs(arguments.baton, run_dir, OFTEN))

    median = {name: statistics.median(values) for name, values in seen.items()}
    for name, values in sorted(seen.items()):
        print(f"  {name:38} {median[name]:.3f} s  ({min(values):.3f} to {max(values):.3f})")

    def ratio(what):
        return median[f"baton {what}"] / median[f"torch {what}"]

    # One in a hundred updates is too cheap to see: so many times as often, the noise weighs less.
    often = median[f"baton a save every {OFTEN} updates, epochs"] / median["baton no saves, epochs"]
    results = {
        "stall_ratio": round(ratio("stall"), 3),
        "durable_ratio": round(ratio("durable"), 3),
        "restore_ratio": round(max(ratio("2 ranks restore"), ratio("1 ranks restore")), 3),
        "overhead_percent": round(100 * (often - 1) * OFTEN / 100, 2),
        "emergency_seconds": round(median["baton emergency"], 2),
    }
    print(f"RESULT {json.dumps(results)}")


if __name__ == "__main__":
    main()
