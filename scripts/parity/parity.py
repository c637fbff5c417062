"""Torch's side of the parity check; run.sh calls it before and after Baton's side.

`reference DIR [PART…]` creates a folder per part with recipes, initial values of both sides, and torch's
results; Baton adds its results (crates/trainer/examples/parity). `compare DIR` prints a table and fails if an error is
above its tolerance. Each part is a module with its comparisons and tolerances.

The error of a tensor is |baton - torch| / |torch| with Euclidean norms in float64.

Both sides compute in float32 on the same number of threads and in the same format, so that
their rounding is the same. This is necessary: for a ReLU input near 0 the last bit decides whether a gradient passes, so
that torch's own float32 gradients differ from its float64 ones by 1 to 10 % (measured: ResNet-18
0.8 %, ResNet-50 4 %, ResNet-152 12 % in the worst tensor).
"""

import argparse
import pathlib
import sys

import costs
import curves
import export
import language
import mixing
import models
import programs
import schedules
import torch
import updates
from cases import Table

PARTS = {
    "models": models,
    "programs": programs,
    "language": language,
    "costs": costs,
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
