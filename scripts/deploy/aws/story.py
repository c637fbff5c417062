"""The life of jobs on EC2, from `baton aws up` to `baton aws down`, against moto and machines that boot.

    story.py REPOSITORY PROGRAMS [single|several]

Started by scripts/deploy/aws.sh, in namespaces of its own. Each line that it prints has been seen.
"""

import json
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time

from cloud import Cloud
from machine import make_bridge

PATIENCE = 100
# Small enough for two cores, long enough to be interrupted.
QUICK = ["train.epochs=150", "train.global_batch=64", "train.resolution=8", "train.virtual_ranks=4", "model.arch=linear",
         "cluster.device=cpu", "cluster.max_ranks=4", "checkpoint.every_steps=10", "checkpoint.every_epochs=1",
         "evaluation.every_epochs=20", "evaluation.resolution=8", "optimizer={ kind='sgd', momentum=0.9 }"]


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
        ended = subprocess.run(command, cwd=self.repository, env=environment, text=True, stdin=subprocess.DEVNULL,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=PATIENCE * 2)
        assert ended.returncode == code, f"baton {' '.join(arguments)} ended with {ended.returncode}:\n{ended.stdout}{ended.stderr}"
        return ended.stdout + ended.stderr

    def up(self, name, *arguments, code=0):
        sets = [word for entry in QUICK for word in ("--set", entry)]
        return self.baton("aws", "up", "recipes/digits_cpu.toml", "--name", name, "--instance-type", "c5.xlarge", "--yes",
                          *sets, *arguments, code=code)

    def status(self, name):
        return json.loads(self.baton("aws", "status", "--name", name, "--json"))

    def until(self, what, look):
        deadline = time.time() + PATIENCE
        while not (seen := look()):
            assert time.time() < deadline, f"not seen within {PATIENCE} s: {what}"
            time.sleep(1)
        return seen

    def step(self, report):
        latest = (report or {}).get("status", {}).get("latest") or {}
        return latest.get("step", 0)

    def report(self, name):
        """What a coordinator of the job has told last; `baton aws status` shows the same, and takes seconds of a core."""
        [bucket] = self.cloud.s3.list_buckets()["Buckets"]
        objects = self.cloud.s3.list_objects_v2(Bucket=bucket["Name"], Prefix=f"{name}/machines/").get("Contents", [])
        told = [entry for entry in objects if entry["Key"].endswith("/status.json")]
        if not told:
            return None
        key = max(told, key=lambda entry: entry["LastModified"])["Key"]
        return json.load(self.cloud.s3.get_object(Bucket=bucket["Name"], Key=key)["Body"]) | {"instance": key.split("/")[2]}

    def trains_on(self, name, machine):
        """The report of a job that trains on this machine."""
        def look():
            report = self.report(name)
            return report if report and report["instance"] == machine and self.step(report) > 0 else None
        return self.until(f"{name} trains on {machine}", look)

    def others(self, group, known):
        return [member for member in self.cloud.members(group) if member not in known]


def single(story):
    """One machine with a volume: launched, interrupted, rebalanced, completed, torn down."""
    cloud, name, group = story.cloud, "digits", "baton-digits"
    told = story.up(name, "--volume-gb", "1", "--max-price", "2.5")
    [first] = cloud.members(group)
    assert "an hour" in told and "volume of 1 GB" in told, told
    story.say(f"up: {first} trains")

    root = cloud.machines[first]
    assert root.inside("findmnt", "-n", "-o", "FSTYPE", "/data").stdout.strip() == "ext4", "no volume at /data"
    assert root.inside("findmnt", "-n", "/var/lib/baton").returncode == 0, "the journal is not on the volume"
    users = root.inside("ps", "-o", "user=", "-C", "baton-worker,baton-coordinat").stdout.split()
    assert users and set(users) == {"baton"}, users
    story.say("the volume is at /data, whatever its disk is called; services run as their own user")
    for port in (29600, 22):
        try:
            socket.create_connection((root.address, port), timeout=2).close()
            raise AssertionError(f"port {port} of a machine is open")
        except OSError:
            pass
    story.say("no port of the machine is open to others")

    assert "training" in story.baton("aws", "connect", "--name", name, "--", "status").lower()
    story.say("`baton aws connect -- status` asks the coordinator over gRPC, through a session")
    assert "baton-coordinator" in story.baton("aws", "logs", "--name", name)
    assert first in story.baton("aws", "status", "--name", name)
    assert first in story.baton("aws", "logs", "--list"), "the only job needs no name"
    assert "go on as they are" in story.up(name), "a second launch must not disturb the first"
    story.say("status and logs come from the bucket; up again leaves a job that runs alone")

    before = story.step(story.report(name))
    cloud.interrupt(first)
    [second] = story.until("another machine", lambda: story.others(group, [first]))
    report = story.trains_on(name, second)
    assert story.step(report) >= before, f"at {story.step(report)} after {before}"
    recoveries = report["status"]
    assert recoveries["generation"] > 1, recoveries["generation"]
    story.say(f"a spot interruption: {second} has the volume, and goes on from step {before} or later without a hand")

    cloud.rebalance(group, second)
    assert second in cloud.completed_hooks, "the machine did not say that it has saved"
    [third] = story.until("another machine", lambda: story.others(group, [first, second]))
    story.trains_on(name, third)
    story.say(f"a rebalance recommendation: {second} saved within its hook, {third} waited and goes on")

    story.until("the group is empty", lambda: not cloud.members(group))
    last = story.status(name)
    assert last["wanted"] == 0 and "completed" in story.baton("aws", "logs", third), last
    story.say("completed: the group has set itself to 0, so nothing is paid for")

    same_bits(story, name)
    story.say("the weights have the bits of an undisturbed run on this machine")

    told = story.baton("aws", "down", "--name", name, "--yes")
    assert "vol-" in told and "s3://" in told, told
    kept = [volume for volume in cloud.ec2.describe_volumes()["Volumes"] if volume["VolumeId"] in cloud.volumes]
    assert len(kept) == 1 and not stacks(cloud), (kept, stacks(cloud))
    story.say("down: the stack is gone, volume and checkpoints are kept")
    bucket = cloud.s3.list_buckets()["Buckets"][0]["Name"]
    story.baton("aws", "down", "--name", name, "--delete-data", "--bucket", bucket, "--yes")
    assert not [volume for volume in cloud.ec2.describe_volumes()["Volumes"] if volume["VolumeId"] in cloud.volumes]
    assert "Contents" not in cloud.s3.list_objects_v2(Bucket=bucket), "something is left in the bucket"
    story.say("down --delete-data: nothing is left")


def several(story):
    """Two nodes and a coordinator: TLS, tokens by Parameter Store, a node lost without a word, a drain."""
    cloud, name, group = story.cloud, "nodes", "baton-nodes"
    story.up(name, "--nodes", "2", "--set", "cluster.min_ranks=1", "--set", "train.epochs=100000")
    nodes = story.until("two nodes", lambda: (found := cloud.members(group)) and len(found) == 2 and found)
    both = lambda: (report := story.report(name)) and len(report["status"]["ranks"]) == 2 and report
    story.until("both nodes train", both)
    [coordinator] = [machine for machine in cloud.machines.values() if machine.id not in nodes and not machine.is_off]
    story.say(f"up: {coordinator.id} coordinates, {' and '.join(nodes)} train")

    token = coordinator.inside("cat", "/etc/baton/certs/operator.token").stdout.strip()
    agent_token = coordinator.inside("cat", "/etc/baton/certs/agent.token").stdout.strip()
    assert len(token) > 20 and len(agent_token) > 20
    kinds = {found["Name"]: found["Type"] for found in cloud.ssm.describe_parameters()["Parameters"] if found["Name"].startswith("/baton/")}
    assert kinds and set(kinds.values()) == {"SecureString"}, kinds
    for secret in (token, agent_token):
        look_for(story, secret)
    story.say("tokens are in Parameter Store, encrypted, and in no template, output, user data, log or report")
    rejected = socket.create_connection((coordinator.address, 29600), timeout=5)
    rejected.close()
    assert "training" in story.baton("aws", "connect", "--name", name, "--", "status").lower()
    story.say("`baton aws connect -- status` steers it with TLS and an operator's token")

    lost = nodes[0]
    cloud.ec2.terminate_instances(InstanceIds=[lost])
    [new] = story.until("another node", lambda: story.others(group, nodes))
    again = lambda: (report := both()) and new in {rank["node"] for rank in report["status"]["ranks"]} and report
    story.until("both nodes train again", again)
    story.say(f"{lost} is gone without a notice: {new} has taken its place, the other one went on")

    story.baton("aws", "connect", "--name", name, "--", "drain")
    story.until("the group is empty", lambda: not cloud.members(group))
    story.say("drained by a person: saved, and no machine is paid for that idles")
    story.baton("aws", "down", "--name", name, "--delete-data", "--yes")
    assert not stacks(cloud) and not [found for found in cloud.ssm.describe_parameters()["Parameters"] if found["Name"].startswith("/baton/")]
    story.say("down: nothing is left, tokens neither")


def stacks(cloud):
    return [stack["StackName"] for stack in cloud.cloudformation.describe_stacks()["Stacks"]]


def same_bits(story, name):
    """The exported weights of the job and of a run on this machine that nobody disturbed."""
    sets = [word for entry in QUICK for word in ("--set", entry)]
    alone = story.folder / "alone"
    story.baton("up", "recipes/digits_cpu.toml", "--ranks", "1", "--run-dir", str(alone), "--listen", "127.0.0.1:0", *sets)
    bucket = story.cloud.s3.list_buckets()["Buckets"][0]["Name"]
    for source, target in ((f"s3://{bucket}/{name}/checkpoints", "a"), (str(alone / "checkpoints"), "b")):
        story.baton("checkpoint", "export", "--dir", source, "--out", str(story.folder / target))
    assert (story.folder / "a").read_bytes() == (story.folder / "b").read_bytes(), "the weights differ"


def look_for(story, secret):
    """Fails where a secret can be read by who should not."""
    cloud = story.cloud
    places = {"template and outputs": json.dumps(cloud.cloudformation.describe_stacks(), default=str)}
    for machine in [machine for machine in cloud.machines.values() if not machine.is_off]:
        places[f"user data of {machine.id}"] = machine.script
        places[f"console of {machine.id}"] = (machine.folder / "console.log").read_text(errors="replace")
        places[f"log of {machine.id}"] = machine.inside("journalctl").stdout
    for bucket in cloud.s3.list_buckets()["Buckets"]:
        for entry in cloud.s3.list_objects_v2(Bucket=bucket["Name"]).get("Contents", []):
            # Weights are no text, and come and go.
            if "/checkpoints/" not in entry["Key"] and entry["Size"] < 10_000_000:
                text = cloud.s3.get_object(Bucket=bucket["Name"], Key=entry["Key"])["Body"].read()
                places[entry["Key"]] = text.decode(errors="replace")
    for place, text in places.items():
        assert secret not in text, f"a token is in the {place}"


def main():
    repository, programs = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2]).resolve()
    chosen = sys.argv[3:] or ["single", "several"]
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
