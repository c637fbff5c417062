"""Runs the commands of the manifests as local processes, like a machine of a cluster but without containers.

Nothing depends on how fast this machine is: the job has no end until its agent is taken away.
"""

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

from .manifests import AGENTS, COORDINATOR, at_home, commands, created_secrets, exit_codes, kubectl

# Limit for each wait; reached only when something is broken.
TIMEOUT_SECONDS = 600


class Node:
    """Runs containers of the manifests as local processes: each volume is a folder, which replaces its mount path."""

    def __init__(self, m, programs, folder):
        self.m, self.folder = m, folder
        self.port = free_port()
        self.running = []
        libraries = programs.folder.parent.parent / ".libtorch/torch/lib"
        self.environment = {
            "PATH": f"{programs.folder}:{os.environ['PATH']}",
            "LD_LIBRARY_PATH": str(libraries),
            "HOME": str(folder),
        }
        # The commands of the README.
        for words in commands(m.readme):
            if words[:2] == ["baton", "cert"]:
                subprocess.run(words, cwd=folder, env=self.environment, check=True, capture_output=True)
        self.secrets = {}
        for secret in created_secrets(m.readme):
            made = yaml.safe_load(kubectl(*secret["command"][1:], "--dry-run=client", "-o", "yaml", cwd=folder))
            self.secrets[secret["name"]] = {key: base64.b64decode(value) for key, value in made["data"].items()}

    def volume_folder(self, pod_name, volume):
        """Creates the folder of a volume with its files."""
        claim = volume.get("persistentVolumeClaim", {}).get("claimName")
        path = self.folder / "claims" / claim if claim else self.folder / pod_name / volume["name"]
        files = {}
        if "secret" in volume:
            files = self.secrets[volume["secret"]["secretName"]]
        if "configMap" in volume:
            texts = self.m.of("ConfigMap")[volume["configMap"]["name"]]["data"]
            files = {key: endless(self.here(pod_name, text)).encode() for key, text in texts.items()}
        if not path.exists():
            path.mkdir(parents=True)
            for name, content in files.items():
                with open(path / name, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                    file.write(content)
        return path

    def here(self, pod_name, text):
        """Replaces the cluster's paths, names and ports in a text of a pod by local ones."""
        pod = self.m.of("Job")[pod_name]["spec"]["template"]["spec"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in pod["containers"][0]["volumeMounts"]}
        # Only volumes that the text names: a recipe names no secrets and no recipes.
        mounts = {path: volume for path, volume in mounts.items() if path in text}
        found = "|".join(re.escape(path) for path in sorted(mounts, key=len, reverse=True))
        if mounts:
            text = re.sub(
                rf"(?<![\w/.-])({found})(?![\w-])",
                lambda match: str(self.volume_folder(pod_name, mounts[match[1]])),
                text,
            )
        text = text.replace("//baton-coordinator:29600", f"//localhost:{self.port}").replace(
            "0.0.0.0:29600", f"127.0.0.1:{self.port}"
        )
        return at_home(text).replace("$(POD_IP)", "127.0.0.1")

    def start(self, pod_name):
        container = self.m.of("Job")[pod_name]["spec"]["template"]["spec"]["containers"][0]
        command = [self.here(pod_name, word) for word in [*container["command"], *container["args"]]]
        variables = {v["name"]: self.here(pod_name, v["value"]) for v in container["env"] if "value" in v}
        with open(self.folder / f"{pod_name}.log", "ab") as log:
            # A separate process group, which Ctrl-C does not reach and which can be killed as a whole.
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=self.environment | variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.running.append(process)
        return process

    def stop_all(self):
        for process in self.running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def probe(self):
        """The coordinator's probe, like a kubelet's: HTTPS, HTTP/2 preferred, the certificate is not verified."""
        coordinator = self.m.of("Job")[COORDINATOR]["spec"]["template"]["spec"]["containers"][0]
        get = coordinator["readinessProbe"]["httpGet"]
        request = f"GET {get['path']} HTTP/1.1\r\nHost: localhost:{self.port}\r\nConnection: close\r\n\r\n".encode()
        try:
            with self.connection(["h2", "http/1.1"]) as agreed:
                if agreed.selected_alpn_protocol() is None:
                    return False
            # The request itself over HTTP/1.1, which needs no library.
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
        """The status as a user gets it with the README's commands."""
        variables = {
            "BATON_COORDINATOR": f"https://localhost:{self.port}",
            "BATON_TLS_CA": "certs/ca.pem",
            "BATON_TOKEN_FILE": "certs/viewer.token",
        }
        done = subprocess.run(
            ["baton", "status", "--json"],
            cwd=self.folder,
            env=self.environment | variables,
            capture_output=True,
            text=True,
        )
        return json.loads(done.stdout) if done.returncode == 0 else {}


def run_manifests(m, programs):
    """Yields an error for everything that does not work as in the manifests and the README."""
    codes = exit_codes()
    with tempfile.TemporaryDirectory(prefix="baton-kubernetes-") as folder:
        node = Node(m, programs, Path(folder))

        def log(name):
            return f"; its log:\n{(Path(folder) / f'{name}.log').read_text()[-3000:]}"

        def ended(process):
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(TIMEOUT_SECONDS)

        try:
            if node.probe():
                yield "the coordinator's probe passes without a coordinator"
            coordinator = node.start(COORDINATOR)
            if not until(lambda: node.probe() or coordinator.poll() is not None) or not node.probe():
                yield "the coordinator's probe does not pass" + log(COORDINATOR)
                return
            agent = node.start(AGENTS)
            if not until(lambda: node.status().get("phase") == "training"):
                yield f"no training within {TIMEOUT_SECONDS} s: {node.status()}" + log(AGENTS)
                return
            coordinator.terminate()
            code = ended(coordinator)
            if code != codes["DRAINED"]:
                yield f"a coordinator that must move ends with {code}; its Job continues only after {codes['DRAINED']}"
            coordinator = node.start(COORDINATOR)
            if not until(lambda: node.probe() and node.status().get("phase") == "training"):
                yield "the next coordinator does not continue the job" + log(COORDINATOR)
            agent.terminate()
            code = ended(agent)
            if code != codes["DRAINED"]:
                yield f"an agent that is taken away ends with {code} instead of {codes['DRAINED']}" + log(AGENTS)
            code = ended(coordinator)
            if code != codes["DRAINED"]:
                yield f"a coordinator whose last agent has left ends with {code} instead of {codes['DRAINED']}" + log(
                    COORDINATOR
                )
            if not list(Path(folder).glob("claims/baton-checkpoints/*/manifest.json")):
                yield "no checkpoint was saved in the recipe's folder"
        finally:
            node.stop_all()


def endless(recipe):
    text, found = re.subn(r"^epochs = \d+$", "epochs = 1000000", recipe, flags=re.M)
    assert found == 1, "the recipe's number of epochs was not found: this check would depend on how fast the machine is"
    return text


def until(condition):
    end = time.monotonic() + TIMEOUT_SECONDS
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
    return True


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]
