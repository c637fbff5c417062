"""The folders that both sides read, and the table of results.

Baton's view of a folder is in crates/trainer/examples/parity/case.rs.
"""

import json
import math
import sys

import torch
from safetensors.torch import load_file, save_file

# ImageNet's statistics in 0..255 units, as in a recipe by default.
MEAN = torch.tensor([123.675, 116.28, 103.53])
STD = torch.tensor([58.395, 57.12, 57.375])
NEEDED = {
    "model": {"arch": "resnet18", "num_classes": 1000},
    "data": {"train": "none", "val": "none"},
    "train": {"epochs": 1, "global_batch": 16, "resolution": 64, "virtual_ranks": 1},
    "optimizer": {"kind": "sgd"},
    "schedule": {"kind": "constant", "lr": 0.1},
}


def toml(value):
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {toml(inner)}" for key, inner in value.items()) + " }"
    return json.dumps(value)


def write_recipe(path, **sections):
    """Writes a recipe with these sections. The model and training sections may be incomplete."""
    merged = {**NEEDED, **sections}
    for name in ["model", "train"]:
        merged[name] = {**NEEDED[name], **sections.get(name, {})}
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"{name} = {toml(section)}" for name, section in merged.items()]
    path.write_text("\n".join(['name = "parity"', *lines]))


def save(tensors, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def load(path):
    if not path.exists():
        sys.exit(f"parity: {path} is missing: Baton's side has not run, or has failed")
    return load_file(path)


def normalised(images, memory_format):
    """Converts u8 images (samples, side, side, 3) to the input of a network."""
    images = ((images.float() - MEAN) / STD).permute(0, 3, 1, 2)
    return images.contiguous(memory_format=memory_format)


def error(found, expected):
    difference = (found.double() - expected.double()).norm()
    # 0 where both are 0; infinite where only torch's is.
    return 0.0 if difference == 0 else (difference / expected.double().norm()).item()


def errors(found, expected):
    """The error of each tensor, grouped by what was computed: {kind: {tensor: error}}."""
    if found.keys() != expected.keys():
        sys.exit(f"parity: not the same tensors: {sorted(found.keys() ^ expected.keys())}")
    kinds = {}
    for key, right in expected.items():
        if found[key].shape != right.shape:
            sys.exit(f"parity: {key} is {tuple(found[key].shape)}, not {tuple(right.shape)}")
        kind, _, tensor = key.partition("/")
        kinds.setdefault(kind, {})[tensor] = error(found[key], right)
    return kinds


def worst(tensors):
    """The largest error and its tensor. NaN counts as the largest, which `max` does not guarantee."""
    name = max(tensors, key=lambda name: (math.isnan(tensors[name]), tensors[name]))
    return tensors[name], name


class Table:
    def __init__(self):
        self.part, self.failures, self.rows = "", 0, 0
        print(f"{'part':9} {'case':23} {'result':19} {'found':>8} {'at most':>8}")

    def row(self, case, result, found, most, note=""):
        """Passes if `found` is at most `most`."""
        good = found <= most  # False for NaN
        self.rows += 1
        self.failures += not good
        numbers = " ".join(f"{n:8.1e}" if isinstance(n, float) else f"{n:8}" for n in (found, most))
        mark = "" if good else "FAILED "
        print(f"{self.part:9} {case:23} {result:19} {numbers}  {mark}{note}".rstrip())

    def end(self):
        good = self.rows > 0 and self.failures == 0
        print(f"\npassed: {self.rows}" if good else f"\nFAILED: {self.failures} of {self.rows}")
        return good
