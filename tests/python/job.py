"""Jobs by the Python package, with the real programs: job.py start|attach RECIPE RUN_DIR."""

import os
import signal
import sys

import baton

what, recipe, run_dir = sys.argv[1:]

if what == "start":
    # Until somebody drains it.
    endless = {"train.epochs": 1_000_000, "checkpoint.every_epochs": 1_000, "evaluation.every_epochs": 1_000}
    job = baton.up(recipe, set=endless, run_dir=run_dir, ranks=2)
    print(next(event["message"] for event in job.watch() if event["kind"] == "training_started"), flush=True)
    # As a kernel that is restarted.
    os.kill(os.getpid(), signal.SIGKILL)

job = baton.attach(run_dir)
try:
    baton.up(recipe, run_dir=run_dir)
except baton.JobError as error:
    print(error)
job.checkpoint()
saved = next(event["step"] for event in job.watch() if event["kind"] == "saved")
job.pause("lunch")
print(job.status()["pause"]["reason"])
job.drain("enough")
print(job.wait(timeout=60)["reason"])
run = baton.Run(run_dir)
steps = [row["step"] for row in run.metrics()]
assert steps and steps == sorted(set(steps)), steps
assert run.events()[-1]["id"] > 1
drained = run.checkpoints()[0]
assert drained["step"] >= saved, (drained, saved)
