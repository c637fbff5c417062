"""Breaks the manifests in memory, and requires an error for each."""

import copy

from .checks import complaints
from .manifests import AGENTS as A
from .manifests import COORDINATOR as C
from .manifests import load


def job(m, name):
    return m.of("Job")[name]["spec"]


def pod(m, name):
    return job(m, name)["template"]["spec"]


def box(m, name):
    return pod(m, name)["containers"][0]


def drop(items, name):
    items[:] = [item for item in items if item.get("name") != name]


def replace(items, old, new):
    items[:] = [item.replace(old, new) for item in items]


def edit_recipe(m, old, new):
    data = m.of("ConfigMap")["baton-recipe"]["data"]
    assert old in data["job.toml"], old
    data["job.toml"] = data["job.toml"].replace(old, new)


def edit_readme(m, old, new):
    assert old in m.readme, old
    m.readme = m.readme.replace(old, new)


# Breakages of cpu/, each with a part of the expected error.
BREAKAGES = (
    ("a field that does not exist", lambda m: box(m, A).update(imagePullPolice="Always"), "imagePullPolice"),
    ("a field of the wrong type", lambda m: job(m, A).update(completions="two"), "completions"),
    (
        "a secret in the folder",
        lambda m: m.documents.append(
            {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "x", "namespace": "baton"}}
        ),
        "no Secret is expected",
    ),
    ("a document twice", lambda m: m.documents.append(copy.deepcopy(m.of("Service")[C])), "there twice"),
    ("another namespace", lambda m: m.of("Service")[C]["metadata"].update(namespace="default"), "not in namespace"),
    (
        "a lenient namespace",
        lambda m: m.of("Namespace")["baton"]["metadata"]["labels"].update(
            {"pod-security.kubernetes.io/enforce": "baseline"}
        ),
        "restricted",
    ),
    ("root", lambda m: pod(m, A)["securityContext"].update(runAsUser=0), "runAsUser"),
    ("no runAsNonRoot", lambda m: pod(m, C)["securityContext"].pop("runAsNonRoot"), "runAsNonRoot"),
    ("privileged", lambda m: box(m, A)["securityContext"].update(privileged=True), "privileged"),
    ("a capability", lambda m: box(m, A)["securityContext"]["capabilities"].update(add=["IPC_LOCK"]), "capabilities"),
    (
        "a root that can be written",
        lambda m: box(m, C)["securityContext"].pop("readOnlyRootFilesystem"),
        "readOnlyRootFilesystem",
    ),
    ("escalation", lambda m: box(m, C)["securityContext"].pop("allowPrivilegeEscalation"), "allowPrivilegeEscalation"),
    ("no seccomp", lambda m: pod(m, A)["securityContext"].pop("seccompProfile"), "seccompProfile"),
    ("the host's network", lambda m: pod(m, A).update(hostNetwork=True), "hostNetwork"),
    (
        "the host's files",
        lambda m: pod(m, A)["volumes"].append({"name": "host", "hostPath": {"path": "/"}}),
        "hostPath",
    ),
    ("the cluster's token", lambda m: pod(m, A).pop("automountServiceAccountToken"), "automountServiceAccountToken"),
    ("service links", lambda m: pod(m, A).pop("enableServiceLinks"), "enableServiceLinks"),
    (
        "a token in a variable",
        lambda m: box(m, A)["env"].append({"name": "BATON_TOKEN", "value": "x" * 20}),
        "must be a file of a secret",
    ),
    (
        "secrets that all may read",
        lambda m: next(v for v in pod(m, A)["volumes"] if v["name"] == "secret")["secret"].update(defaultMode=0o444),
        "defaultMode",
    ),
    ("no limit", lambda m: box(m, A)["resources"].pop("limits"), "limit for memory"),
    (
        "a config map that is not there",
        lambda m: m.documents.remove(m.of("ConfigMap")["baton-recipe"]),
        "config map baton-recipe is used",
    ),
    (
        "a claim that is not there",
        lambda m: m.documents.remove(m.of("PersistentVolumeClaim")["baton-checkpoints"]),
        "claim baton-checkpoints is used",
    ),
    (
        "an unused claim",
        lambda m: m.of("PersistentVolumeClaim")[C]["metadata"].update(name="other"),
        "claim other is there but not used",
    ),
    (
        "a secret that no command creates",
        lambda m: edit_readme(m, "secret generic baton-agent", "secret generic baton-agents"),
        "not made by the README",
    ),
    (
        "a key that no command creates",
        lambda m: edit_readme(m, "--from-file=certs/agent.token", ""),
        "agent.token: its volume has",
    ),
    (
        "a service account that is not there",
        lambda m: pod(m, A).update(serviceAccountName="default"),
        "service account default",
    ),
    ("a mount without its volume", lambda m: drop(pod(m, A)["volumes"], "shm"), "shm is mounted but not there"),
    ("a volume without its mount", lambda m: drop(box(m, A)["volumeMounts"], "shm"), "shm is there but not mounted"),
    ("a file that no volume has", lambda m: replace(box(m, C)["args"], "tokens", "token"), "its volume has"),
    (
        "a run folder in the image",
        lambda m: replace(box(m, A)["args"], "/var/lib/baton", "/opt/baton/run"),
        "no volume is mounted",
    ),
    (
        "a run folder on a secret",
        lambda m: replace(box(m, A)["args"], "/var/lib/baton", "/etc/baton/secret/x"),
        "cannot be written",
    ),
    ("an unknown flag", lambda m: box(m, A)["args"].append("--gpus=8"), "has no --gpus"),
    ("a flag without its value", lambda m: box(m, A)["args"].append("--node-id"), "needs a value"),
    ("an unknown command", lambda m: replace(box(m, A)["args"], "agent", "agents"), "has no agents"),
    ("no program", lambda m: box(m, A).update(command=["sleep"]), "none of Baton's programs"),
    (
        "a shell that keeps the arguments",
        lambda m: replace(box(m, C)["command"], '"$@"', ""),
        "does not pass arguments",
    ),
    (
        "a variable that no program reads",
        lambda m: box(m, A)["env"].append({"name": "BATON_RANKS", "value": "8"}),
        "does not read BATON_RANKS",
    ),
    (
        "another variable that no program reads",
        lambda m: box(m, A)["env"].append({"name": "AWS_REGIO", "value": "x"}),
        "no program reads AWS_REGIO",
    ),
    ("a reference to no variable", lambda m: drop(box(m, A)["env"], "POD_IP"), "$(POD_IP) is no variable"),
    ("pods that are started again", lambda m: pod(m, A).update(restartPolicy="OnFailure"), "restartPolicy"),
    (
        "a divergence that is tried again",
        lambda m: job(m, C)["podFailurePolicy"]["rules"][0]["onExitCodes"].update(values=[3, 4]),
        "exit.rs",
    ),
    (
        "one bad machine that ends all",
        lambda m: job(m, A)["podFailurePolicy"]["rules"][1].update(action="FailJob"),
        "exit.rs",
    ),
    ("an index that cannot fail alone", lambda m: job(m, A).pop("backoffLimitPerIndex"), "exit.rs"),
    ("a drain that counts as failure", lambda m: job(m, C)["podFailurePolicy"]["rules"].pop(1), "exit.rs"),
    (
        "rules for another container",
        lambda m: job(m, C)["podFailurePolicy"]["rules"][1]["onExitCodes"].update(containerName="x"),
        "names no container",
    ),
    ("a spot end that counts as failure", lambda m: job(m, A)["podFailurePolicy"]["rules"].pop(), "DisruptionTarget"),
    ("a place taken twice", lambda m: job(m, A).pop("podReplacementPolicy"), "podReplacementPolicy"),
    ("no time to save", lambda m: pod(m, A).update(terminationGracePeriodSeconds=60), "too short to save"),
    ("the default time to save", lambda m: pod(m, C).pop("terminationGracePeriodSeconds"), "too short to save"),
    (
        "a drain longer than the grace",
        lambda m: edit_recipe(m, "[cluster]\n", "[cluster]\ndrain_seconds = 150.0\n"),
        "too short to save",
    ),
    ("agents that wait for each other's end", lambda m: job(m, A).pop("successPolicy"), "successPolicy"),
    ("a policy that needs an index", lambda m: job(m, A).pop("completionMode"), "needs completionMode"),
    ("fewer at a time than in all", lambda m: job(m, A).update(parallelism=1), "differ"),
    ("a service that selects no pods", lambda m: m.of("Service")[C]["spec"]["selector"].update(x="y"), "chooses 0"),
    (
        "a port that is not there",
        lambda m: m.of("Service")[C]["spec"]["ports"][0].update(targetPort="http"),
        "no port http",
    ),
    ("no TLS", lambda m: box(m, C)["args"].remove("--tls-cert=/etc/baton/secret/coordinator.pem"), "without TLS"),
    ("no tokens", lambda m: box(m, C)["args"].remove("--tokens=/etc/baton/secret/tokens"), "without TLS or tokens"),
    ("another port to listen on", lambda m: replace(box(m, C)["args"], "29600", "29601"), "none of its ports"),
    ("a gRPC probe", lambda m: box(m, C).update(livenessProbe={"grpc": {"port": 29600}}), "does not support TLS"),
    ("a plain probe", lambda m: box(m, C)["readinessProbe"]["httpGet"].pop("scheme"), "scheme must be HTTPS"),
    ("no probe", lambda m: box(m, C).pop("startupProbe"), "no startupProbe"),
    (
        "a probe's program that is not there",
        lambda m: box(m, A).update(readinessProbe={"exec": {"command": ["curl"]}}),
        "the image has no curl",
    ),
    (
        "agents that call another name",
        lambda m: next(v for v in box(m, A)["env"] if v["name"] == "BATON_COORDINATOR").update(
            value="https://coordinator:29600"
        ),
        "no service has that name",
    ),
    (
        "agents that call without TLS",
        lambda m: next(v for v in box(m, A)["env"] if v["name"] == "BATON_COORDINATOR").update(
            value="http://baton-coordinator:29600"
        ),
        "does not match the coordinator's TLS",
    ),
    (
        "a certificate for another name",
        lambda m: edit_readme(m, "--host baton-coordinator", "--host coordinator"),
        "certificate is not for",
    ),
    ("an open network", lambda m: m.documents.remove(m.of("NetworkPolicy")["nothing"]), "forbids what none allows"),
    (
        "a rule for everybody",
        lambda m: m.of("NetworkPolicy")["coordinator"]["spec"]["ingress"][0].pop("from"),
        "open to all peers",
    ),
    (
        "a rule that selects no pods",
        lambda m: m.of("NetworkPolicy")["agents"]["spec"]["podSelector"]["matchLabels"].update(
            {"app.kubernetes.io/component": "agents"}
        ),
        "no pod has",
    ),
    (
        "agents that cannot meet",
        lambda m: m.of("NetworkPolicy")["agents"]["spec"].pop("ingress"),
        "no connection is allowed from baton-agents to baton-agents",
    ),
    (
        "agents that cannot call",
        lambda m: m.of("NetworkPolicy")["agents"]["spec"]["egress"].pop(),
        "no connection is allowed from baton-agents to baton-coordinator",
    ),
    (
        "a coordinator open on all ports",
        lambda m: m.of("NetworkPolicy")["coordinator"]["spec"]["ingress"][0].pop("ports"),
        "on other ports than its own",
    ),
    ("a recipe against the rules", lambda m: edit_recipe(m, "global_batch = 64", "global_batch = 63"), "recipe"),
    ("a recipe with an unknown key", lambda m: edit_recipe(m, "[train]", "[train]\nepoch = 1"), "epoch"),
    (
        "checkpoints that only one pod sees",
        lambda m: edit_recipe(m, '"/checkpoints"', '"/var/lib/baton/c"'),
        "on a claim that all mount",
    ),
    ("more agents than the recipe takes", lambda m: job(m, A).update(parallelism=3, completions=3), "3 ranks start"),
    (
        "GPUs for a recipe without",
        lambda m: box(m, A)["resources"]["limits"].update({"nvidia.com/gpu": "1"}),
        "has 1 GPUs",
    ),
    ("an image that is not built", lambda m: box(m, A).update(image="baton:latest"), "the Dockerfile's targets"),
    (
        "a README's flag that is not there",
        lambda m: edit_readme(m, "kubectl apply -k", "kubectl apply --kustomise"),
        "has no --kustomise",
    ),
    (
        "a README's folder that is not there",
        lambda m: edit_readme(m, "deploy/kubernetes/cpu", "deploy/kubernetes/kind"),
        "there is no deploy/kubernetes/kind",
    ),
    (
        "a README's job that is not there",
        lambda m: edit_readme(m, "job/baton-agents", "job/agents"),
        "there is no job/agents",
    ),
)

# The same in gpu/.
OF_GPUS = (
    ("an image without CUDA", lambda m: box(m, A).update(image="baton:cpu"), "for agents with 8 GPUs"),
    (
        "a machine without room for the cache",
        lambda m: box(m, A)["resources"]["requests"].pop("ephemeral-storage"),
        "data.cache_gib",
    ),
    (
        "fewer GPUs than the recipe requires",
        lambda m: box(m, A)["resources"]["limits"].update({"nvidia.com/gpu": "2"}),
        "4 ranks start",
    ),
    (
        "a recipe for the CPU",
        lambda m: edit_recipe(m, 'device = "cuda"\ncollective = "nccl"', 'device = "cpu"\ncollective = "tcp"'),
        "cluster.device is cpu",
    ),
)


def self_test(programs):
    cpu, gpu, _ = load()
    found = complaints(cpu, programs) + complaints(gpu, programs)
    if found:
        return [f"self-test: the manifests themselves are not sound: {line}" for line in found]
    failures = []
    breakages = [(cpu, *breakage) for breakage in BREAKAGES] + [(gpu, *breakage) for breakage in OF_GPUS]
    for whole, name, damage, word in breakages:
        broken = copy.deepcopy(whole)
        damage(broken)
        found = complaints(broken, programs)
        if not any(word in line for line in found):
            failures.append(f"self-test: {name}: expected a complaint with {word!r}, got {found}")
    print(f"kubernetes: {len(breakages)} ways to break the manifests, {len(failures)} unnoticed")
    return failures
