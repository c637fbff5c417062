"""Tests jobs on EC2 from `baton aws up` to `baton aws down`, against moto and machines that boot.

    story.py REPOSITORY PROGRAMS [single|several]

Started by scripts/deploy/aws.sh, in separate namespaces. Each printed line has been checked.

No line depends on how fast this machine is: a job that is watched has no end until it is drained, and every wait is for
a condition that stays true.
"""

import json
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

from cloud import TIMEOUT_SECONDS, Cloud
from machine import make_bridge

# Small enough for two cores. The schedule does not depend on the number of epochs, so a job without an end and one of a
# few epochs have the same weights after these epochs.
QUICK = [
    "train.global_batch=64",
    "train.resolution=8",
    "train.virtual_ranks=4",
    "model.arch=linear",
    "cluster.device=cpu",
    "cluster.max_ranks=4",
    "checkpoint={ every_epochs=1, keep_last=3, keep_best=false }",
    "evaluation={ every_epochs=1000000, crop_ratio=1.0, resolution=8 }",
    "schedule={ kind='constant', lr=0.1 }",
    "optimizer={ kind='sgd', momentum=0.9 }",
]
ENDLESS = "train.epochs=1000000"
# How a command on a single machine finds its coordinator.
LOCAL = ["BATON_COORDINATOR=http://127.0.0.1:29600"]


class Story:
    def __init__(self, repository, programs, folder):
        self.cloud = Cloud(folder, repository, programs)
        self.repository, self.programs, self.folder = repository, programs, folder
        self.start = time.time()

    def say(self, words):
        print(f"  {time.time() - self.start:5.0f} s  {words}", flush=True)

    def baton(self, *arguments, code=0):
        environment = self.cloud.environment() | {"TMPDIR": str(self.folder)}
        command = [str(self.programs / "baton"), *arguments]
        ended = subprocess.run(
            command,
            cwd=self.repository,
            env=environment,
            text=True,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=TIMEOUT_SECONDS * 2,
        )
        assert ended.returncode == code, (
            f"baton {' '.join(arguments)} ended with {ended.returncode}:\n{ended.stdout}{ended.stderr}"
        )
        return ended.stdout + ended.stderr

    def up(self, name, *arguments, settings=(ENDLESS,)):
        return self.baton(
            "aws",
            "up",
            "recipes/digits_cpu.toml",
            "--name",
            name,
            "--instance-type",
            "c5.xlarge",
            "--yes",
            *sets(*QUICK, *settings),
            *arguments,
        )

    def status(self, name):
        return json.loads(self.baton("aws", "status", "--name", name, "--json"))

    def until(self, what, look):
        return self.cloud.until(what, look)

    def job_status(self, machine, environment=LOCAL):
        """The status of the job from the coordinator on a machine, or None without a coordinator."""
        if not machine.leader():
            return None
        ended = machine.inside("env", *environment, "/opt/baton/bin/baton", "status", "--json")
        return json.loads(ended.stdout) if ended.returncode == 0 else None

    def wait_until_training(self, name, instance):
        """Waits until the job trains on this machine; returns the machine and the job's status."""

        def look():
            machine = self.cloud.machines.get(instance)
            status = machine and self.job_status(machine)
            return status and is_training(status) and (machine, status)

        return self.until(f"{name} trains on {instance}", look)

    def pause(self, machine):
        """Pauses the job after a step, so that its step stays the same; returns the step."""
        machine.inside("env", *LOCAL, "/opt/baton/bin/baton", "pause", check=True)
        paused = lambda: (status := self.job_status(machine)) and status["phase"] == "paused" and status
        return step(self.until("the job is paused", paused))

    def resume(self, instance):
        """Ends the pause of the machine before, which the journal in the store keeps."""

        def look():
            machine = self.cloud.machines.get(instance)
            status = machine and self.job_status(machine)
            return status and status["phase"] == "paused" and machine

        machine = self.until(f"the job is still paused on {instance}", look)
        machine.inside("env", *LOCAL, "/opt/baton/bin/baton", "resume", check=True)

    def bucket(self):
        [bucket] = self.cloud.s3.list_buckets()["Buckets"]
        return bucket["Name"]

    def stage(self, name, instance):
        """What a machine reported last, from the bucket; empty before its first report."""
        try:
            found = self.cloud.s3.get_object(Bucket=self.bucket(), Key=f"{name}/machines/{instance}/stage.json")
        except self.cloud.s3.exceptions.NoSuchKey:
            return ""
        return json.loads(found["Body"].read())["stage"]

    def train_alone(self, epochs):
        """Runs the same training on this machine without interruption."""
        self.baton(
            "up",
            "recipes/digits_cpu.toml",
            "--ranks",
            "1",
            "--run-dir",
            str(self.folder / "alone"),
            "--listen",
            "127.0.0.1:0",
            *sets(*QUICK, f"train.epochs={epochs}"),
        )

    def others(self, group, known):
        return [member for member in self.cloud.members(group) if member not in known]


def sets(*entries):
    return [word for entry in entries for word in ("--set", entry)]


def step(status):
    return (status.get("latest") or {}).get("step", 0)


def is_training(status):
    """Whether a step has been made after the start of these ranks."""
    return status["phase"] == "training" and step(status) > 0


def wrote_checkpoint(status):
    """Whether the last checkpoint is of these ranks."""
    return (status["checkpoint"] or {}).get("generation") == status["generation"]


def check_continued(status, earliest):
    """Checks that the job continued from a checkpoint of the previous machine."""
    assert "from checkpoint" in status["began_with"], status["began_with"]
    assert status["generation"] > 1 and step(status) >= earliest, (status["generation"], step(status), earliest)


def single(story):
    """One machine with a volume: launched, interrupted, rebalanced, drained, torn down; and a job that completes."""
    cloud, name, group = story.cloud, "digits", "baton-digits"
    output = story.up(name, "--volume-gb", "1", "--max-price", "2.5", "--no-wait")
    [first] = cloud.members(group)
    assert "per hour" in output and "volume of 1 GB" in output, output
    root, _ = story.wait_until_training(name, first)
    story.say(f"up: {first} trains")

    assert root.inside("findmnt", "-n", "-o", "FSTYPE", "/data").stdout.strip() == "ext4", "no volume at /data"
    assert root.inside("findmnt", "-n", "/var/lib/baton").returncode == 0, "the journal is not on the volume"
    users = root.inside("ps", "-o", "user=", "-C", "baton-worker,baton-coordinat").stdout.split()
    assert users and set(users) == {"baton"}, users
    story.say("the volume is mounted at /data; services run as their own user")
    try:
        socket.create_connection((root.address, 29600), timeout=TIMEOUT_SECONDS).close()
        raise AssertionError("the port of the coordinator is open")
    except ConnectionRefusedError:
        pass  # The machine is reachable and refuses the connection.
    story.say("the coordinator's port is closed to others")

    before = story.pause(root)
    assert "paused" in story.baton("aws", "connect", "--name", name, "--", "status").lower()
    story.say("`baton aws connect -- status` reads the status over gRPC, through a session")
    output = story.up(name)
    assert (
        "unchanged. For another recipe" in output and "waiting until training starts" in output and first in output
    ), output
    story.say("a second launch does not change a running job, waits until it trains, and shows its status")

    cloud.interrupt(first, lambda: "saved" in story.stage(name, first))
    [second] = story.until("another machine", lambda: story.others(group, [first]))
    assert "saved" in story.stage(name, first), "the machine did not report its save"
    story.resume(second)
    root, status = story.wait_until_training(name, second)
    check_continued(status, before)
    story.say(f"a spot interruption: {second} has the volume, and continues from step {before} or later by itself")

    before = story.pause(root)
    cloud.rebalance(group, second)
    [third] = story.until("another machine", lambda: story.others(group, [first, second]))
    story.resume(third)
    root, status = story.wait_until_training(name, third)
    check_continued(status, before)
    story.say(f"a rebalance recommendation: {second} saved within its hook, {third} waited and continued")

    # At the end of an epoch, as same_bits needs a checkpoint there.
    saved = lambda: (status := story.job_status(root)) and wrote_checkpoint(status)
    story.until(f"{third} saves", saved)
    story.baton("aws", "connect", "--name", name, "--", "drain")
    story.until("the group is empty", lambda: not cloud.members(group))
    last = story.status(name)
    assert last["desired"] == 0 and last["report"]["instance"] == third, last
    assert "drained" in story.baton("aws", "logs", third), "the log of the only job is not shown without its name"
    listed = story.baton("aws", "logs", "--name", name, "--list").split()
    assert set(listed) == {first, second, third}, listed
    story.say("drained: the group was set to 0, so no machine costs money; status and logs come from the bucket")

    same_bits(story, name)
    story.say("the weights are bit-identical to those of an undisturbed run on this machine")

    # This one is not watched while it trains, so it may be as fast as it wants.
    short, group = "short", "baton-short"
    story.up(short, "--no-wait", settings=["train.epochs=2"])
    [only] = story.until("its machine", lambda: set(cloud.machines) - {first, second, third})
    story.until("the group is empty", lambda: not cloud.members(group))
    assert story.stage(short, only) == "completed", story.stage(short, only)
    assert "completed" in story.baton("aws", "logs", "--name", short, only)
    story.say(f"completed: {only} trained to the end, and the group was set to 0")
    story.baton("aws", "down", "--name", short, "--delete-data", "--yes")

    output = story.baton("aws", "down", "--name", name, "--yes")
    assert "vol-" in output and "s3://" in output, output
    kept = [volume for volume in cloud.ec2.describe_volumes()["Volumes"] if volume["VolumeId"] in cloud.volumes]
    assert len(kept) == 1 and not stacks(cloud), (kept, stacks(cloud))
    story.say("down: the stack is gone, volume and checkpoints are kept")
    bucket = cloud.s3.list_buckets()["Buckets"][0]["Name"]
    assert f"--delete-data --bucket {bucket}`" in output, output
    story.baton("aws", "down", "--name", name, "--delete-data", "--bucket", bucket, "--yes")
    assert not [volume for volume in cloud.ec2.describe_volumes()["Volumes"] if volume["VolumeId"] in cloud.volumes]
    assert "Contents" not in cloud.s3.list_objects_v2(Bucket=bucket), "the bucket is not empty"
    story.say("down --delete-data: nothing is left")


def several(story):
    """Two nodes and a coordinator: TLS, tokens in Parameter Store, a node lost without notice, a drain."""
    cloud, name, group = story.cloud, "nodes", "baton-nodes"
    output = story.up(name, "--nodes", "2", "--no-wait", settings=[ENDLESS, "cluster.min_ranks=1"])
    assert "is launched" in output, output
    nodes = story.until("two nodes", lambda: (found := cloud.members(group)) and len(found) == 2 and found)
    find = lambda: [
        machine
        for machine in cloud.machines.values()
        if machine.id not in nodes and not machine.is_off and machine.leader()
    ]
    [coordinator] = story.until("the coordinator's machine", find)
    keys = [
        "BATON_COORDINATOR=https://127.0.0.1:29600",
        "BATON_TLS_CA=/etc/baton/certs/ca.pem",
        "BATON_TOKEN_FILE=/etc/baton/certs/viewer.token",
    ]
    both = lambda: (
        (status := story.job_status(coordinator, keys)) and len(status["ranks"]) == 2 and is_training(status) and status
    )
    story.until("both nodes train", both)
    story.say(f"up: {coordinator.id} is the coordinator, {' and '.join(nodes)} train")

    token = coordinator.inside("cat", "/etc/baton/certs/operator.token").stdout.strip()
    agent_token = coordinator.inside("cat", "/etc/baton/certs/agent.token").stdout.strip()
    assert len(token) > 20 and len(agent_token) > 20
    kinds = {
        found["Name"]: found["Type"]
        for found in cloud.ssm.describe_parameters()["Parameters"]
        if found["Name"].startswith("/baton/")
    }
    assert kinds and set(kinds.values()) == {"SecureString"}, kinds
    for secret in (token, agent_token):
        check_secret_is_absent(story, secret)
    story.say("tokens are in Parameter Store, encrypted, and in no template, output, user data, log or report")
    without = ["BATON_COORDINATOR=https://" + coordinator.address + ":29600", keys[1]]
    refused = cloud.machines[nodes[0]].inside("env", *without, "/opt/baton/bin/baton", "status")
    assert refused.returncode == 2 and "token" in refused.stdout, refused.stdout
    trains = lambda: "training" in story.baton("aws", "connect", "--name", name, "--", "status").lower()
    story.until("the status, through a session, is training", trains)
    story.say("`baton aws connect -- status` works with TLS and an operator's token")

    lost = nodes[0]
    cloud.ec2.terminate_instances(InstanceIds=[lost])
    [new] = story.until("another node", lambda: story.others(group, nodes))
    again = lambda: (status := both()) and new in {rank["node"] for rank in status["ranks"]} and status
    status = story.until("both nodes train again", again)
    assert "state of rank" in status["began_with"], f"the other node did not continue: {status['began_with']}"
    story.say(f"{lost} ended without a notice: {new} has replaced it, the other node continued")

    story.baton("aws", "connect", "--name", name, "--", "drain")
    story.until("the group is empty", lambda: not cloud.members(group))
    story.say("drained by a user: saved, and no idle machine is left")
    story.baton("aws", "down", "--name", name, "--delete-data", "--yes")
    assert not stacks(cloud) and not [
        found for found in cloud.ssm.describe_parameters()["Parameters"] if found["Name"].startswith("/baton/")
    ]
    for bucket in cloud.s3.list_buckets()["Buckets"]:
        assert "Contents" not in cloud.s3.list_objects_v2(Bucket=bucket["Name"]), "the bucket is not empty"
    story.say("down: nothing is left, and no tokens")


def stacks(cloud):
    return [stack["StackName"] for stack in cloud.cloudformation.describe_stacks()["Stacks"]]


def same_bits(story, name):
    """Compares the job's weights after its last complete epoch with those of an undisturbed run of as many epochs."""
    store, alone = f"s3://{story.bucket()}/{name}/checkpoints", str(story.folder / "alone/checkpoints")

    def complete(folder):
        lines = story.baton("checkpoint", "ls", "--json", "--dir", folder).splitlines()
        return {found["step"]: found for found in map(json.loads, lines) if found["complete"]}

    of_job = complete(store)
    story.train_alone(epochs=max(found["epoch"] for found in of_job.values()))
    last = max(complete(alone))
    assert last in of_job, f"the job has no checkpoint after step {last}, only after {sorted(of_job)}"
    for folder, checkpoint, file in ((store, of_job[last]["name"], "a"), (alone, complete(alone)[last]["name"], "b")):
        story.baton("checkpoint", "export", checkpoint, "--dir", folder, "--out", str(story.folder / file))
    assert (story.folder / "a").read_bytes() == (story.folder / "b").read_bytes(), "the weights differ"


def check_secret_is_absent(story, secret):
    """Fails if a secret is readable where it should not be."""
    cloud = story.cloud
    places = {"template and outputs": json.dumps(cloud.cloudformation.describe_stacks(), default=str)}
    for machine in [machine for machine in cloud.machines.values() if not machine.is_off]:
        places[f"user data of {machine.id}"] = machine.script
        places[f"console of {machine.id}"] = (machine.folder / "console.log").read_text(errors="replace")
        places[f"log of {machine.id}"] = machine.inside("journalctl").stdout
    for bucket in cloud.s3.list_buckets()["Buckets"]:
        for entry in cloud.s3.list_objects_v2(Bucket=bucket["Name"]).get("Contents", []):
            # Weights are not text, and files may be removed at any time.
            if "/checkpoints/" not in entry["Key"] and entry["Size"] < 10_000_000:
                text = cloud.s3.get_object(Bucket=bucket["Name"], Key=entry["Key"])["Body"].read()
                places[entry["Key"]] = text.decode(errors="replace")
    for place, text in places.items():
        assert secret not in text, f"a token is in the {place}"


def detach_lost_disks():
    """Detaches disks of a test that was killed; loop devices belong to the whole machine."""
    listed = json.loads(
        subprocess.run(
            ["losetup", "--list", "--json", "--output", "NAME,BACK-FILE"], capture_output=True, check=True
        ).stdout
        or "{}"
    )
    for disk in listed.get("loopdevices", []):
        if "/baton-cloud-" in disk["back-file"] and "(deleted)" in disk["back-file"]:
            subprocess.run(["losetup", "-d", disk["name"]], check=False)


def main():
    repository, programs = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2]).resolve()
    chosen = sys.argv[3:] or ["single", "several"]
    # At SIGTERM, end the machines first.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    detach_lost_disks()
    make_bridge()
    folder = pathlib.Path(tempfile.mkdtemp(prefix="baton-cloud-"))
    (folder / "bin").mkdir()
    shutil.copy(repository / "scripts/deploy/aws/session-manager-plugin", folder / "bin")
    story = Story(repository, programs, folder)
    try:
        for name in chosen:
            {"single": single, "several": several}[name](story)
    except BaseException as error:
        print(f"FAILED: {type(error).__name__}: {error}", flush=True)
        for machine in story.cloud.machines.values():
            print(f"--- {machine.id} ({'off' if machine.is_off else 'on'})\n{machine.log()}", flush=True)
        sys.exit(1)
    finally:
        story.cloud.close()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
