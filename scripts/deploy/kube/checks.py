"""The checks of the manifests that need no run. Each check yields one line per error."""

import functools
import json
import re
import shlex
from pathlib import Path

import kubernetes_validate

from .manifests import (
    AGENTS,
    COORDINATOR,
    LEAST_GRACE,
    ROOT,
    commands,
    exit_codes,
    image_targets,
    image_user,
    kubectl,
    kubectl_help,
    sources,
)

# In the oldest, all features that we use are always enabled (successPolicy, backoffLimitPerIndex).
VERSIONS = ("1.33", kubernetes_validate.latest_version())
NAMESPACE = "baton"
KINDS = {"Namespace", "ServiceAccount", "Service", "ConfigMap", "PersistentVolumeClaim", "Job", "NetworkPolicy"}
# Seconds after cluster.drain_seconds to kill ranks, report and exit.
AFTER_DRAIN = 10
# Flags of folders that are written.
WRITTEN = {"--run-dir"}


@functools.cache
def schema_problem(document, version):
    try:
        kubernetes_validate.validate(json.loads(document), version, strict=True)
    except kubernetes_validate.ValidationError as error:
        location = ".".join(str(part) for part in error.path)
        return f"Kubernetes {version}: {location}: {error.message}"
    except kubernetes_validate.SchemaNotFoundError as error:
        return error.message


def check_schemas(m, _):
    for document in m.documents:
        for version in VERSIONS:
            problem = schema_problem(json.dumps(document), version)
            if problem:
                yield f"{title(document)}: {problem}"


def check_kinds(m, _):
    titles = [title(document) for document in m.documents]
    for repeated in sorted({one for one in titles if titles.count(one) > 1}):
        yield f"{repeated} is there twice"
    for document in m.documents:
        kind = document["kind"]
        if kind not in KINDS:
            yield f"{title(document)}: no {kind} is expected here" + (
                ", secrets least of all" if kind == "Secret" else ""
            )
        elif kind != "Namespace" and document["metadata"].get("namespace") != NAMESPACE:
            yield f"{title(document)} is not in namespace {NAMESPACE}"
    if (
        m.of("Namespace")
        .get(NAMESPACE, {})
        .get("metadata", {})
        .get("labels", {})
        .get("pod-security.kubernetes.io/enforce")
        != "restricted"
    ):
        yield f"namespace {NAMESPACE} does not enforce pod-security.kubernetes.io: restricted"


def check_rights(m, _):
    uid, gid = image_user()
    for name, _, pod in m.pods():
        security = pod.get("securityContext", {})
        for key, expected in {"runAsNonRoot": True, "runAsUser": uid, "runAsGroup": gid, "fsGroup": gid}.items():
            if security.get(key) != expected:
                yield f"{name}: securityContext.{key} must be {expected}, as in the image"
        if security.get("seccompProfile", {}).get("type") != "RuntimeDefault":
            yield f"{name}: seccompProfile must be RuntimeDefault"
        for key in ("hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"):
            if pod.get(key):
                yield f"{name}: {key} is set"
        for key in ("automountServiceAccountToken", "enableServiceLinks"):
            if pod.get(key) is not False:
                yield f"{name}: {key} must be false"
        for volume in pod.get("volumes", []):
            kinds = set(volume) - {"name"}
            if not kinds <= {"configMap", "secret", "emptyDir", "persistentVolumeClaim"}:
                yield f"{name}: volume {volume['name']}: {', '.join(kinds)} is not allowed"
            if "secret" in volume and volume["secret"].get("defaultMode") != 0o440:
                yield f"{name}: volume {volume['name']}: defaultMode must be 0440, or Baton refuses the files"
    for name, _, container in m.containers():
        security = container.get("securityContext", {})
        if security.get("privileged"):
            yield f"{name}: privileged"
        if security.get("allowPrivilegeEscalation") is not False:
            yield f"{name}: allowPrivilegeEscalation must be false"
        if security.get("readOnlyRootFilesystem") is not True:
            yield f"{name}: readOnlyRootFilesystem must be true"
        if security.get("capabilities") != {"drop": ["ALL"]}:
            yield f"{name}: capabilities must be drop: [ALL]"
        for key in ("runAsUser", "runAsGroup", "runAsNonRoot", "seccompProfile"):
            if key in security:
                yield f"{name}: securityContext.{key} belongs to the pod"
        for port in container.get("ports", []):
            if "hostPort" in port:
                yield f"{name}: hostPort is set"
        for variable in container.get("env", []):
            if re.search(r"TOKEN$|SECRET|PASSWORD|ACCESS_KEY", variable["name"]):
                yield f"{name}: {variable['name']} must be a file of a secret"
        if "memory" not in container.get("resources", {}).get("limits", {}):
            yield f"{name}: no limit for memory"


def check_references(m, _):
    secrets = m.secrets()
    claims, maps, accounts = m.of("PersistentVolumeClaim"), m.of("ConfigMap"), m.of("ServiceAccount")
    used_secrets, used_maps, used_claims = set(), set(), set()
    for name, _, pod in m.pods():
        if pod.get("serviceAccountName") not in accounts:
            yield f"{name}: service account {pod.get('serviceAccountName')} is not here"
        volumes = {volume["name"]: volume for volume in pod.get("volumes", [])}
        mounted = {mount["name"] for c in pod["containers"] for mount in c.get("volumeMounts", [])}
        for volume in sorted(mounted - set(volumes)):
            yield f"{name}: volume {volume} is mounted but not there"
        for volume in sorted(set(volumes) - mounted):
            yield f"{name}: volume {volume} is there but not mounted"
        for volume in volumes.values():
            if "secret" in volume:
                used_secrets.add(volume["secret"]["secretName"])
            if "configMap" in volume:
                used_maps.add(volume["configMap"]["name"])
            if "persistentVolumeClaim" in volume:
                used_claims.add(volume["persistentVolumeClaim"]["claimName"])
    for kind, used, there in (
        ("secret", used_secrets, secrets),
        ("config map", used_maps, maps),
        ("claim", used_claims, claims),
    ):
        for name in sorted(used - set(there)):
            yield f"{kind} {name} is used but " + (
                "not made by the README's commands" if kind == "secret" else "not here"
            )
        for name in sorted(set(there) - used):
            yield f"{kind} {name} is there but not used"


def check_paths(m, _):
    """Every path in an argument or a variable is on a mounted volume, or in the image."""
    for name, pod, container in m.containers():
        for flag, path in paths_of(container):
            mount = mount_of(container, path)
            if mount is None:
                if flag in WRITTEN or not path.startswith("/opt/baton/"):
                    yield f"{name}: {flag} {path}: no volume is mounted there"
                continue
            volume = next((v for v in pod["volumes"] if v["name"] == mount["name"]), {})
            keys = keys_of(m, volume)
            rest = path[len(mount["mountPath"]) :].lstrip("/")
            if keys is not None and rest not in keys:
                yield f"{name}: {flag} {path}: its volume has {', '.join(sorted(keys))}"
            if flag in WRITTEN and (mount.get("readOnly") or keys is not None):
                yield f"{name}: {flag} {path}: cannot be written"


def check_commands(m, programs):
    for name, _, container in m.containers():
        program = program_of(container)
        arguments = container.get("args", [])
        if program is None or not arguments:
            yield f"{name}: names none of Baton's programs"
            continue
        if container["command"][0] == "/bin/sh" and '"$@"' not in container["command"][2]:
            yield f"{name}: its shell does not pass arguments on"
        known = programs.help(program, arguments[0])
        if known is None:
            yield f"{name}: {program} has no {arguments[0]}"
            continue
        flags = set(re.findall(r"^\s+(?:-\w, )?(--[a-z-]+)", known, re.M))
        for argument in arguments[1:]:
            flag, equals, _ = argument.partition("=")
            if flag not in flags:
                yield f"{name}: {program} {arguments[0]} has no {flag}"
            elif not equals and re.search(rf"{flag} <", known):
                yield f"{name}: {flag} needs a value: {flag}=..."
        for variable in container.get("env", []):
            used = f"$({variable['name']})" in " ".join(arguments)
            if variable["name"].startswith("BATON_"):
                if not re.search(rf"\[env: {variable['name']}[\]=]", known):
                    yield f"{name}: {program} {arguments[0]} does not read {variable['name']}"
            elif not used and not re.search(rf"\b{variable['name']}\b", sources()):
                yield f"{name}: no program reads {variable['name']}"
        for reference in re.findall(r"\$\((\w+)\)", " ".join(arguments)):
            if reference not in {variable["name"] for variable in container.get("env", [])}:
                yield f"{name}: $({reference}) is no variable of it"


def check_ends(m, programs):
    """Checks the handling of exit codes, and the time to save."""
    codes = exit_codes()
    bad_input, ended = codes["BAD_INPUT"], [codes["STOPPED"], codes["LIMIT_REACHED"]]
    drained = ("Ignore", [codes["DRAINED"]])
    # The coordinator may send a single agent away, as bad input.
    of_agents = [("FailJob", ended), ("FailIndex", [bad_input]), drained]
    of_coordinator = [("FailJob", [bad_input, *ended]), drained]
    settings, _ = programs.recipe(m.recipe()) if m.recipe() else (None, None)
    drain = settings["cluster"]["drain_seconds"] if settings else 0
    for name, job in m.of("Job").items():
        spec, pod = job["spec"], job["spec"]["template"]["spec"]
        if pod.get("restartPolicy") != "Never":
            yield f"{name}: restartPolicy must be Never, or exit codes have no effect"
        rules = spec.get("podFailurePolicy", {}).get("rules", [])
        expected = of_agents if "backoffLimitPerIndex" in spec else of_coordinator
        on_codes = [(rule["action"], rule["onExitCodes"].get("values")) for rule in rules if "onExitCodes" in rule]
        if on_codes != expected:
            yield f"{name}: podFailurePolicy must be {expected}, as in crates/job/src/exit.rs, but is {on_codes}"
        for rule in rules:
            if "onExitCodes" in rule:
                if rule["onExitCodes"].get("containerName") not in {c["name"] for c in pod["containers"]}:
                    yield f"{name}: podFailurePolicy names no container of it"
                if rule["onExitCodes"]["operator"] != "In":
                    yield f"{name}: podFailurePolicy: operator must be In"
        last = rules[-1] if rules else {}
        if last.get("action") != "Ignore" or last.get("onPodConditions") != [
            {"type": "DisruptionTarget", "status": "True"}
        ]:
            yield f"{name}: podFailurePolicy must end with: ignore DisruptionTarget"
        if spec.get("podReplacementPolicy") != "Failed":
            yield f"{name}: podReplacementPolicy must be Failed: two pods of one index would conflict"
        grace = pod.get("terminationGracePeriodSeconds", 30)
        if grace < max(LEAST_GRACE, drain + AFTER_DRAIN):
            yield f"{name}: terminationGracePeriodSeconds {grace} is too short to save: {max(LEAST_GRACE, drain + AFTER_DRAIN):.0f} at least"
        indexed = spec.get("completionMode") == "Indexed"
        for key in ("successPolicy", "backoffLimitPerIndex"):
            if key in spec and not indexed:
                yield f"{name}: {key} needs completionMode: Indexed"
        if indexed and spec.get("successPolicy") != {"rules": [{"succeededCount": 1}]}:
            yield f"{name}: the first agent that is done must end the Job: successPolicy"
        if spec.get("parallelism", 1) != spec.get("completions", 1):
            yield f"{name}: parallelism and completions differ"


def check_network(m, _):
    services = m.of("Service")
    pods = {name: (labels, pod) for name, labels, pod in m.pods()}
    for name, service in services.items():
        chosen = [pod for labels, pod in pods.values() if service["spec"]["selector"].items() <= labels.items()]
        if len(chosen) != 1:
            yield f"service {name} chooses {len(chosen)} kinds of pods"
            continue
        ports = {port["name"]: port["containerPort"] for c in chosen[0]["containers"] for port in c.get("ports", [])}
        for port in service["spec"]["ports"]:
            if port.get("targetPort") not in ports:
                yield f"service {name}: its pod has no port {port.get('targetPort')}"

    port, secure = None, None
    for name, _, container in m.containers():
        flags = dict(a.partition("=")[::2] for a in container.get("args", []))
        if "--listen" in flags:
            port, secure = int(flags["--listen"].rpartition(":")[2]), "--tls-cert" in flags
            if not secure or "--tokens" not in flags or "--insecure" in flags:
                yield f"{name}: serves without TLS or tokens"
            if port not in {p["containerPort"] for p in container.get("ports", [])}:
                yield f"{name}: listens on {port}, which is none of its ports"
            yield from check_probes(name, container, secure)
    for name, _, container in m.containers():
        for variable in container.get("env", []):
            if variable["name"] != "BATON_COORDINATOR":
                continue
            found = re.fullmatch(r"(https?)://([a-z0-9.-]+):(\d+)", variable["value"])
            if not found:
                yield f"{name}: {variable['value']} is no address of a coordinator"
                continue
            scheme, host, number = found.groups()
            service = services.get(host, {"spec": {"ports": []}})
            if int(number) not in {p["port"] for p in service["spec"]["ports"]}:
                yield f"{name}: {variable['value']}: no service has that name and port"
            if (scheme == "https") != secure:
                yield f"{name}: {variable['value']}: the scheme does not match the coordinator's TLS"
            if not re.search(rf"baton cert .*--host {re.escape(host)}\b", m.readme):
                yield f"{name}: the README's certificate is not for {host}"

    policies = m.of("NetworkPolicy")
    nothing = [p for p in policies.values() if p["spec"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}]
    if not nothing:
        yield "no network policy forbids what none allows"
    for name, policy in policies.items():
        spec = policy["spec"]
        for way in ("ingress", "egress"):
            if way in spec and way.capitalize() not in spec["policyTypes"]:
                yield f"network policy {name}: {way} without its policyType has no effect as a rule"
            for rule in spec.get(way, []):
                peers = rule.get("from" if way == "ingress" else "to")
                if not peers:
                    yield f"network policy {name}: {way} is open to all peers"
                for peer in peers or []:
                    if set(peer) == {"podSelector"}:
                        yield from check_selector(name, peer["podSelector"], pods)
        if spec["podSelector"]:
            yield from check_selector(name, spec["podSelector"], pods)
    if port is not None:
        for one, other, number in ((AGENTS, COORDINATOR, port), (AGENTS, AGENTS, 40000)):
            sender, receiver = pods[one][0], pods[other][0]
            if not (
                allows(policies, "egress", sender, receiver, number)
                and allows(policies, "ingress", receiver, sender, number)
            ):
                yield f"network policies: no connection is allowed from {one} to {other}, port {number}"
        for one, other in ((COORDINATOR, AGENTS), (AGENTS, COORDINATOR)):
            if allows(policies, "ingress", pods[other][0], pods[one][0], 22):
                yield f"network policies: {other} is open to {one} on other ports than its own"


def check_probes(name, container, secure):
    ports = {port["name"] for port in container.get("ports", [])}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        if probe not in container:
            yield f"{name}: no {probe}"
            continue
        if "grpc" in container[probe] and secure:
            yield f"{name}: {probe}: a gRPC probe does not support TLS"
        get = container[probe].get("httpGet")
        if get:
            if (get.get("scheme") == "HTTPS") != secure:
                yield f"{name}: {probe}: scheme must be " + ("HTTPS" if secure else "HTTP")
            if get["port"] not in ports:
                yield f"{name}: {probe}: there is no port {get['port']}"


def check_exec_probes(m, _):
    for name, _, container in m.containers():
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            command = container.get(probe, {}).get("exec", {}).get("command")
            if command and command[0] not in {"baton", "baton-health"}:
                yield f"{name}: {probe}: the image has no {command[0]}"


def check_recipe(m, programs):
    if m.recipe() is None:
        yield "there is no recipe: config map baton-recipe, job.toml"
        return
    settings, problem = programs.recipe(m.recipe())
    if problem:
        yield f"recipe: {problem}"
        return
    store = settings["checkpoint"]["dir"]
    for name, pod, container in m.containers():
        if store.startswith("s3://"):
            continue
        mount = mount_of(container, store) if store.startswith("/") else None
        volume = next((v for v in pod["volumes"] if mount and v["name"] == mount["name"]), {})
        if "persistentVolumeClaim" not in volume:
            yield f"{name}: checkpoint.dir {store!r} must be a bucket, or on a claim that all mount"
    agents = m.of("Job")[AGENTS]["spec"]
    # The cache of shards from a bucket is on the machine's local disk.
    asked = (
        agents["template"]["spec"]["containers"][0]
        .get("resources", {})
        .get("requests", {})
        .get("ephemeral-storage", "0Gi")
    )
    gib = re.fullmatch(r"(\d+)Gi", asked)
    if "s3://" in settings["data"]["train"] and (gib is None or int(gib[1]) <= settings["data"]["cache_gib"]):
        yield f"recipe: data.cache_gib is {settings['data']['cache_gib']}, and agents request {asked} of ephemeral-storage"
    gpus = int(
        agents["template"]["spec"]["containers"][0].get("resources", {}).get("limits", {}).get("nvidia.com/gpu", 0)
    )
    ranks = agents["completions"] * max(gpus, 1)
    cluster = settings["cluster"]
    if not cluster["min_ranks"] <= ranks <= cluster["max_ranks"]:
        yield f"recipe: {ranks} ranks start, and cluster requires {cluster['min_ranks']} to {cluster['max_ranks']}"
    if (cluster["device"] == "cuda") != (gpus > 0):
        yield f"recipe: cluster.device is {cluster['device']}, and an agent has {gpus} GPUs"
    for name, _, container in m.containers():
        tag = container["image"].rpartition(":")[2]
        if tag not in image_targets():
            yield f"{name}: image {container['image']}: the Dockerfile's targets are {', '.join(sorted(image_targets()))}"
        elif (tag == "cuda") != (gpus > 0):
            yield f"{name}: image {container['image']} for agents with {gpus} GPUs"


def check_readme(m, programs):
    """Each command of the README exists, with its flags."""
    options = kubectl("options") + " -n --namespace -k --kustomize -f "
    for words in commands(m.readme):
        if words[0] == "kubectl":
            verbs, flags = [], []
            rest = words[1:]
            if rest[0] in ("-n", "--namespace"):
                if rest[1] != NAMESPACE:
                    yield f"README: {shlex.join(words)}: the namespace is {NAMESPACE}"
                rest = rest[2:]
            verbs = rest[:3] if rest[:2] == ["create", "secret"] else rest[:1]
            flags = [word.partition("=")[0] for word in rest if word.startswith("-")]
            known = kubectl_help(*verbs)
        elif words[0] in ("baton", "baton-worker", "baton-coordinator"):
            verbs = [word for word in words[1:3] if not word.startswith("-")][
                : 2 if words[1] in ("recipe", "checkpoint") else 1
            ]
            flags = [word.partition("=")[0] for word in words if word.startswith("-")]
            known, options = programs.help(words[0], *verbs), options
        else:
            continue
        if known is None:
            yield f"README: {shlex.join(words)}: there is no such command"
            continue
        for flag in flags:
            if not re.search(rf"(^|[\s,\[]){re.escape(flag)}(?![\w-])", known + options):
                yield f"README: {shlex.join(words)}: it has no {flag}"
        for word in words:
            if word.startswith("deploy/") and not (ROOT / word).exists():
                yield f"README: there is no {word}"
            kind, slash, name = word.partition("/")
            known_kinds = {"job": "Job", "service": "Service", "pvc": "PersistentVolumeClaim"}
            if slash and kind in known_kinds and name not in m.of(known_kinds[kind]) and m.name == "cpu":
                yield f"README: {shlex.join(words)}: there is no {word}"


CHECKS = (
    check_kinds,
    check_rights,
    check_references,
    check_paths,
    check_commands,
    check_ends,
    check_network,
    check_exec_probes,
    check_recipe,
    check_readme,
)


def complaints(manifests, programs):
    """Errors of all checks. The schemas are checked first, as the other checks rely on them."""
    found = list(check_schemas(manifests, programs)) or [
        line for check in CHECKS for line in check(manifests, programs)
    ]
    return [f"{manifests.name}: {line}" for line in found]


# --- helpers of the checks ---


def title(document):
    return f"{document['kind']} {document['metadata']['name']}"


def program_of(container):
    words = " ".join(container.get("command", [])).split()
    return next((word for word in words if word in ("baton-coordinator", "baton-worker")), None)


def paths_of(container):
    for argument in container.get("args", []):
        flag, _, value = argument.partition("=")
        if value.startswith("/"):
            yield flag, value
    for variable in container.get("env", []):
        if variable.get("value", "").startswith("/"):
            yield variable["name"], variable["value"]


def mount_of(container, path):
    inside = [mount for mount in container.get("volumeMounts", []) if Path(path).is_relative_to(mount["mountPath"])]
    return max(inside, key=lambda mount: len(mount["mountPath"]), default=None)


def keys_of(m, volume):
    """The files of a volume, if they are known."""
    if "secret" in volume:
        return m.secrets().get(volume["secret"]["secretName"], set())
    if "configMap" in volume:
        return set(m.of("ConfigMap").get(volume["configMap"]["name"], {}).get("data", {}))
    return None


def check_selector(policy, selector, pods):
    expected = selector.get("matchLabels", {}).items()
    if not any(expected <= labels.items() for labels, _ in pods.values()):
        yield f"network policy {policy}: no pod has {dict(expected)}"


def allows(policies, way, labels, others, port):
    """Whether some policy allows pods with these labels to send to (or receive from) pods with the other labels."""
    for policy in policies.values():
        spec = policy["spec"]
        if not spec["podSelector"].get("matchLabels", {}).items() <= labels.items():
            continue
        for rule in spec.get(way, []):
            if port not in {p["port"] for p in rule.get("ports", [{"port": port}])}:
                continue
            for peer in rule.get("from" if way == "ingress" else "to", []):
                if (
                    set(peer) == {"podSelector"}
                    and peer["podSelector"].get("matchLabels", {}).items() <= others.items()
                ):
                    return True
    return False
