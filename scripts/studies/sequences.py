#!/usr/bin/env python3
"""Generates a table of antibody and antigen sequences with a binding score: for docs/studies/sequences.md.

    scripts/studies/sequences.py TABLE.csv [--pairs 8000] [--antigens 400]

Columns: antigen (a name), loop (8 to 20 amino acids), epitope (12 of the antigen), score. The score is higher where charges
of both sequences meet and where the loop has aromatic residues. None of this is biochemistry: it is a task whose answer is
in the sequences.
"""

import argparse
import csv
from pathlib import Path

import numpy as np

ALPHABET = "ACDEFGHIKLMNPQRSTVWY"
CHARGE = {"D": -1, "E": -1, "K": 1, "R": 1, "H": 0.5}


def score(loop: str, epitope: str) -> float:
    """What the network has to learn."""
    meeting = sum(-CHARGE.get(one, 0) * CHARGE.get(other, 0) for one, other in zip(loop, epitope, strict=False))
    return meeting + 0.5 * sum(letter in "FWY" for letter in loop) - 0.05 * len(loop)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("--pairs", type=int, default=8000)
    parser.add_argument("--antigens", type=int, default=400)
    args = parser.parse_args()
    random = np.random.default_rng(0)

    def sequence(length: int) -> str:
        return "".join(random.choice(list(ALPHABET), length))

    antigens = [(f"antigen{number:03}", sequence(12)) for number in range(args.antigens)]
    with args.table.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["antigen", "loop", "epitope", "score"])
        for _ in range(args.pairs):
            name, epitope = antigens[random.integers(len(antigens))]
            loop = sequence(random.integers(8, 21))
            table.writerow([name, loop, epitope, f"{score(loop, epitope) + random.normal(0, 0.2):.3f}"])


if __name__ == "__main__":
    main()
