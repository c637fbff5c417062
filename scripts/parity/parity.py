"""Torch's side of the parity check; run.sh calls it before and after Baton's side.

`reference DIR [PART…]` makes a folder per part with recipes, what both sides start from, and torch's
results; Baton adds its own (crates/trainer/examples/parity). `compare DIR` prints a table and fails if
Baton is off. Each part is a module that says what it compares and how closely.

The error of a tensor is |baton - torch| / |torch| with Euclidean norms in float64.

Both sides compute in float32 on the same number of threads and in the same format, so that they
round alike. They must: a ReLU whose input is nearly 0 passes or stops a gradient by the last bit, so
that torch's own float32 gradients differ from its float64 ones by 1 to 10 % (measured: ResNet-18
0.8 %, ResNet-50 4 %, ResNet-152 12 % in the worst tensor).
"""

import argparse
import pathlib
import sys

import torch

import curves
import export
import mixing
import models
import schedules
import updates
from cases import Table

PARTS = {
    "models": models,
    "updates": updates,
    "curves": curves,
    "schedules": schedules,
    "mixing": mixing,
    "export": export,
}
THREADS = 1


def reference(folder, parts):
    for name in parts:
        print(f"parity: {name}, torch", file=sys.stderr)
        torch.manual_seed(0)
        PARTS[name].reference(folder / name)


def compare(folder):
    table = Table()
    for name, part in PARTS.items():
        if (folder / name).is_dir():
            table.part = name
            part.compare(folder / name, table)
    return table.end()


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("command", choices=["reference", "compare"])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all if none is named")
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    torch.set_num_threads(THREADS)
    if arguments.command == "reference":
        reference(arguments.folder, arguments.parts or PARTS)
    elif not compare(arguments.folder):
        sys.exit(1)


if __name__ == "__main__":
    main()
