"""A simulated machine: an overlay over this machine's root file system, with systemd as its first process.

It has its own network with EC2's metadata service in it and its own disks (loop devices), and Baton's units run as
on any machine. Requires root, and a kernel with loop devices, namespaces and overlays.
"""

import contextlib
import ctypes
import http.server
import json
import os
import pathlib
import shutil
import signal
import subprocess
import threading
import time

BRIDGE = "10.78.0.1"
METADATA = "169.254.169.254"
CLONE_NEWNET = 0x40000000


def run(*command, check=True, **options):
    ended = subprocess.run(
        [str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options
    )
    if check and ended.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command))}: {ended.stdout.strip()}")
    return ended


def make_bridge():
    """Creates the bridge in the network namespace of this process, which belongs to the test."""
    run("ip", "link", "set", "lo", "up")
    run("ip", "link", "add", "br0", "type", "bridge")
    run("ip", "addr", "add", f"{BRIDGE}/16", "dev", "br0")
    # The address range that moto assigns.
    run("ip", "addr", "add", "172.31.255.254/16", "dev", "br0")
    run("ip", "link", "set", "br0", "up")


class Machine:
    count = 0

    def __init__(self, cloud, instance, address, script):
        self.cloud, self.id, self.address, self.script = cloud, instance, address, script
        Machine.count += 1
        self.number = Machine.count
        self.folder = cloud.folder / f"machine{self.number}"
        self.root = self.folder / "root"
        self.metadata = {
            "instance-id": instance,
            "local-ipv4": address,
            "placement/region": "us-east-1",
            "placement/availability-zone": "us-east-1a",
            "instance-life-cycle": "spot",
            "autoscaling/target-lifecycle-state": "InService",
            "iam/security-credentials/": "role",
            "iam/security-credentials/role": json.dumps(
                {
                    "Code": "Success",
                    "Type": "AWS-HMAC",
                    "AccessKeyId": "AKIAEXAMPLE",
                    "SecretAccessKey": "no-secret",
                    "Token": "t",
                    "LastUpdated": "2026-01-01T00:00:00Z",
                    "Expiration": "2099-01-01T00:00:00Z",
                }
            ),
        }
        self.loops, self.is_off, self.process, self.service = {}, False, None, None

    # --- Power --------------------------------------------------------------------------------

    def on(self):
        for name in ("layer", "root", "block"):
            (self.folder / name).mkdir(parents=True)
        # A separate file system, as the lower one may be an overlay already.
        run("mount", "-t", "tmpfs", "tmpfs", self.folder / "layer")
        for name in ("upper", "work"):
            (self.folder / "layer" / name).mkdir()
        run(
            "mount",
            "-t",
            "overlay",
            "overlay",
            "-o",
            f"lowerdir=/,upperdir={self.folder}/layer/upper,workdir={self.folder}/layer/work",
            self.root,
        )
        self.prepare_root()
        self.connect()
        self.boot()

    def prepare_root(self):
        units = self.root / "etc/systemd/system"
        # Without the services of this machine.
        shutil.rmtree(units, ignore_errors=True)
        (units / "multi-user.target.wants").mkdir(parents=True)
        script = self.root / "var/lib/user-data.sh"
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text(self.script)
        (units / "cloud-final.service").write_text(
            "[Unit]\nDescription=user data\nAfter=basic.target\n[Service]\nType=oneshot\nExecStart=/bin/bash /var/lib/user-data.sh\n"
            "[Install]\nWantedBy=multi-user.target\n"
        )
        (units / "multi-user.target.wants/cloud-final.service").symlink_to("../cloud-final.service")
        environment = {
            "AWS_ENDPOINT_URL": self.cloud.url,
            "AWS_ALLOW_HTTP": "true",
            "PATH": "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        }
        manager = self.root / "etc/systemd/system.conf.d"
        manager.mkdir(parents=True, exist_ok=True)
        words = " ".join(f'"{name}={value}"' for name, value in environment.items())
        (manager / "cloud.conf").write_text(f"[Manager]\nDefaultEnvironment={words}\n")
        (self.root / "etc/machine-id").write_text("")
        (self.root / "etc/fstab").write_text("")
        # Low priority: training must not slow down the steps of the test.
        nice = units / "baton-agent.service.d/nice.conf"
        nice.parent.mkdir()
        nice.write_text("[Service]\nNice=15\n")
        # What a machine's image has: the AWS CLI, and libtorch, which would take minutes from PyPI.
        aws = self.root / "usr/local/bin/aws"
        aws.unlink(missing_ok=True)
        aws.symlink_to(self.cloud.repository / ".venv-deploy/bin/aws")
        python = self.root / "usr/local/bin/python3"
        python.unlink(missing_ok=True)
        python.symlink_to(self.cloud.repository / ".venv-deploy/bin/python")
        baton = self.root / "opt/baton"
        baton.mkdir(parents=True, exist_ok=True)
        (baton / ".libtorch").symlink_to(self.cloud.repository / ".libtorch")

    def connect(self):
        """A network namespace on the bridge, with the metadata service inside."""
        name = f"m{self.number}"
        run("ip", "netns", "add", name)
        run("ip", "link", "add", f"v{self.number}", "type", "veth", "peer", "name", f"e{self.number}")
        run("ip", "link", "set", f"e{self.number}", "netns", name)
        run("ip", "link", "set", f"v{self.number}", "master", "br0", "up")
        run("ip", "-n", name, "link", "set", "lo", "up")
        run("ip", "-n", name, "addr", "add", f"{METADATA}/32", "dev", "lo")
        run("ip", "-n", name, "addr", "add", f"{self.address}/16", "dev", f"e{self.number}")
        run("ip", "-n", name, "link", "set", f"e{self.number}", "up")
        run("ip", "-n", name, "route", "add", "10.78.0.0/16", "via", "172.31.255.254")
        # For sessions with this machine.
        sessions = self.cloud.folder / "namespaces"
        sessions.mkdir(exist_ok=True)
        (sessions / self.id).write_text(f"/run/netns/{name}")
        with inside(f"/run/netns/{name}"):
            self.service = http.server.ThreadingHTTPServer((METADATA, 80), metadata_handler(self))
        threading.Thread(target=self.service.serve_forever, daemon=True).start()

    def boot(self):
        command = [
            "systemd-nspawn",
            "--quiet",
            "--boot",
            "--register=no",
            "--keep-unit",
            f"--directory={self.root}",
            f"--machine=m{self.number}",
            f"--network-namespace-path=/run/netns/m{self.number}",
            "--resolv-conf=off",
            "--timezone=off",
            "--link-journal=no",
            f"--bind={self.folder}/block:/sys/block",
            f"--bind-ro={self.cloud.repository}",
        ]
        # The programs of a virtual environment need the folder of its Python.
        for path in {pathlib.Path(os.path.realpath(self.cloud.repository / ".venv-deploy/bin/python")).parents[1]} - {
            pathlib.Path("/usr")
        }:
            command.append(f"--bind-ro={path}")
        log = open(self.folder / "console.log", "wb")
        groups = self.control_groups()
        for group in groups:
            group.mkdir(exist_ok=True)

        def enter():
            for group in groups:
                (group / "cgroup.procs").write_text(str(os.getpid()))

        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=enter)

    def control_groups(self):
        """The control groups of this machine's systemd, separate from those of other machines."""
        top = pathlib.Path("/sys/fs/cgroup")
        tops = (
            [top]
            if (top / "cgroup.procs").exists()
            else [top / name for name in ("systemd", "unified") if (top / name).exists()]
        )
        return [found / f"baton-m{self.number}-{os.getpid()}" for found in tops]

    def off(self):
        self.is_off = True
        if self.process and self.process.poll() is None:
            # A power failure, without a shutdown.
            leader = self.leader()
            if leader:
                os.kill(leader, signal.SIGKILL)
            self.process.kill()
            self.process.wait()
        if self.service:
            self.service.shutdown()
        for device in self.loops.values():
            run("losetup", "-d", device, check=False)
        for group in self.control_groups():
            deadline = time.time() + 5
            while group.exists() and time.time() < deadline:
                for folder, _, _ in os.walk(group, topdown=False):
                    try:
                        os.rmdir(folder)
                    except OSError:
                        time.sleep(0.05)  # Its processes are being killed.
        run("umount", "-l", self.root, check=False)
        run("umount", "-l", self.folder / "layer", check=False)
        run("ip", "netns", "del", f"m{self.number}", check=False)

    def has_shut_down(self):
        return self.process is not None and self.process.poll() is not None

    def leader(self):
        """The machine's first process, by its id outside; None before the start and at the end."""
        if self.process is None:
            return None
        children = lambda pid: pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        try:
            for child in children(self.process.pid):
                for grandchild in [child, *children(child)]:
                    status = pathlib.Path(f"/proc/{grandchild}/status").read_text()
                    ids = next(line for line in status.splitlines() if line.startswith("NSpid")).split()[1:]
                    if len(ids) > 1 and ids[-1] == "1":
                        return int(grandchild)
        except (FileNotFoundError, ProcessLookupError):
            pass  # The process ended during the search.
        return None

    # --- Inside -------------------------------------------------------------------------------

    def inside(self, *command, check=False):
        """Runs a command in the machine."""
        return run(
            "nsenter",
            "-t",
            self.leader(),
            "-m",
            "-u",
            "-i",
            "-n",
            "-p",
            "--root",
            "--wd=/",
            "--",
            *command,
            check=check,
        )

    def is_idle(self):
        """Whether Baton's services have run and ended."""
        states = self.inside(
            "systemctl",
            "is-active",
            "baton-agent",
            "baton-coordinator",
            "baton-ended@baton-agent",
            "baton-ended@baton-coordinator",
        ).stdout.split()
        return "active" not in states and "activating" not in states and "deactivating" not in states

    def log(self):
        if self.process is None:
            return "the machine has not started"
        console = (self.folder / "console.log").read_text(errors="replace")[-2000:]
        if self.is_off or not self.leader():
            return console
        return self.inside("journalctl", "--no-hostname", "-n", "80").stdout

    def plug(self, volume, disk):
        """Attaches a volume as a disk of the machine, with a name that does not identify the volume."""
        leader = self.leader()
        if volume in self.loops or not leader:
            return
        device = run("losetup", "--find", "--show", disk).stdout.strip()
        self.loops[volume] = device
        number = os.stat(device).st_rdev
        name = "nvme1n1"
        os.mknod(f"/proc/{leader}/root/dev/{name}", 0o660 | 0o060000, number)
        entry = self.folder / "block" / name / "device"
        entry.mkdir(parents=True)
        (entry / "serial").write_text(volume.replace("-", "") + "    \n")
        (entry / "model").write_text("Amazon Elastic Block Store              \n")


def metadata_handler(machine):
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def handle(self):
            # An error means that the machine was turned off.
            with contextlib.suppress(ConnectionError):
                super().handle()

        def answer(self, code, text):
            body = text.encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_PUT(self):
            has_ttl = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds")
            if self.path == "/latest/api/token" and has_ttl:
                body = b"token"
                self.send_response(200)
                self.send_header("X-aws-ec2-metadata-token-ttl-seconds", has_ttl)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
            else:
                self.answer(400, "<html>bad request</html>")

        def do_GET(self):
            # The template requires version 2 of the service: no answer without a token.
            if self.headers.get("X-aws-ec2-metadata-token") != "token":
                return self.answer(401, "<html>unauthorized</html>")
            if self.path == "/latest/dynamic/instance-identity/document":
                return self.answer(200, json.dumps({"instanceId": machine.id, "region": "us-east-1"}))
            value = machine.metadata.get(self.path.removeprefix("/latest/meta-data/"))
            return self.answer(404, "<html>not found</html>") if value is None else self.answer(200, value)

    return Handler


class inside:
    """Creates sockets of this thread in another network namespace."""

    def __init__(self, path):
        self.path = path

    def __enter__(self):
        self.before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        self.set(os.open(self.path, os.O_RDONLY))

    def __exit__(self, *_):
        self.set(self.before)

    @staticmethod
    def set(descriptor):
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns")
        os.close(descriptor)
