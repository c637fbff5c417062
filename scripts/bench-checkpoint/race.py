"""Compares Baton's checkpoints with torch.distributed.checkpoint; see run.sh.

    race.py --baton PROGRAM --work DIR --rounds N

Baton's side is the complete program, `baton up` with two ranks, with the numbers that it prints for users.
"""

import json
import re
import shutil
import signal
import statistics
import subprocess
import time
from pathlib import Path

import common
from jobs import Baton, Job

HERE = Path(__file__).parent
SAVES = 5
# Updates between saves in the run that measures their total cost.
OFTEN = 10
# The same as in torch_side.py: ResNet-50, momentum, average, 8 images of 32 px per rank.
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
SAVED = re.compile(r"checkpoint (\S+) saved in ")
RESUMED = re.compile(r"resumed in ([\d.]+) s ")
STARTED = re.compile(r"training from fresh weights")
EVALUATED = re.compile(r"epoch 2: validation")


class Up(Baton):
    """A `baton up` of which messages are read instead of steps."""

    unread = ()
    output_path = Job.output_path

    def next(self, pattern):
        self.unread = [*self.unread, *map(json.loads, self.lines())]
        while self.unread:
            event = self.unread.pop(0)
            if found := pattern.search(event.get("message", "")):
                return event["unix_millis"] / 1000, found
        return None

    def find(self, pattern):
        """Waits for the next message that matches; returns its time in seconds since 1970 and the match."""
        return self.wait_until(lambda: self.next(pattern), f"`{pattern.pattern}`")

    def saved(self):
        """Waits for the next checkpoint and returns its status, as the numbers in the message are rounded."""
        _, found = self.find(SAVED)
        checkpoint = self.status()["checkpoint"]
        if checkpoint["name"] != found[1]:
            common.fail(f"the status shows {checkpoint['name']} after {found[1]} was saved; {self.logs()}")
        return checkpoint

    def end(self):
        """Drains; returns the seconds until the last checkpoint was reported."""
        began = time.time()
        self.process.send_signal(signal.SIGTERM)
        when, _ = self.find(SAVED)
        self.finish()
        return when - began

    def finish(self):
        self.wait_until(lambda: self.process.poll() is not None, "end")
        self.unread, _ = (), self.lines()


def save(up):
    up.start()
    # The first one allocates its memory.
    saves = [up.saved() for _ in range(SAVES + 1)][1:]
    return {
        "stall": statistics.median(save["stall_seconds"] for save in saves),
        "durable": statistics.median(save["save_seconds"] for save in saves),
        "emergency": up.end(),
    }


def restore(up, ranks):
    up.world_size = ranks
    up.start()
    _, found = up.find(RESUMED)
    up.end()
    return {"restore": float(found[1])}


def epochs(baton, folder, every_steps):
    """Seconds of two epochs of the digits run, with evaluation."""
    settings = [f"checkpoint.every_steps={every_steps}", "checkpoint.every_epochs=0"]
    settings += ["train.epochs=2", "evaluation.every_epochs=2"]
    up = Up(folder, baton, "recipes/digits_cpu.toml", settings)
    up.start()
    began, _ = up.find(STARTED)
    ended, _ = up.find(EVALUATED)
    up.finish()
    shutil.rmtree(folder)
    return {"epochs": ended - began}


def torch(folder, *options):
    command = [".venv-parity/bin/python", HERE / "torch_side.py", "--folder", folder, *options]
    try:
        printed = subprocess.check_output([str(part) for part in command], timeout=common.TIMEOUT_SECONDS)
    except subprocess.SubprocessError as error:
        common.fail(f"PyTorch's side failed, see above: {error}")
    return json.loads(printed.splitlines()[-1])


def measure_all(baton, work, rounds):
    """Returns the seconds of each round for each measured name."""
    recipe = work / "recipe.toml"
    recipe.write_text(RECIPE.replace("DIGITS", str(Path(DIGITS).absolute())), encoding="utf-8")
    seen = {}

    def note(side, what, numbers):
        for key, value in numbers.items():
            seen.setdefault(f"{side} {what}{key}", []).append(value)

    for number in range(1, rounds + 1):
        common.say(f"round {number} of {rounds}")
        up, folder = Up(work / "baton", baton, recipe), work / "torch"
        note("baton", "", save(up))
        note("torch", "", torch(folder, "--saves", SAVES, "--steps", 10))
        for ranks in (2, 1):
            note("baton", f"{ranks} ranks ", restore(up, ranks))
            note("torch", f"{ranks} ranks ", torch(folder, "--restore", "--ranks", ranks))
        shutil.rmtree(up.folder)
        shutil.rmtree(folder)
        note("baton", "no saves, ", epochs(baton, work / "epochs", 0))
        note("baton", f"a save every {OFTEN} updates, ", epochs(baton, work / "epochs", OFTEN))
    return seen


def report(seen):
    median = {name: statistics.median(values) for name, values in seen.items()}
    for name, values in sorted(seen.items()):
        print(f"  {name:38} {median[name]:.3f} s  ({min(values):.3f} to {max(values):.3f})")

    def ratio(what):
        return median[f"baton {what}"] / median[f"torch {what}"]

    # One save in a hundred updates costs too little to measure; more frequent saves reduce the effect of noise.
    often = median[f"baton a save every {OFTEN} updates, epochs"] / median["baton no saves, epochs"]
    results = {
        "stall_ratio": round(ratio("stall"), 3),
        "durable_ratio": round(ratio("durable"), 3),
        "restore_ratio": round(max(ratio("2 ranks restore"), ratio("1 ranks restore")), 3),
        "overhead_percent": round(100 * (often - 1) * OFTEN / 100, 2),
        "emergency_seconds": round(median["baton emergency"], 2),
    }
    print(f"RESULT {json.dumps(results)}")


def main():
    arguments = common.read_arguments(common.parser(__doc__))
    with common.working_in(arguments.work):
        seen = measure_all(arguments.baton, arguments.work, arguments.rounds)
    report(seen)


if __name__ == "__main__":
    main()
