"""Evaluates weights of `baton checkpoint export` with PyTorch, on the validation set of the program's recipe.

PYTHONPATH=python python recipes/programs/evaluate.py vit vit.safetensors

It reads files of ffcv's format in which all images are raw, or that hold an array and a number.
"""

import importlib
import sys

import numpy
import torch
from safetensors.torch import load_file

IMAGE = numpy.dtype([("mode", "u1"), ("width", "<u2"), ("height", "<u2"), ("start", "<u8")])  # without padding
DIGITS = ("assets/digits/digits-val.beton", [("input", IMAGE), ("target", "<i8")])
SIGNALS = ("data/signals-val.beton", [("input", [("start", "<u8")]), ("target", "<f8")])


def read(path, row, dtype, shape):
    """The inputs and targets of a file."""
    file = numpy.memmap(path, mode="r")
    header = numpy.dtype("<u2, <u2, <u4, <u8, <u8")
    _, fields, _, samples, _ = file[: header.itemsize].view(header)[0]
    row = numpy.dtype(row, align=True)
    rows = file[24 + 1041 * int(fields) :][: int(samples) * row.itemsize].view(row)
    size = numpy.dtype(dtype).itemsize * numpy.prod(shape)
    inputs = [file[start : start + size].view(dtype).reshape(shape) for start in rows["input"]["start"].astype(int)]
    return torch.tensor(numpy.stack(inputs)).float(), torch.tensor(rows["target"])


def ranks(values):
    """Ranks of values; equal ones share the mean of theirs."""
    _, inverse, counts = numpy.unique(values, return_inverse=True, return_counts=True)
    return (numpy.cumsum(counts) - (counts - 1) / 2)[inverse]


name, weights = sys.argv[1:]
model = importlib.import_module(name).model.eval()
model.load_state_dict(load_file(weights), strict=True)
if name == "dilated":
    inputs, targets = read(*SIGNALS, "<f4", (1, 100))
else:
    inputs, targets = read(*DIGITS, "u1", (32, 32, 3))
    inputs = (inputs.permute(0, 3, 1, 2) - 77.9) / 95.9
with torch.inference_mode():
    outputs = torch.cat([model(batch) for batch in inputs.split(60)])
if name == "dilated":
    found, expected = outputs[:, 0].double().numpy(), targets.numpy()
    spearman = numpy.corrcoef(ranks(found), ranks(expected))[0, 1]
    print(f"Spearman {spearman:.6f}, mean absolute error {abs(found - expected).mean():.6f}")
else:
    right = (outputs.argmax(1) == targets).sum().item()
    print(f"{right} of {len(targets)} are right: top-1 {right / len(targets):.2%}")
