#!/usr/bin/env python3
"""Checks deploy/kubernetes/ without a cluster.

  scripts/deploy/kubernetes.py [FOLDER]        where the three programs are (default: target/debug)
  scripts/deploy/kubernetes.py --self-test     breaks the manifests in many ways and requires an error for each

Run it with the Python that has scripts/deploy/requirements.txt and scripts/deploy/kubectl.txt. kubectl
renders the folders, which needs no cluster. Then every document is checked against the schemas of the oldest and the
newest Kubernetes, and against rules beyond schemas: references, the programs' flags, exit codes and recipes,
permissions, the README's commands. Finally, the programs are run with the commands of cpu/.
"""

import sys
from pathlib import Path

sys.dont_write_bytecode = True  # no bytecode files among the sources

from kube.breakages import self_test
from kube.checks import CHECKS, VERSIONS, complaints
from kube.manifests import ROOT, Programs, load
from kube.node import run_manifests


def main():
    arguments = [argument for argument in sys.argv[1:] if argument != "--self-test"]
    if {"-h", "--help"} & set(arguments) or len(arguments) > 1:
        print(__doc__)
        return 2 if len(arguments) > 1 else 0
    folder = Path(arguments[0] if arguments else ROOT / "target/debug").resolve()
    if not (folder / "baton-coordinator").exists():
        print(f"kubernetes: no programs in {folder}: run make build, or give the folder that has them", file=sys.stderr)
        return 2
    programs = Programs(folder)
    if "--self-test" in sys.argv:
        found = self_test(programs)
    else:
        every = load()
        found = [line for manifests in every for line in complaints(manifests, programs)]
        documents = sum(len(manifests.documents) for manifests in every)
        print(
            f"kubernetes: {documents} documents against Kubernetes {' and '.join(VERSIONS)} and {len(CHECKS)} checks of our own"
        )
        if not found:
            found = list(run_manifests(every[0], programs))
            print(
                "kubernetes: cpu/ was run: probes, a coordinator that moves, an agent that is taken away, a checkpoint"
            )
    for line in found:
        print(f"kubernetes: {line}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
