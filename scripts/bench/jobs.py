"""The jobs that the benches start: their commands, processes, output and finished steps."""

import itertools
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

POLL_INTERVAL_SECONDS = 0.02


class Step(NamedTuple):
    """A finished step: time in seconds since 1970, number, and the generation or process that made it."""

    when: float
    number: int
    incarnation: int


class Job:
    """A job that trains until it is ended and writes its output, with every finished step, to a file."""

    def __init__(self, folder):
        self.folder = folder
        self.folder.mkdir(parents=True)
        self.process = None
        self.steps = []
        self._read = 0

    def start(self):
        """Starts or resumes the job."""
        with open(self.folder / "output", "ab") as output, open(self.folder / "errors", "ab") as errors:
            command = [str(part) for part in self.command()]
            environment = os.environ | self.environment()
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, env=environment
            )

    def kill(self):
        """Sends `kill -9` to all its processes at once."""
        processes.kill(processes.family(self.process.pid))
        self.process.wait()

    def output_path(self):
        return self.folder / "output"

    def lines(self):
        """Returns the complete lines of output since the last call."""
        path = self.output_path()
        if not path.exists():
            return []
        with open(path, "rb") as output:
            output.seek(self._read)
            # The last line may not be complete yet.
            text = b"".join(output.read().rpartition(b"\n")[:2])
        self._read += len(text)
        return text.decode(errors="replace").splitlines()

    def read_steps(self):
        """Reads the steps finished since the last call."""
        for line in self.lines():
            if step := self.step_in(line):
                self.add_step(step)

    def add_step(self, step):
        """Adds a step. None may be missing: a gap would seem too long, and a lost step might not be counted."""
        last = self.steps[-1] if self.steps else None
        if last and last.incarnation == step.incarnation and step.number > last.number + 1:
            common.fail(
                f"step {step.number} of {self.name} was reported after step {last.number}: steps are faster than "
                "reports (baton reports one every 100 ms); use larger images or batches in RECIPE of race.py "
                f"and in torch_side.py; {self.logs()}"
            )
        self.steps.append(step)

    def wait_until(self, condition, what):
        """Waits until the condition returns a true value, and returns it."""
        deadline = time.monotonic() + common.TIMEOUT_SECONDS
        while True:
            # In this order, as the last output is written before the process ends.
            has_ended = self.process.poll() is not None
            if found := condition():
                return found
            if has_ended:
                common.fail(f"{self.name} ended during the wait for {what}; {self.logs()}")
            if time.monotonic() > deadline:
                common.fail(f"no {what} of {self.name} in {common.TIMEOUT_SECONDS} s; {self.logs()}")
            time.sleep(POLL_INTERVAL_SECONDS)

    def wait_for(self, matches, what):
        """Waits until a finished step matches, and returns the first that does."""

        def first():
            self.read_steps()
            return next(filter(matches, self.steps), None)

        return self.wait_until(first, what)

    def wait_for_number(self, number):
        return self.wait_for(lambda step: step.number >= number, f"step {number}")

    def logs(self):
        return f"its logs are in {self.folder}"


class Baton(Job):
    """The complete program, `baton up`.

    Its output has only a step every ten seconds, and the coordinator's status is not available while the coordinator is
    dead. So steps are read from the agent's log of rank 0's step reports, with timestamps in microseconds.
    """

    name = "baton"
    REPORTED_STEP = re.compile(
        r"^(\S+Z) +DEBUG .*generation: Generation\((\d+)\), report: Stepped\(StepReport \{ step: Step\((\d+)\)"
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
        return [*command, "--listen", "127.0.0.1:0", "--json", *options]

    def environment(self):
        return {"RUST_LOG": "info,baton_worker::agent=debug"}

    def output_path(self):
        return self.run_dir / "logs" / "agent.log"

    def step_in(self, line):
        if found := self.REPORTED_STEP.match(line):
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
        return self.child("serve") or common.fail(f"{self.name} has no coordinator to signal; {self.logs()}")

    def ranks(self):
        """Process ids of the ranks, in the order in which they were started."""
        agent = self.child("agent")
        ranks = processes.children(agent) if agent else []
        return [pid for pid in ranks if processes.arguments_of(pid)[1:2] == ["rank"]]

    def serving(self):
        """The process id in the coordinator's file."""
        try:
            return json.loads((self.run_dir / "coordinator.json").read_text(encoding="utf-8"))["pid"]
        except (OSError, ValueError):
            return None

    def agent(self):
        return self.child("agent") or common.fail(f"{self.name} has no agent to signal; {self.logs()}")

    def events(self):
        """The events that `baton up --json` has printed."""
        lines = (self.folder / "output").read_text(encoding="utf-8").splitlines(keepends=True)
        records = [json.loads(line) for line in lines if line.endswith("\n")]
        return [record for record in records if record["type"] == "event"]

    def command_line(self, name):
        """Runs a command of `baton` for this job; returns its JSON."""
        command = [self.program, name, "--json", "--run-dir", self.run_dir]
        return json.loads(subprocess.check_output(command, timeout=common.TIMEOUT_SECONDS))

    def status(self):
        return self.command_line("status")


class Torch(Job):
    """torchrun with two workers by default."""

    name = "torchrun"
    REPORTED_STEP = re.compile(r"^([\d.]+) step (\d+) of process (\d+)$")

    def __init__(self, folder, script, *flags):
        super().__init__(folder)
        self.script, self.flags = script, flags
        self.world_size = 2

    def command(self):
        # torch.distributed.run is what torchrun calls; the script's first line may name another Python.
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", self.world_size, "--max-restarts", 10]
        return [*command, self.script, "--checkpoint", self.folder / "checkpoint.pt", *self.flags]

    def environment(self):
        # Without the second variable, torch 2.11 gives restarted workers the store of the previous workers, with their
        # addresses in it, and a third of the restarts hung in gloo. See pytorch/pytorch#135712.
        return {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

    def step_in(self, line):
        if found := self.REPORTED_STEP.match(line):
            return Step(float(found[1]), int(found[2]), int(found[3]))
        return None

    def ranks(self):
        """Process ids of the ranks, in the order in which they were started."""
        workers = processes.children(self.process.pid)
        return [pid for pid in workers if str(self.script) in processes.arguments_of(pid)]


def gaps(steps):
    """Seconds between finished steps."""
    return [later.when - earlier.when for earlier, later in itertools.pairwise(steps)]


def typical_gap(steps):
    return statistics.median(gaps(steps))


def signal_rank(job, index, number):
    """Sends a signal to a rank and returns the time."""
    ranks = job.ranks()
    if len(ranks) <= index:
        common.fail(f"{job.name} has {len(ranks)} of 2 ranks when rank {index} is to be signalled; {job.logs()}")
    when = time.time()
    os.kill(ranks[index], number)
    return when
