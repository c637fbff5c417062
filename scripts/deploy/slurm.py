#!/usr/bin/env python3
"""Checks deploy/slurm/baton.sbatch on a real Slurm: scripts/deploy/slurm.py [FOLDER OF BATON'S PROGRAMS]

The controller and its nodes run in separate namespaces, each node with a name and an address as on separate machines,
and end with this script. Jobs train a tiny model on handwritten digits; they are drained, cancelled, preempted, and lose
agents and nodes. Requires root and Slurm.

No scenario depends on how fast this machine is: a job that is watched has no end until it is drained or cancelled, and
the log, which keeps every event, says what has happened.
"""

import concurrent.futures
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "deploy/slurm/baton.sbatch"
PROGRAMS = ["munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel", "ip"]
# All processes in the namespaces end with the first one.
NAMESPACES = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
NODES = 15
# Exit code that scripts/deploy/check.sh treats as a skipped check.
SKIPPED = 77
# Limit for each wait, seconds; reached only when something is broken.
TIMEOUT_SECONDS = 600

# The model of tests/src/lib.rs, without an end. The schedule does not depend on the number of epochs, so a job with
# an end has the same weights.
RECIPE = """
name = "story"
seed = 7
model = { arch = "linear", num_classes = 10 }
train = { epochs = 1000000, global_batch = 64, resolution = 8, virtual_ranks = 4 }
optimizer = { kind = "sgd", momentum = 0.9 }
schedule = { kind = "constant", lr = 0.1 }
checkpoint = { every_epochs = 50, keep_best = false }
evaluation = { every_epochs = 1000000, crop_ratio = 1.0 }
cluster = { device = "cpu", node_grace_seconds = 2.0, max_ranks = 2 }
augment = { flip = 0.0, crop_scale = [0.8, 1.0] }
data = { train = "DIGITS/digits-train.beton", val = "DIGITS/digits-val.beton" }
"""


def say(text):
    print(f"slurm: {text}", flush=True)


def run(*command, check=True, **options):
    ended = subprocess.run(command, capture_output=True, text=True, **options)
    if check and ended.returncode != 0:
        raise Broken(f"`{' '.join(map(str, command))}` ended with {ended.returncode}: {ended.stdout}{ended.stderr}")
    return ended


class Broken(Exception):
    """A failed check, with a description."""


# --- On this machine -----------------------------------------------------------------------------


def main():
    if sys.argv[1:2] == ["--inside"]:
        return inside(Path(sys.argv[2]), Path(sys.argv[3]))
    programs = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "target/debug").resolve()
    for name in ["baton", "baton-coordinator", "baton-worker"]:
        if not os.access(programs / name, os.X_OK):
            sys.exit(f"slurm: no program {programs / name}; run: make build")
    missing = cannot_run()
    if missing:
        say(f"nothing was checked: {missing}")
        return SKIPPED
    # Clean up after SIGTERM as after Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="baton-slurm-") as folder:
        try:
            return subprocess.call([*NAMESPACES, "--net", sys.executable, __file__, "--inside", folder, programs])
        except KeyboardInterrupt:
            say("interrupted; all started processes have been ended")
            return 130


def cannot_run():
    """Returns the reason why the check cannot run on this machine, or None."""
    # On Debian daemons and ip are not on the PATH of users.
    os.environ["PATH"] += ":/usr/sbin:/sbin"
    if os.geteuid() != 0 or Path("/proc/self/uid_map").read_text().split() != ["0", "0", "4294967295"]:
        return "namespaces and Slurm's daemons need root, and not only root of a user namespace"
    missing = [name for name in PROGRAMS if not shutil.which(name)]
    if missing:
        return f"{', '.join(missing)} are missing: scripts/deploy/setup.sh installs them"
    probe = run(*NAMESPACES, "--net", "true", check=False)
    if probe.returncode != 0:
        return f"namespaces cannot be created: {probe.stderr.strip()}"
    return None


# --- In separate namespaces ----------------------------------------------------------------------


def inside(folder, programs):
    os.environ |= {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "SLURM_CONF": str(folder / "slurm.conf"),
        "AWS_EC2_METADATA_DISABLED": "true",
        # One rank on each node, even if this machine has GPUs.
        "CUDA_VISIBLE_DEVICES": "",
        "RUST_LOG": "info",
    }
    (folder / "story.toml").write_text(RECIPE.replace("DIGITS", str(ROOT / "assets/digits")))
    os.chdir(folder)
    began = time.monotonic()
    try:
        slurm = Slurm(folder)
    except Broken as error:
        logs = [f"{path.name}:\n{path.read_text()[-3000:]}" for path in sorted(folder.glob("log/*ctld*"))]
        sys.exit("\n".join([f"slurm: Slurm does not start: {error}", *logs]))
    scenarios = [
        drained_and_continued,
        out_of_time,
        preempted,
        steps_signalled,
        cancelled,
        nodes_and_processes_lost,
        first_node_lost,
        too_few_ranks,
        bad_input,
    ]
    failures = 0
    with concurrent.futures.ThreadPoolExecutor(len(scenarios)) as pool:
        names = {pool.submit(scenario, slurm): scenario.__name__ for scenario in scenarios}
        for future in concurrent.futures.as_completed(names):
            if error := future.exception():
                failures += 1
                words = str(error) if isinstance(error, Broken) else repr(error)
                say(f"FAILED: {names[future]}: {words}")
    seconds = time.monotonic() - began
    say(f"{len(scenarios) - failures} of {len(scenarios)} scenarios passed, in {seconds:.0f} s")
    return 1 if failures else 0


class Slurm:
    """A controller and its nodes."""

    def __init__(self, folder):
        self.folder = folder
        self.nodes = {}
        for name in ["munge", "state", "spool", "log", "runs", "node"]:
            (folder / name).mkdir()
        folder.chmod(0o755)
        (folder / "munge").chmod(0o755)
        hosts = ["127.0.0.1 localhost", "10.78.0.254 controller", *(f"10.78.0.{i} n{i}" for i in range(1, NODES + 1))]
        (folder / "hosts").write_text("\n".join(hosts) + "\n")
        run(
            "sh",
            "-ec",
            f"""
            mount -t tmpfs tmpfs /run
            mount --bind {folder}/hosts /etc/hosts
            hostname controller
            ip link set lo up
            ip link add br0 type bridge
            ip address add 10.78.0.254/24 dev br0
            ip link set br0 up
        """,
        )
        key = folder / "munge/key"
        key.touch(0o600)
        key.write_bytes(os.urandom(128))
        (folder / "cgroup.conf").write_text(f"CgroupPlugin=cgroup/v1\nCgroupMountpoint={folder}/cgroup\n")
        (folder / "slurm.conf").write_text(self.configuration())
        at = {name: f"--{name}-file={folder}/munge/{name}" for name in ["key", "pid", "seed", "log"]}
        self.start("munged", "--foreground", f"--socket={folder}/munge/socket", *at.values())
        self.start("slurmctld", "-D")
        for index in range(1, NODES + 1):
            self.start_node(index)
        wait("all nodes are idle", lambda: run("sinfo", "-hpmain", "-o%D %t", check=False).stdout == f"{NODES} idle\n")
        say(f"{run('slurmctld', '-V').stdout.strip()} runs {NODES} nodes")

    def configuration(self):
        folder = self.folder
        return f"""
            ClusterName=check
            SlurmctldHost=controller
            SlurmUser=root
            # Seconds that a requeued job waits; the minimum.
            AuthInfo=socket={folder}/munge/socket,cred_expire=5
            ProctrackType=proctrack/linuxproc
            TaskPlugin=task/none
            SelectType=select/cons_tres
            SlurmdParameters=config_overrides
            MpiDefault=none
            KillWait=5
            MessageTimeout=3
            TCPTimeout=1
            SchedulerType=sched/builtin
            SchedulerParameters=batch_sched_delay=0,sched_interval=1
            PreemptType=preempt/partition_prio
            PreemptMode=REQUEUE
            SlurmctldParameters=preempt_send_user_signal
            StateSaveLocation={folder}/state
            SlurmdSpoolDir={folder}/spool/%n
            SlurmctldPidFile={folder}/slurmctld.pid
            SlurmdPidFile={folder}/spool/%n.pid
            SlurmctldLogFile={folder}/log/slurmctld.log
            SlurmdLogFile={folder}/log/%n.log
            NodeName=n[1-{NODES}] CPUs=2
            PartitionName=main Nodes=ALL Default=YES PriorityTier=1 GraceTime={TIMEOUT_SECONDS}
            PartitionName=urgent Nodes=ALL PriorityTier=2 PreemptMode=OFF
        """

    def start(self, *command):
        log = open(self.folder / f"log/{command[0]}.out", "a")
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def start_node(self, index):
        name = f"n{index}"
        (self.folder / "spool" / name).mkdir()
        # node/ is local to each node.
        begin = [f"hostname {name}", f"mount -t tmpfs tmpfs {self.folder}/node"]
        run(
            "sh",
            "-ec",
            f"""
            ip netns add {name}
            ip link add v{index} type veth peer name eth0 netns {name}
            ip link set v{index} master br0 up
            ip -n {name} address add 10.78.0.{index}/24 dev eth0
            ip -n {name} link set eth0 up
            ip -n {name} link set lo up
        """,
        )
        if index % 2 == 0:
            # As on a machine after Debian's installer.
            hosts = re.sub(rf"\S+ {name}\n", f"127.0.1.1 {name}\n", (self.folder / "hosts").read_text())
            (self.folder / "spool" / name / "hosts").write_text(hosts)
            begin.append(f"mount --bind {self.folder}/spool/{name}/hosts /etc/hosts")
        begin.append("exec slurmd -D")
        self.nodes[name] = self.start("nsenter", f"--net=/run/netns/{name}", *NAMESPACES, "sh", "-ec", "\n".join(begin))

    def lose(self, name):
        """Simulates a power failure of a node, and informs Slurm sooner than SlurmdTimeout."""
        self.nodes[name].kill()
        run("ip", "link", "set", f"v{name[1:]}", "down")
        run("scontrol", "update", f"NodeName={name}", "State=DOWN", "Reason=lost")


def wait(what, is_so, timeout=TIMEOUT_SECONDS):
    """Waits until `is_so` returns a true value, and returns it."""
    end = time.monotonic() + timeout
    while not (answer := is_so()):
        if time.monotonic() > end:
            raise Broken(f"not within {timeout} s: {what}")
        time.sleep(0.2)
    return answer


class Job:
    """A job with a separate run folder."""

    def __init__(self, slurm, name, *settings, options=(), arguments=None, environment=None, continues=None):
        self.run_dir = continues.run_dir if continues else slurm.folder / "runs" / name
        self.output = slurm.folder / f"{name}.log"
        self.log_offset = 0
        if arguments is None:
            arguments = ["story.toml", "--run-dir", self.run_dir]
        if continues:
            arguments += ["--allow-recipe-change"]
        for setting in settings:
            arguments += ["--set", setting]
        command = ["sbatch", "--parsable", f"--output={self.output}", *options, SCRIPT, *arguments]
        self.id = run(*command, env=os.environ | (environment or {})).stdout.strip()

    def show(self, key):
        text = run("scontrol", "--oneliner", "show", "job", self.id).stdout
        return re.search(rf"(?:^|\s){key}=(\S*)", text).group(1)

    def nodes(self):
        return run("scontrol", "show", "hostnames", self.show("NodeList")).stdout.split()

    def log(self):
        return self.output.read_text() if self.output.exists() else ""

    def wait(self, what, is_so):
        try:
            return wait(what, is_so)
        except Broken as error:
            shown = run("scontrol", "show", "job", self.id).stdout
            raise Broken(f"{error}; Slurm's state of the job\n{shown}and its log\n{self.log()[-9000:]}") from None

    def wait_for_log(self, *patterns):
        """Waits for all patterns in the log after the last match, in any order, as the programs write independently;
        returns the numbers of the first one."""

        def look():
            matches = [re.compile(pattern).search(self.log(), self.log_offset) for pattern in patterns]
            return all(matches) and matches

        matches = self.wait(f"{patterns} in the log", look)
        self.log_offset = max(match.end() for match in matches)
        return tuple(map(int, matches[0].groups()))

    def baton(self, *command):
        """Runs a command as an operator of the job."""
        access = self.run_dir / f"slurm-{self.id}/access"
        variables = {"BATON_TLS_CA": str(access / "ca.pem"), "BATON_TOKEN_FILE": str(access / "operator.token")}
        return run("baton", *command, "--run-dir", self.run_dir, env=os.environ | variables).stdout

    def wait_for_state(self, *states):
        self.wait(f"one of the states {states}", lambda: self.show("JobState") in states)

    def wait_for_save_and_resume(self):
        """Waits until the job has saved and resumed, and checks that the step is the same."""
        (saved,) = self.wait_for_log(r"the state after step (\d+) is durable")
        self.wait_for_log("saved and stopped; requeueing the job")
        self.wait_for_log("requeued 1 times")
        (resumed,) = self.wait_for_log(r"resumed in .* step (\d+), sample")
        expect(saved == resumed, f"saved after step {saved}, but resumed after step {resumed}")
        return saved

    def processes(self):
        """Commands of all processes of the job, on any node, by process id."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            # The process may end at this moment.
            with contextlib.suppress(OSError):
                if f"SLURM_JOB_ID={self.id}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    def kill(self, *words):
        found = self.processes().items()
        (process,) = [process for process, command in found if all(word in command for word in words)]
        os.kill(process, signal.SIGKILL)

    def check_nothing_left(self):
        self.wait("nothing is left running", lambda: not self.processes())
        left = list(self.run_dir.glob("slurm-*"))
        expect(not left, f"{left} were not removed")

    def ends(self, state, code, restarts=0):
        self.wait_for_state("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        expected = (state, f"{code}:0", str(restarts))
        found = tuple(map(self.show, ["JobState", "ExitCode", "Restarts"]))
        expect(found == expected, f"{found} instead of {expected}:\n{self.log()[-9000:]}")
        self.check_nothing_left()

    def cancel(self):
        restarts = self.show("Restarts")
        run("scancel", self.id)
        self.wait_for_state("CANCELLED")
        self.check_nothing_left()
        # Nobody is left who could requeue it, once Slurm itself is done with it.
        self.wait(
            "Slurm is done with the job",
            lambda: not run("squeue", "--noheader", f"--jobs={self.id}", check=False).stdout,
        )
        found = (self.show("JobState"), self.show("Restarts"))
        expect(found == ("CANCELLED", restarts), f"the job was requeued after scancel: {found}")

    def limit_time(self, minutes):
        """Sets the time limit, from now on."""
        days, hours, past, _ = map(int, re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", self.show("RunTime")).groups("0"))
        run("scontrol", "update", f"JobId={self.id}", f"TimeLimit={days * 1440 + hours * 60 + past + minutes}")


def expect(is_so, words):
    if not is_so:
        raise Broken(words)


# --- The scenarios -------------------------------------------------------------------------------


def drained_and_continued(slurm):
    job = Job(slurm, "drained", options=["--nodes=2"])
    job.wait_for_log("2 ranks train")
    run("scancel", "--signal=TERM", "--batch", job.id)
    step = job.wait_for_save_and_resume()
    say(f"drained: SIGTERM to the batch shell saved after step {step}; requeued, it resumed after step {step}")
    job.wait_for_log("2 ranks train")
    job.wait_for_log("checkpoint .* saved")
    job.cancel()
    # Only now it is known how far the job has come.
    listed = run("baton", "checkpoint", "ls", "--json", "--dir", job.run_dir / "checkpoints").stdout
    epochs = max(found["epoch"] for found in map(json.loads, listed.splitlines()) if found["complete"]) + 2
    end = f"train.epochs={epochs}"
    jobs = [Job(slurm, "continued", end, options=["--nodes=2"], continues=job), Job(slurm, "undisturbed", end)]
    for each in jobs:
        each.ends("COMPLETED", 0)
    compared = run("baton", "checkpoint", "diff", *[each.run_dir / "checkpoints" for each in jobs], check=False)
    expect(compared.returncode == 0, f"other weights: {compared.stdout}{compared.stderr}")
    say(
        f"drained: with {epochs} epochs it was completed, with the weights of an undisturbed job on 1 node, bit for bit"
    )


def out_of_time(slurm):
    job = Job(slurm, "time", options=["--time=600"])
    job.wait_for_log("1 rank trains")
    # Slurm sends the signal 180 s before the limit: from now on.
    job.limit_time(minutes=3)
    job.wait_for_log(r"the state after step \d+ is durable")
    # Or the requeued job would be signalled again.
    run("scontrol", "update", f"JobId={job.id}", "TimeLimit=600")
    job.log_offset = 0
    step = job.wait_for_save_and_resume()
    say(f"time limit: Slurm's signal ahead of it saved after step {step}; requeued, it resumed after step {step}")
    job.cancel()


def preempted(slurm):
    job = Job(slurm, "preempted")
    job.wait_for_log("checkpoint .* saved")
    (node,) = job.nodes()
    urgent = Job(slurm, "urgent", "train.epochs=1", options=["--partition=urgent", f"--nodelist={node}"])
    step = job.wait_for_save_and_resume()
    urgent.ends("COMPLETED", 0)
    say(
        f"preempted: saved after step {step}, and {node} was assigned to an urgent job; requeued, the job resumed after it"
    )
    job.cancel()


def steps_signalled(slurm):
    job = Job(slurm, "steps")
    job.wait_for_log("checkpoint .* saved")
    # As at the start of a preemption's GraceTime if preempt_send_user_signal is not set. Ranks ignore the signal.
    run("scancel", "--signal=TERM", job.id)
    job.wait_for_log("saved and stopped; requeueing the job")
    job.wait_for_log("requeued 1 times")
    (step,) = job.wait_for_log(r"resumed in .* step (\d+), sample")
    say(f"signalled ranks: SIGTERM to every process of the step had the job requeued; it resumed after step {step}")
    job.wait_for_log("1 rank trains")
    # As a preemption without GraceTime, or by an administrator.
    run("scontrol", "requeue", job.id)
    job.wait_for_log("Slurm ends the job")
    job.wait_for_log("requeued 2 times")
    (step,) = job.wait_for_log(r"resumed in .* step (\d+), sample")
    say(f"requeued: by another user and without a warning; it resumed after step {step}")
    job.cancel()


def cancelled(slurm):
    job = Job(slurm, "cancelled", options=["--nodes=2"])
    job.wait_for_log("2 ranks train")
    job.cancel()
    say("cancelled: scancel ended it permanently; no process, certificate or token was left")
    stopped = Job(slurm, "stopped")
    stopped.wait_for_log("1 rank trains")
    stopped.baton("stop")
    stopped.ends("FAILED", 3)
    say("stopped: `baton stop` ended it permanently")


def nodes_and_processes_lost(slurm):
    job = Job(slurm, "lost", options=["--nodes=2"])
    job.wait_for_log("2 ranks train")
    first, second = job.nodes()
    job.kill("baton-worker agent", f"--node-id {second}")
    job.wait_for_log(f"node {second}: the agent ended with code 137; starting it again", "2 ranks train")
    say(f"lost agent: started again on {second}, and 2 ranks train")
    slurm.lose(second)
    job.wait_for_log("1 rank trains")
    job.wait_for_log("checkpoint .* saved")
    expect(job.nodes() == [first] and job.show("JobState") == "RUNNING", "Slurm did not keep the job running")
    say(f"lost node: without {second} the job continues, on {first}")
    job.kill("baton-coordinator serve")
    job.wait_for_log("the coordinator ended with code 137; starting it again")
    job.wait_for_log("checkpoint .* saved")
    say("lost coordinator: started again on its node, while the rank continued")
    expect(job.show("Restarts") == "0", "the job was requeued")
    job.cancel()


def first_node_lost(slurm):
    job = Job(slurm, "headless", options=["--nodes=2"], environment={"BATON_LOOK_SECONDS": "1"})
    job.wait_for_log("2 ranks train")
    job.wait_for_log("checkpoint .* saved")
    first, second = job.nodes()
    slurm.lose(first)
    job.wait_for_log(f"the first node, {first}, is lost; requeueing the job")
    job.wait_for_log("requeued 1 times")
    (step,) = job.wait_for_log(r"resumed in .* step (\d+), sample")
    nodes = job.nodes()
    expect(first not in nodes, f"{first} is used again")
    say(f"lost first node: {second} had the job requeued; on {' and '.join(nodes)}, it resumed after step {step}")
    job.cancel()


def too_few_ranks(slurm):
    environment = {"BATON_GATHER_SECONDS": "2", "BATON_LOOK_SECONDS": "1", "BATON_RETRIES": "1"}
    job = Job(slurm, "few", "cluster.min_ranks=2", environment=environment)
    job.ends("FAILED", 1, restarts=1)
    expect("for 2 s there were fewer ranks than cluster.min_ranks" in job.log(), job.log())
    say("failing: a job without enough ranks was requeued once, as set by BATON_RETRIES, and failed")


def bad_input(slurm):
    story = ["story.toml", "--run-dir", slurm.folder / "runs/bad"]
    nothing = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
    cases = {
        "no recipe": (["none.toml"], {}, [], "recipe none.toml: no such file"),
        "bad recipe": ([*story, "--set", "train.epochs=0"], {}, [], "train.epochs"),
        "unknown argument": ([*story, "--rnaks", "2"], {}, [], "unknown argument '--rnaks'"),
        "no programs": (story, nothing, [], "baton is not on the PATH of node"),
        "no number": (story, {"BATON_RETRIES": "few"}, [], "BATON_RETRIES='few' is not a whole number"),
        "no interface": (story, {"BATON_INTERFACE": "ib9"}, [], "resolves to no address for other nodes"),
        "no shared folder": (
            ["story.toml", "--run-dir", slurm.folder / "node/run"],
            {},
            ["--nodes=2"],
            "give --run-dir a folder that all nodes share",
        ),
    }
    jobs = {
        name: Job(slurm, f"bad-{name.replace(' ', '-')}", arguments=arguments, environment=variables, options=options)
        for name, (arguments, variables, options, _) in cases.items()
    }
    for name, job in jobs.items():
        job.ends("FAILED", 2)
        expect(cases[name][-1] in job.log(), f"{name}: no such message in the log:\n{job.log()}")
    outside = run("bash", SCRIPT, "story.toml", check=False)
    expect(outside.returncode == 2 and "for Slurm to run: sbatch" in outside.stderr, f"outside Slurm: {outside}")
    say(f"bad input: {', '.join(jobs)}, and no Slurm: each gives one line and exit code 2, and none was requeued")


if __name__ == "__main__":
    sys.exit(main())
