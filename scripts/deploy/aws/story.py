"""The life of jobs on EC2, from `baton aws up` to `baton aws down`, against moto and machines that boot.

    story.py REPOSITORY PROGRAMS [single|several]

Started by scripts/deploy/aws.sh, in namespaces of its own. Each line that it prints has been seen.
"""

import json
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

from cloud import Cloud
from machine import make_bridge

PATIENCE = 150
# Small enough for two cores, long enough to be interrupted.
QUICK = ["train.epochs=60", "train.global_batch=64", "train.resolution=8", "train.virtual_ranks=4", "model.arch=linear",
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
            if self.cloud.broken:
                raise self.cloud.broken
            assert time.time() < deadline, f"not seen within {PATIENCE} s: {what}"
            time.sleep(1)
        return seen

    def asked(self, machine, environment=()):
        """What the coordinator on a machine tells of its job; none where there is none."""
        ended = machine.inside("env", *environment, "/opt/baton/bin/baton", "status", "--json")
        return json.loads(ended.stdout) if ended.returncode == 0 else None

    def trains_on(self, name, machine):
        """What the coordinator on this machine tells once it trains."""
        def look():
            found = self.cloud.machines.get(machine)
            status = found and found.leader() and self.asked(found, ["BATON_COORDINATOR=http://127.0.0.1:29600"])
            return status if status and step(status) > 0 else None
        return self.until(f"{name} trains on {machine}", look)

    def told(self, name, machine, file):
        """What a machine has left in the bucket."""
        [bucket] = self.cloud.s3.list_buckets()["Buckets"]
        return self.cloud.s3.get_object(Bucket=bucket["Name"], Key=f"{name}/machines/{machine}/{file}")["Body"].read().decode()

    def train_alone(self):
        """The same training on this machine, which nobody disturbs."""
        sets = [word for entry in QUICK for word in ("--set", entry)]
        self.baton("up", "recipes/digits_cpu.toml", "--ranks", "1", "--run-dir", str(self.folder / "alone"), "--listen", "127.0.0.1:0", *sets)

    def others(self, group, known):
        return [member for member in self.cloud.members(group) if member not in known]


def step(status):
    return (status.get("latest") or {}).get("step", 0)


def goes_on(status, earliest):
    """Whether it began with a checkpoint of the machine before, and not anew."""
    assert "from checkpoint" in status["began_with"], status["began_with"]
    assert status["generation"] > 1 and step(status) >= earliest, (status["generation"], step(status), earliest)


def single(story):
    """One machine with a volume: launched, interrupted, rebalanced, completed, torn down."""
    cloud, name, group = story.cloud, "digits", "baton-digits"
    told = story.up(name, "--volume-gb", "1", "--max-price", "2.5", "--no-wait")
    [first] = cloud.members(group)
    assert "an hour" in told and "volume of 1 GB" in told, told
    assert story.trains_on(name, first)
    story.say(f"up: {first} trains")

    root = cloud.machines[first]
    # It stands still while it is looked at: on a quick machine it would be done before anything happens to it.
    assert root.inside("/opt/baton/bin/baton", "pause", "--coordinator", "http://127.0.0.1:29600").returncode == 0
    assert root.inside("findmnt", "-n", "-o", "FSTYPE", "/data").stdout.strip() == "ext4", "no volume at /data"
    assert root.inside("findmnt", "-n", "/var/lib/baton").returncode == 0, "the journal is not on the volume"
    users = root.inside("ps", "-o", "user=", "-C", "baton-worker,baton-coordinat").stdout.split()
    assert users and set(users) == {"baton"}, users
    story.say("the volume is at /data, whatever its disk is called; services run as their own user")
    try:
        socket.create_connection((root.address, 29600), timeout=2).close()
        raise AssertionError("the port of the coordinator is open")
    except ConnectionRefusedError:
        pass  # So the machine is there, and says no.
    story.say("the coordinator's port is closed to others")

    assert "paused" in story.baton("aws", "connect", "--name", name, "--", "status").lower()
    story.say("`baton aws connect -- status` asks the coordinator over gRPC, through a session")
    told = story.up(name)
    assert "go on as they are" in told and "waiting until it trains" in told and first in told, told
    story.say("a second launch leaves a job that runs alone, waits until it has begun, and shows its status")

    before = step(story.asked(root, ["BATON_COORDINATOR=http://127.0.0.1:29600"]))
    cloud.interrupt(first)
    [second] = story.until("another machine", lambda: story.others(group, [first]))
    assert "saved" in json.loads(story.told(name, first, "stage.json"))["stage"], "the machine did not say that it has saved"
    goes_on(story.trains_on(name, second), before)
    story.say(f"a spot interruption: {second} has the volume, and goes on from step {before} or later without a hand")

    alone = threading.Thread(target=story.train_alone)
    alone.start()
    cloud.machines[second].inside("/opt/baton/bin/baton", "pause", "--coordinator", "http://127.0.0.1:29600", check=True)
    cloud.rebalance(group, second)
    assert second in cloud.completed_hooks, "the machine did not say that it has saved"
    [third] = story.until("another machine", lambda: story.others(group, [first, second]))
    goes_on(story.trains_on(name, third), before)
    story.say(f"a rebalance recommendation: {second} saved within its hook, {third} waited and goes on")

    story.until("the group is empty", lambda: not cloud.members(group))
    last = story.status(name)
    assert last["wanted"] == 0 and last["report"]["instance"] == third, last
    assert "completed" in story.baton("aws", "logs", third), "the only job needs no name"
    listed = story.baton("aws", "logs", "--name", name, "--list").split()
    assert set(listed) == {first, second, third}, listed
    story.say("completed: the group has set itself to 0, so nothing is paid for; status and logs come from the bucket")

    alone.join()
    same_bits(story, name)
    story.say("the weights have the bits of an undisturbed run on this machine")

    told = story.baton("aws", "down", "--name", name, "--yes")
    assert "vol-" in told and "s3://" in told, told
    kept = [volume for volume in cloud.ec2.describe_volumes()["Volumes"] if volume["VolumeId"] in cloud.volumes]
    assert len(kept) == 1 and not stacks(cloud), (kept, stacks(cloud))
    story.say("down: the stack is gone, volume and checkpoints are kept")
    bucket = cloud.s3.list_buckets()["Buckets"][0]["Name"]
    assert f"--delete-data --bucket {bucket}`" in told, told
    story.baton("aws", "down", "--name", name, "--delete-data", "--bucket", bucket, "--yes")
    assert not [volume for volume in cloud.ec2.describe_volumes()["Volumes"] if volume["VolumeId"] in cloud.volumes]
    assert "Contents" not in cloud.s3.list_objects_v2(Bucket=bucket), "something is left in the bucket"
    story.say("down --delete-data: nothing is left")


def several(story):
    """Two nodes and a coordinator: TLS, tokens by Parameter Store, a node lost without a word, a drain."""
    cloud, name, group = story.cloud, "nodes", "baton-nodes"
    told = story.up(name, "--nodes", "2", "--set", "cluster.min_ranks=1", "--set", "train.epochs=100000", "--no-wait")
    assert "is launched" in told, told
    nodes = story.until("two nodes", lambda: (found := cloud.members(group)) and len(found) == 2 and found)
    find = lambda: [machine for machine in cloud.machines.values() if machine.id not in nodes and not machine.is_off and machine.leader()]
    [coordinator] = story.until("the coordinator's machine", find)
    keys = ["BATON_COORDINATOR=https://127.0.0.1:29600", "BATON_TLS_CA=/etc/baton/certs/ca.pem",
            "BATON_TOKEN_FILE=/etc/baton/certs/viewer.token"]
    both = lambda: (status := story.asked(coordinator, keys)) and len(status["ranks"]) == 2 and step(status) > 0 and status
    story.until("both nodes train", both)
    story.say(f"up: {coordinator.id} coordinates, {' and '.join(nodes)} train")

    token = coordinator.inside("cat", "/etc/baton/certs/operator.token").stdout.strip()
    agent_token = coordinator.inside("cat", "/etc/baton/certs/agent.token").stdout.strip()
    assert len(token) > 20 and len(agent_token) > 20
    kinds = {found["Name"]: found["Type"] for found in cloud.ssm.describe_parameters()["Parameters"] if found["Name"].startswith("/baton/")}
    assert kinds and set(kinds.values()) == {"SecureString"}, kinds
    for secret in (token, agent_token):
        look_for(story, secret)
    story.say("tokens are in Parameter Store, encrypted, and in no template, output, user data, log or report")
    without = ["BATON_COORDINATOR=https://" + coordinator.address + ":29600", keys[1]]
    refused = cloud.machines[nodes[0]].inside("env", *without, "/opt/baton/bin/baton", "status")
    assert refused.returncode == 2 and "token" in refused.stdout, refused.stdout
    assert "training" in story.baton("aws", "connect", "--name", name, "--", "status").lower()
    story.say("`baton aws connect -- status` steers it with TLS and an operator's token")

    lost = nodes[0]
    cloud.ec2.terminate_instances(InstanceIds=[lost])
    [new] = story.until("another node", lambda: story.others(group, nodes))
    again = lambda: (status := both()) and new in {rank["node"] for rank in status["ranks"]} and status
    status = story.until("both nodes train again", again)
    assert "state of rank" in status["began_with"], f"the other one did not go on: {status['began_with']}"
    story.say(f"{lost} is gone without a notice: {new} has taken its place, the other one went on")

    story.baton("aws", "connect", "--name", name, "--", "drain")
    story.until("the group is empty", lambda: not cloud.members(group))
    story.say("drained by a person: saved, and no machine is paid for that idles")
    story.baton("aws", "down", "--name", name, "--delete-data", "--yes")
    assert not stacks(cloud) and not [found for found in cloud.ssm.describe_parameters()["Parameters"] if found["Name"].startswith("/baton/")]
    for bucket in cloud.s3.list_buckets()["Buckets"]:
        assert "Contents" not in cloud.s3.list_objects_v2(Bucket=bucket["Name"]), "something is left in the bucket"
    story.say("down: nothing is left, tokens neither")


def stacks(cloud):
    return [stack["StackName"] for stack in cloud.cloudformation.describe_stacks()["Stacks"]]


def same_bits(story, name):
    """The exported weights of the job and of a run on this machine that nobody disturbed."""
    bucket = story.cloud.s3.list_buckets()["Buckets"][0]["Name"]
    for source, target in ((f"s3://{bucket}/{name}/checkpoints", "a"), (str(story.folder / "alone/checkpoints"), "b")):
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


def detach_lost_disks():
    """Disks of a run that was killed; loop devices are of the whole machine."""
    listed = json.loads(subprocess.run(["losetup", "--list", "--json", "--output", "NAME,BACK-FILE"], capture_output=True, check=True).stdout or "{}")
    for disk in listed.get("loopdevices", []):
        if "/baton-cloud-" in disk["back-file"] and "(deleted)" in disk["back-file"]:
            subprocess.run(["losetup", "-d", disk["name"]], check=False)


def main():
    repository, programs = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2]).resolve()
    chosen = sys.argv[3:] or ["single", "several"]
    # Told to end, it ends its machines first.
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
