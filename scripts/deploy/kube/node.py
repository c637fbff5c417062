"""Runs the commands of the manifests as processes here: what a cluster's machine would do, without containers."""

import base64
import contextlib
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import tempfile
import time
from pathlib import Path

import yaml

from .manifests import AGENTS, COORDINATOR, LEAST_GRACE, at_home, commands, created_secrets, exit_codes, kubectl


class Node:
    """Runs containers of the manifests as processes here: each volume is a folder, each mount path its place."""

    def __init__(self, m, programs, folder):
        self.m, self.folder = m, folder
        self.port = free_port()
        self.running = []
        libraries = programs.folder.parent.parent / ".libtorch/torch/lib"
        self.environment = {"PATH": f"{programs.folder}:{os.environ['PATH']}", "LD_LIBRARY_PATH": str(libraries), "HOME": str(folder)}
        # The README's own commands.
        for words in commands(m.readme):
            if words[:2] == ["baton", "cert"]:
                subprocess.run(words, cwd=folder, env=self.environment, check=True, capture_output=True)
        self.secrets = {}
        for secret in created_secrets(m.readme):
            made = yaml.safe_load(kubectl(*secret["command"][1:], "--dry-run=client", "-o", "yaml", cwd=folder))
            self.secrets[secret["name"]] = {key: base64.b64decode(value) for key, value in made["data"].items()}

    def place(self, pod_name, volume):
        """The folder of a volume, filled."""
        claim = volume.get("persistentVolumeClaim", {}).get("claimName")
        place = self.folder / "claims" / claim if claim else self.folder / pod_name / volume["name"]
        files = {}
        if "secret" in volume:
            files = self.secrets[volume["secret"]["secretName"]]
        if "configMap" in volume:
            texts = self.m.of("ConfigMap")[volume["configMap"]["name"]]["data"]
            files = {key: self.here(pod_name, text).encode() for key, text in texts.items()}
        if not place.exists():
            place.mkdir(parents=True)
            for name, content in files.items():
                with open(place / name, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
                    file.write(content)
        return place

    def here(self, pod_name, text):
        """A text of a pod with the cluster's paths, names and ports replaced by those that they have here."""
        pod = self.m.of("Job")[pod_name]["spec"]["template"]["spec"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in pod["containers"][0]["volumeMounts"]}
        # A recipe names no secrets, and no recipes.
        mounts = {path: volume for path, volume in mounts.items() if path in text}
        found = "|".join(re.escape(path) for path in sorted(mounts, key=len, reverse=True))
        if mounts:
            text = re.sub(rf"(?<![\w/.-])({found})(?![\w-])", lambda match: str(self.place(pod_name, mounts[match[1]])), text)
        text = text.replace("//baton-coordinator:29600", f"//localhost:{self.port}").replace("0.0.0.0:29600", f"127.0.0.1:{self.port}")
        return at_home(text).replace("$(POD_IP)", "127.0.0.1")

    def start(self, pod_name):
        container = self.m.of("Job")[pod_name]["spec"]["template"]["spec"]["containers"][0]
        command = [self.here(pod_name, word) for word in [*container["command"], *container["args"]]]
        variables = {v["name"]: self.here(pod_name, v["value"]) for v in container["env"] if "value" in v}
        with open(self.folder / f"{pod_name}.log", "ab") as log:
            # A group of its own, which nobody's Ctrl-C reaches and which can be ended as one.
            process = subprocess.Popen(command, cwd=self.folder, env=self.environment | variables, stdin=subprocess.DEVNULL,
                                       stdout=log, stderr=log, start_new_session=True)
        self.running.append(process)
        return process

    def stop_all(self):
        for process in self.running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def probe(self):
        """The coordinator's probe, as a kubelet makes it: HTTPS, HTTP/2 wished for, no certificate asked to be right."""
        coordinator = self.m.of("Job")[COORDINATOR]["spec"]["template"]["spec"]["containers"][0]
        get = coordinator["readinessProbe"]["httpGet"]
        request = f"GET {get['path']} HTTP/1.1\r\nHost: localhost:{self.port}\r\nConnection: close\r\n\r\n".encode()
        try:
            with self.connection(["h2", "http/1.1"]) as agreed:
                if agreed.selected_alpn_protocol() is None:
                    return False
            # The answer itself in words that need no library.
            with self.connection([]) as plain:
                plain.sendall(request)
                return 200 <= int(plain.recv(64).split(b" ")[1]) < 400
        except (OSError, IndexError):
            return False

    def connection(self, protocols):
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        if protocols:
            context.set_alpn_protocols(protocols)
        return context.wrap_socket(socket.create_connection(("127.0.0.1", self.port), 5))

    def status(self):
        """What a person sees by the README's commands."""
        variables = {"BATON_COORDINATOR": f"https://localhost:{self.port}", "BATON_TLS_CA": "certs/ca.pem", "BATON_TOKEN_FILE": "certs/viewer.token"}
        done = subprocess.run(["baton", "status", "--json"], cwd=self.folder, env=self.environment | variables, capture_output=True, text=True)
        return json.loads(done.stdout) if done.returncode == 0 else {}


def run_manifests(m, programs):
    """Yields what does not come about as the manifests and the README promise."""
    codes = exit_codes()
    with tempfile.TemporaryDirectory(prefix="baton-kubernetes-") as folder:
        node = Node(m, programs, Path(folder))

        def log(name):
            return f"; its log:\n{(Path(folder) / f'{name}.log').read_text()[-3000:]}"

        def ended(process, seconds):
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(seconds)

        try:
            if node.probe():
                yield "the coordinator's probe passes where nobody serves"
            coordinator = node.start(COORDINATOR)
            if not until(30, lambda: node.probe() or coordinator.poll() is not None) or not node.probe():
                yield "the coordinator's probe does not pass" + log(COORDINATOR)
                return
            agent = node.start(AGENTS)
            if not until(60, lambda: node.status().get("phase") == "training"):
                yield f"nobody trains: {node.status()}" + log(AGENTS)
                return
            coordinator.terminate()
            code = ended(coordinator, 30)
            if code != codes["DRAINED"]:
                yield f"a coordinator that must move ends with {code}; only {codes['DRAINED']} has its job go on"
            coordinator = node.start(COORDINATOR)
            if not until(30, lambda: node.probe() and node.status().get("phase") == "training"):
                yield "the next coordinator does not take the job up" + log(COORDINATOR)
            agent.terminate()
            code = ended(agent, LEAST_GRACE)
            if code != codes["DRAINED"]:
                yield f"an agent that must go ends with {code} instead of {codes['DRAINED']}" + log(AGENTS)
            code = ended(coordinator, LEAST_GRACE)
            if code != codes["DRAINED"]:
                yield f"a coordinator whose last agent went ends with {code} instead of {codes['DRAINED']}" + log(COORDINATOR)
            if not list(Path(folder).glob("claims/baton-checkpoints/*/manifest.json")):
                yield "nothing was saved where the recipe says"
        finally:
            node.stop_all()


def until(seconds, condition):
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
    return True


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]
