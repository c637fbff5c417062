#!/usr/bin/env python3
"""Checks deploy/slurm/baton.sbatch on a real Slurm: scripts/deploy/slurm.py [FOLDER OF BATON'S PROGRAMS]

A controller and its nodes are started in namespaces of their own, each node with a name and an address as on separate
machines, and end with this script. Jobs train a tiny model on handwritten digits; they are drained, cancelled,
preempted, and lose agents and nodes. Needs root and Slurm.
"""

import concurrent.futures
import contextlib
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
# What is started in them ends with their first process.
NAMESPACES = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
NODES = 15
# What scripts/deploy/check.sh takes for a check that cannot run here.
SKIPPED = 77
# Seconds that any single thing may take; it only matters when something is broken.
PATIENCE = 120

# What tests/src/lib.rs trains, which takes a millisecond for a step, without an end.
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
    """A check that failed, in words."""


# --- On this machine -----------------------------------------------------------------------------


def main():
    if sys.argv[1:2] == ["--inside"]:
        return inside(Path(sys.argv[2]), Path(sys.argv[3]))
    programs = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "target/debug").resolve()
    for name in ["baton", "baton-coordinator", "baton-worker"]:
        if not os.access(programs / name, os.X_OK):
            sys.exit(f"slurm: there is no program {programs / name}; run: make build")
    missing = cannot_run()
    if missing:
        say(f"nothing was checked: {missing}")
        return SKIPPED
    # A process that is told to end cleans up as after Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="baton-slurm-") as folder:
        try:
            return subprocess.call([*NAMESPACES, "--net", sys.executable, __file__, "--inside", folder, programs])
        except KeyboardInterrupt:
            say("interrupted; all that it started is ended")
            return 130


def cannot_run():
    """Why this cannot run here, if it cannot."""
    # Debian keeps daemons and ip out of the PATH of users.
    os.environ["PATH"] += ":/usr/sbin:/sbin"
    if os.geteuid() != 0 or Path("/proc/self/uid_map").read_text().split() != ["0", "0", "4294967295"]:
        return "namespaces and Slurm's daemons want root, and not only that of a user namespace"
    missing = [name for name in PROGRAMS if not shutil.which(name)]
    if missing:
        return f"{', '.join(missing)} are missing: scripts/deploy/setup.sh installs them"
    probe = run(*NAMESPACES, "--net", "true", check=False)
    if probe.returncode != 0:
        return f"no namespaces here: {probe.stderr.strip()}"
    return None


# --- In namespaces of its own ----------------------------------------------------------------------


def inside(folder, programs):
    os.environ |= {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "SLURM_CONF": str(folder / "slurm.conf"),
        "AWS_EC2_METADATA_DISABLED": "true",
        # One rank on each node, whatever this machine has.
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
    stories = [
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
    with concurrent.futures.ThreadPoolExecutor(len(stories)) as pool:
        told = {pool.submit(story, slurm): story.__name__ for story in stories}
        for future in concurrent.futures.as_completed(told):
            if error := future.exception():
                failures += 1
                words = str(error) if isinstance(error, Broken) else repr(error)
                say(f"FAILED: {told[future]}: {words}")
    seconds = time.monotonic() - began
    say(f"{len(stories) - failures} of {len(stories)} stories hold, in {seconds:.0f} s")
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
        run("sh", "-ec", f"""
            mount -t tmpfs tmpfs /run
            mount --bind {folder}/hosts /etc/hosts
            hostname controller
            ip link set lo up
            ip link add br0 type bridge
            ip address add 10.78.0.254/24 dev br0
            ip link set br0 up
        """)
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
            # For so long a requeued job waits; less is not allowed.
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
            PartitionName=main Nodes=ALL Default=YES PriorityTier=1 GraceTime=60
            PartitionName=urgent Nodes=ALL PriorityTier=2 PreemptMode=OFF
        """

    def start(self, *command):
        log = open(self.folder / f"log/{command[0]}.out", "a")
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def start_node(self, index):
        name = f"n{index}"
        (self.folder / "spool" / name).mkdir()
        # Other nodes do not see what is in node/.
        begin = [f"hostname {name}", f"mount -t tmpfs tmpfs {self.folder}/node"]
        run("sh", "-ec", f"""
            ip netns add {name}
            ip link add v{index} type veth peer name eth0 netns {name}
            ip link set v{index} master br0 up
            ip -n {name} address add 10.78.0.{index}/24 dev eth0
            ip -n {name} link set eth0 up
            ip -n {name} link set lo up
        """)
        if index % 2 == 0:
            # As Debian's installer leaves a machine.
            hosts = re.sub(rf"\S+ {name}\n", f"127.0.1.1 {name}\n", (self.folder / "hosts").read_text())
            (self.folder / "spool" / name / "hosts").write_text(hosts)
            begin.append(f"mount --bind {self.folder}/spool/{name}/hosts /etc/hosts")
        begin.append("exec slurmd -D")
        self.nodes[name] = self.start("nsenter", f"--net=/run/netns/{name}", *NAMESPACES, "sh", "-ec", "\n".join(begin))

    def lose(self, name):
        """Takes a node's power away, and lets Slurm know sooner than by SlurmdTimeout."""
        self.nodes[name].kill()
        run("ip", "link", "set", f"v{name[1:]}", "down")
        run("scontrol", "update", f"NodeName={name}", "State=DOWN", "Reason=lost")


def wait(what, is_so, patience=PATIENCE):
    """What `is_so` returns, once that is true."""
    end = time.monotonic() + patience
    while not (answer := is_so()):
        if time.monotonic() > end:
            raise Broken(f"not within {patience} s: {what}")
        time.sleep(0.2)
    return answer


class Job:
    """A job with a run folder of its own."""

    def __init__(self, slurm, name, *settings, options=(), arguments=None, environment=None):
        self.run_dir = slurm.folder / "runs" / name
        self.output = slurm.folder / f"{name}.log"
        self.heard = 0
        if arguments is None:
            arguments = ["story.toml", "--run-dir", self.run_dir]
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
            raise Broken(f"{error}; of the job Slurm says\n{shown}and its log\n{self.log()[-9000:]}") from None

    def tells(self, pattern):
        """Waits for the log to tell this after what was waited for before; the numbers in it."""
        match = self.wait(f"it tells '{pattern}'", lambda: re.compile(pattern).search(self.log(), self.heard))
        self.heard = match.end()
        return tuple(map(int, match.groups()))

    def baton(self, *command):
        """A command of a person who looks at the job and steers it."""
        access = self.run_dir / f"slurm-{self.id}/access"
        variables = {"BATON_TLS_CA": str(access / "ca.pem"), "BATON_TOKEN_FILE": str(access / "operator.token")}
        return run("baton", *command, "--run-dir", self.run_dir, env=os.environ | variables).stdout

    def comes_to(self, *states):
        self.wait(f"Slurm says {states}", lambda: self.show("JobState") in states)

    def saves_and_goes_on(self):
        """Waits for both; the step is the same."""
        (saved,) = self.tells(r"the state after step (\d+) is durable")
        self.tells("saved and stopped; requeueing the job")
        self.tells("requeued 1 times")
        (went_on,) = self.tells(r"resumed in .* step (\d+), sample")
        expect(saved == went_on, f"saved after step {saved}, but went on after step {went_on}")
        return saved

    def processes(self):
        """The commands of all that runs of the job, on any node, by process."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            # It may end while it is looked at.
            with contextlib.suppress(OSError):
                if f"SLURM_JOB_ID={self.id}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    def kill(self, *words):
        found = self.processes().items()
        (process,) = [process for process, command in found if all(word in command for word in words)]
        os.kill(process, signal.SIGKILL)

    def leaves_nothing(self):
        self.wait("nothing is left running", lambda: not self.processes())
        left = list(self.run_dir.glob("slurm-*"))
        expect(not left, f"{left} are left")

    def ends(self, state, code, restarts=0):
        self.comes_to("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        wanted = (state, f"{code}:0", str(restarts))
        found = tuple(map(self.show, ["JobState", "ExitCode", "Restarts"]))
        expect(found == wanted, f"{found} instead of {wanted}:\n{self.log()[-9000:]}")
        self.leaves_nothing()

    def cancel(self):
        run("scancel", self.id)
        self.comes_to("CANCELLED")
        self.leaves_nothing()


def expect(is_so, words):
    if not is_so:
        raise Broken(words)


# --- The stories -----------------------------------------------------------------------------------


def drained_and_continued(slurm):
    epochs = "train.epochs=200"
    undisturbed = Job(slurm, "undisturbed", epochs)
    job = Job(slurm, "drained", epochs, options=["--nodes=2"])
    job.tells("2 ranks train")
    # So that it cannot come to its end before it is signalled.
    job.baton("pause")
    job.tells("phase=Paused")
    run("scancel", "--signal=TERM", "--batch", job.id)
    step = job.saves_and_goes_on()
    say(f"drained: SIGTERM to the batch shell saved after step {step}; requeued, it went on after step {step}")
    job.ends("COMPLETED", 0, restarts=1)
    undisturbed.ends("COMPLETED", 0)
    newest = [each.run_dir / "checkpoints" for each in [job, undisturbed]]
    compared = run("baton", "checkpoint", "diff", *newest, check=False)
    expect(compared.returncode == 0, f"other weights: {compared.stdout}{compared.stderr}")
    say("drained: completed on 2 nodes, with the weights of an undisturbed job on 1 node, bit for bit")


def out_of_time(slurm):
    # Slurm's signal may come at any moment from now on.
    job = Job(slurm, "time", options=["--time=2"])
    job.tells("1 ranks train")
    step = job.saves_and_goes_on()
    say(f"time limit: Slurm's signal ahead of it saved after step {step}; requeued, it went on after step {step}")
    job.cancel()
    expect(job.show("Restarts") == "1", "it was requeued after scancel")


def preempted(slurm):
    job = Job(slurm, "preempted")
    job.tells("checkpoint .* saved")
    (node,) = job.nodes()
    urgent = Job(slurm, "urgent", "train.epochs=1", options=["--partition=urgent", f"--nodelist={node}"])
    step = job.saves_and_goes_on()
    urgent.ends("COMPLETED", 0)
    say(f"preempted: saved after step {step}, and {node} was given to an urgent job; requeued, it went on after it")
    job.cancel()


def steps_signalled(slurm):
    job = Job(slurm, "steps")
    job.tells("checkpoint .* saved")
    # As a preemption's GraceTime begins where preempt_send_user_signal is not set. Ranks leave it to their agent.
    run("scancel", "--signal=TERM", job.id)
    job.tells("saved and stopped; requeueing the job")
    job.tells("requeued 1 times")
    (step,) = job.tells(r"resumed in .* step (\d+), sample")
    say(f"signalled ranks: SIGTERM to every process of the step had the job requeued; it went on after step {step}")
    job.tells("1 ranks train")
    # As a preemption without GraceTime, or by an administrator.
    run("scontrol", "requeue", job.id)
    job.tells("Slurm ends the job")
    job.tells("requeued 2 times")
    (step,) = job.tells(r"resumed in .* step (\d+), sample")
    say(f"requeued: by somebody else and without a warning; it went on after step {step}")
    job.cancel()


def cancelled(slurm):
    job = Job(slurm, "cancelled", options=["--nodes=2"])
    job.tells("2 ranks train")
    job.cancel()
    # Longer than a requeued job has to wait.
    time.sleep(8)
    expect(job.show("JobState") == "CANCELLED" and job.show("Restarts") == "0", "it was requeued")
    say("cancelled: scancel ended it for good; no process, certificate or token was left")
    stopped = Job(slurm, "stopped")
    stopped.tells("1 ranks train")
    stopped.baton("stop")
    stopped.ends("FAILED", 3)
    say("stopped: `baton stop` ended it for good")


def nodes_and_processes_lost(slurm):
    job = Job(slurm, "lost", options=["--nodes=2"])
    job.tells("2 ranks train")
    first, second = job.nodes()
    job.kill("baton-worker agent", f"--node-id {second}")
    job.tells(f"node {second}: the agent ended with code 137; starting it again")
    job.tells("2 ranks train")
    say(f"lost agent: started again on {second}, and 2 ranks train")
    slurm.lose(second)
    job.tells("1 ranks train")
    job.tells("checkpoint .* saved")
    expect(job.nodes() == [first] and job.show("JobState") == "RUNNING", "Slurm has not let it be")
    say(f"lost node: without {second} the job goes on, on {first}")
    job.kill("baton-coordinator serve")
    job.tells("the coordinator ended with code 137; starting it again")
    job.tells("checkpoint .* saved")
    say("lost coordinator: started again where it was, while the rank went on")
    expect(job.show("Restarts") == "0", "it was requeued")
    job.cancel()


def first_node_lost(slurm):
    job = Job(slurm, "headless", options=["--nodes=2"], environment={"BATON_LOOK_SECONDS": "1"})
    job.tells("2 ranks train")
    job.tells("checkpoint .* saved")
    first, second = job.nodes()
    slurm.lose(first)
    job.tells(f"the first node, {first}, is lost; requeueing the job")
    job.tells("requeued 1 times")
    (step,) = job.tells(r"resumed in .* step (\d+), sample")
    nodes = job.nodes()
    expect(first not in nodes, f"{first} is used again")
    say(f"lost first node: {second} had the job requeued; on {' and '.join(nodes)}, it went on after step {step}")
    job.cancel()


def too_few_ranks(slurm):
    environment = {"BATON_GATHER_SECONDS": "2", "BATON_LOOK_SECONDS": "1", "BATON_RETRIES": "1"}
    job = Job(slurm, "few", "cluster.min_ranks=2", environment=environment)
    job.ends("FAILED", 1, restarts=1)
    expect("for 2 s there were fewer ranks than cluster.min_ranks" in job.log(), job.log())
    say("failing: a job that cannot have its ranks was requeued once, as BATON_RETRIES says, and failed")


def bad_input(slurm):
    story = ["story.toml", "--run-dir", slurm.folder / "runs/bad"]
    nothing = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
    cases = {
        "no recipe": (["none.toml"], {}, [], "recipe none.toml: there is no such file"),
        "bad recipe": ([*story, "--set", "train.epochs=0"], {}, [], "train.epochs"),
        "unknown argument": ([*story, "--rnaks", "2"], {}, [], "unknown argument '--rnaks'"),
        "no programs": (story, nothing, [], "baton is not on the PATH of node"),
        "no number": (story, {"BATON_RETRIES": "few"}, [], "BATON_RETRIES='few' is no whole number"),
        "no interface": (story, {"BATON_INTERFACE": "ib9"}, [], "leads to no address for other nodes"),
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
        expect(cases[name][-1] in job.log(), f"{name} is not told:\n{job.log()}")
    outside = run("bash", SCRIPT, "story.toml", check=False)
    expect(outside.returncode == 2 and "for Slurm to run: sbatch" in outside.stderr, f"outside Slurm: {outside}")
    say(f"bad input: {', '.join(jobs)}, and no Slurm: each a line and exit code 2, and none was requeued")


if __name__ == "__main__":
    sys.exit(main())
