"""What the benches start: how, whom it consists of, what it tells, and which steps it has finished."""

import json
import os
import re
import statistics
import subprocess
import sys
import time
from datetime import datetime
from typing import NamedTuple

import common
import processes

LOOK = 0.02


class Step(NamedTuple):
    """A finished step: seconds since 1970, its number, and which start of the ranks made it."""

    when: float
    number: int
    life: int


class Job:
    """A job that trains until it is ended, and tells what it does in a file, every finished step above all."""

    def __init__(self, folder):
        self.folder = folder
        self.folder.mkdir(parents=True)
        self.process = None
        self.steps = []
        self._read = 0

    def start(self):
        """Starts it, or goes on with it."""
        with open(self.folder / "output", "ab") as output, open(self.folder / "errors", "ab") as errors:
            command = [str(part) for part in self.command()]
            environment = os.environ | self.environment()
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, env=environment
            )

    def kill(self):
        """`kill -9` of all its processes at once."""
        processes.kill(processes.family(self.process.pid))
        self.process.wait()

    def told_in(self):
        return self.folder / "output"

    def lines(self):
        """What it has told since the last call."""
        path = self.told_in()
        if not path.exists():
            return []
        with open(path, "rb") as told:
            told.seek(self._read)
            # The last line may not be complete yet.
            text = b"".join(told.read().rpartition(b"\n")[:2])
        self._read += len(text)
        return text.decode(errors="replace").splitlines()

    def look(self):
        """Takes note of the steps finished since the last look."""
        for line in self.lines():
            if step := self.step_in(line):
                self.note(step)

    def note(self, step):
        """Every step counts: without one, a gap would be too long, and a lost step might be missed."""
        last = self.steps[-1] if self.steps else None
        if last and last.life == step.life and step.number > last.number + 1:
            common.fail(
                f"step {step.number} of {self.name} was told after step {last.number}: steps are faster than they are "
                "told (baton tells one every 100 ms); slow them down by larger images or batches in RECIPE of race.py "
                f"and in torch_side.py; {self.logs()}"
            )
        self.steps.append(step)

    def wait_until(self, condition, what):
        """Waits until the condition holds; what it gives then."""
        deadline = time.monotonic() + common.PATIENCE
        while True:
            # In this order: its last words come before its end.
            has_ended = self.process.poll() is not None
            if found := condition():
                return found
            if has_ended:
                common.fail(f"{self.name} ended while {what} was awaited; {self.logs()}")
            if time.monotonic() > deadline:
                common.fail(f"no {what} of {self.name} in {common.PATIENCE} s; {self.logs()}")
            time.sleep(LOOK)

    def wait_for(self, wanted, what):
        """Waits until one of the finished steps is `wanted`; the first that is."""

        def first():
            self.look()
            return next(filter(wanted, self.steps), None)

        return self.wait_until(first, what)

    def wait_for_number(self, number):
        return self.wait_for(lambda step: step.number >= number, f"step {number}")

    def logs(self):
        return f"its logs are in {self.folder}"


class Baton(Job):
    """The whole product, `baton up`.

    What it prints tells a step every ten seconds, what its coordinator answers is gone while that is dead. So each
    step is read where the agent logs rank 0's word of it, with a time stamp to the microsecond.
    """

    name = "baton"
    TOLD = re.compile(
        r"^(\S+Z) +DEBUG .*generation: Generation\((\d+)\), news: Stepped\(StepNews \{ step: Step\((\d+)\)"
    )

    def __init__(self, folder, program, recipe, settings=()):
        super().__init__(folder)
        self.program = program
        self.recipe = recipe
        self.settings = settings
        self.world_size = 2
        self.run_dir = folder / "run"

    def command(self):
        options = [word for setting in self.settings for word in ("--set", setting)]
        command = [self.program, "up", self.recipe, "--ranks", self.world_size, "--run-dir", self.run_dir]
        return command + ["--listen", "127.0.0.1:0", "--json", *options]

    def environment(self):
        return {"RUST_LOG": "info,baton_worker::agent=debug"}

    def told_in(self):
        return self.run_dir / "logs" / "agent.log"

    def step_in(self, line):
        if found := self.TOLD.match(line):
            when = datetime.fromisoformat(found[1]).timestamp()
            return Step(when, int(found[3]), int(found[2]))
        return None

    def child(self, role):
        """The coordinator, whose role is `serve`, or the `agent`."""
        for pid in processes.children(self.process.pid):
            if processes.arguments_of(pid)[1:2] == [role]:
                return pid
        return None

    def coordinator(self):
        return self.child("serve") or common.fail(f"{self.name} has no coordinator to be hit; {self.logs()}")

    def ranks(self):
        """In the order in which they were started."""
        agent = self.child("agent")
        ranks = processes.children(agent) if agent else []
        return [pid for pid in ranks if processes.arguments_of(pid)[1:2] == ["rank"]]

    def serving(self):
        """The process that says it serves as coordinator."""
        try:
            return json.loads((self.run_dir / "coordinator.json").read_text(encoding="utf-8"))["pid"]
        except (OSError, ValueError):
            return None

    def status(self):
        command = [self.program, "status", "--json", "--run-dir", self.run_dir]
        return json.loads(subprocess.check_output(command, timeout=common.PATIENCE))


class Torch(Job):
    """torchrun with two workers."""

    name = "torchrun"
    TOLD = re.compile(r"^([\d.]+) step (\d+) of process (\d+)$")

    def __init__(self, folder, script):
        super().__init__(folder)
        self.script = script

    def command(self):
        # torch.distributed.run is what torchrun calls; the script's first line may name another Python.
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", 2, "--max-restarts", 10]
        return command + [self.script, "--checkpoint", self.folder / "checkpoint.pt"]

    def environment(self):
        # Without the second, torch 2.11 gives restarted workers the store of those before, with their addresses in
        # it, and a third of the restarts hung in gloo. See pytorch/pytorch#135712.
        return {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

    def step_in(self, line):
        if found := self.TOLD.match(line):
            return Step(float(found[1]), int(found[2]), int(found[3]))
        return None

    def ranks(self):
        """In the order in which they were started."""
        workers = processes.children(self.process.pid)
        return [pid for pid in workers if str(self.script) in processes.arguments_of(pid)]


def gaps(steps):
    """Seconds between finished steps."""
    return [later.when - earlier.when for earlier, later in zip(steps, steps[1:])]


def typical_gap(steps):
    return statistics.median(gaps(steps))


def signal_rank(job, index, number):
    """Sends a signal to a rank; when that was."""
    ranks = job.ranks()
    if len(ranks) <= index:
        common.fail(f"{job.name} has {len(ranks)} of 2 ranks where one is to be hit; {job.logs()}")
    when = time.time()
    os.kill(ranks[index], number)
    return when
