"""Torch's side of the parity check; run.sh calls it before and after Baton's side.

`reference DIR` makes one folder per case with what both sides start from (`weights`, `batch`), what
is right (`expected`, computed by torch in float64) and how close torch itself gets in float32
(`torch32`). Baton adds `nhwc` and `nchw`, one per memory format (crates/trainer/examples/parity.rs).
`compare DIR` prints a table and fails if Baton is off.

The error of a tensor is |found - expected| / |expected| with Euclidean norms in float64.
"""

import argparse
import pathlib
import sys

import torch
import torchvision
from safetensors.torch import load_file, save_file

TOLERANCE = 1e-4
CLASSES = 1000
LABEL_SMOOTHING = 0.1
# ImageNet's statistics in 0..255 units, as a recipe has them by default.
MEAN = torch.tensor([123.675, 116.28, 103.53])
STD = torch.tensor([58.395, 57.12, 57.375])
# Large steps and decay, so that an error in either shows in the updated weights.
LR, WEIGHT_DECAY, MOMENTUM = 0.1, 0.1, 0.9
ADAM_LR, ADAM_EPS = 0.01, 1e-8
# name: (samples, side in pixels). Large enough that the last BatchNorm layers average over dozens
# of values: with a handful, rounding errors grow beyond any tolerance in torch as well.
CASES = {
    "resnet18": (16, 96),
    "resnet34": (16, 96),
    "resnet50": (16, 96),
    "resnet101": (16, 64),
    "resnet152": (16, 64),
}


def new_model(name):
    """A network in which no value is special: neither scales of 1 nor shifts of 0."""
    model = torchvision.models.get_model(name, weights=None, num_classes=CLASSES)
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.uniform_(module.weight, 0.5, 1.5)
            torch.nn.init.normal_(module.bias, 0, 0.1)
            torch.nn.init.normal_(module.running_mean, 0, 0.1)
            torch.nn.init.uniform_(module.running_var, 0.5, 1.5)
    return model


def optimizer(kind, model):
    """The two decay groups of a recipe with `decay_norm_and_bias = false`."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    if kind == "adamw":
        return torch.optim.AdamW(groups, lr=ADAM_LR, eps=ADAM_EPS)
    return torch.optim.SGD(groups, lr=LR, momentum=MOMENTUM, nesterov=kind == "nesterov")


def results(name, weights, batch, dtype):
    """Everything that Baton computes too, by the same names."""
    model = torchvision.models.get_model(name, weights=None, num_classes=CLASSES)
    model.load_state_dict(weights)
    model.to(dtype)
    images = ((batch["images"].to(dtype) - MEAN.to(dtype)) / STD.to(dtype)).permute(0, 3, 1, 2)
    out = {}

    model.eval()
    with torch.no_grad():
        out["logits.evaluation"] = model(images)
    model.train()
    logits = model(images)
    loss = torch.nn.functional.cross_entropy(
        logits, batch["labels"], label_smoothing=LABEL_SMOOTHING
    )
    loss.backward()
    out["logits.training"], out["loss"] = logits.detach(), loss.detach()
    for key, parameter in model.named_parameters():
        out[f"gradient/{key}"] = parameter.grad.clone()
    for key, buffer in model.named_buffers():
        if buffer.is_floating_point():
            out[f"running/{key}"] = buffer.clone()

    before = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
    for kind in ["sgd", "nesterov", "adamw"]:
        rule = optimizer(kind, model)
        # Twice with the same gradient: the second update shows the moments.
        rule.step()
        rule.step()
        for key, parameter in model.named_parameters():
            out[f"{kind}/{key}"] = parameter.detach().clone()
            parameter.data.copy_(before[key])
    return {key: value.contiguous() for key, value in out.items()}


def reference(folder):
    torch.manual_seed(0)
    for name, (samples, side) in CASES.items():
        print(f"parity: {name}, torch in float64 and float32", file=sys.stderr)
        case = folder / name
        case.mkdir(parents=True)
        weights = new_model(name).state_dict()
        batch = {
            "images": torch.randint(0, 256, (samples, side, side, 3), dtype=torch.uint8),
            "labels": torch.randint(0, CLASSES, (samples,)),
        }
        save_file(weights, case / "weights.safetensors")
        save_file(batch, case / "batch.safetensors")
        expected = results(name, weights, batch, torch.float64)
        save_file(expected, case / "expected.safetensors")
        save_file(results(name, weights, batch, torch.float32), case / "torch32.safetensors")


def errors(found, expected):
    """The error of each tensor, grouped by what was computed: {kind: {tensor: error}}."""
    if found.keys() != expected.keys():
        sys.exit(f"parity: not the same tensors: {sorted(found.keys() ^ expected.keys())}")
    kinds = {}
    for key, right in expected.items():
        if found[key].shape != right.shape:
            sys.exit(f"parity: {key} is {tuple(found[key].shape)}, not {tuple(right.shape)}")
        difference = found[key].double() - right
        kind = key.partition("/")[0]
        kinds.setdefault(kind, {})[key] = (difference.norm() / right.norm()).item()
    return kinds


def compare(folder):
    print(f"worst error per kind of result; tolerance {TOLERANCE:g}; torch32 is torch in float32\n")
    print(f"{'network':10} {'result':18} {'torch32':>8} {'nhwc':>8} {'nchw':>8}  worst tensor")
    passed = True
    for name in CASES:
        case = folder / name
        expected = load_file(case / "expected.safetensors")
        torch32, nhwc, nchw = (
            errors(load_file(case / f"{side}.safetensors"), expected)
            for side in ["torch32", "nhwc", "nchw"]
        )
        for kind in torch32:
            # `not <=` so that NaN fails.
            passed &= not any(
                not error <= TOLERANCE for side in [nhwc, nchw] for error in side[kind].values()
            )
            worst = [max(side[kind].values()) for side in [torch32, nhwc, nchw]]
            tensor = max(nhwc[kind], key=nhwc[kind].get)
            numbers = " ".join(f"{error:8.1e}" for error in worst)
            print(f"{name:10} {kind:18} {numbers}  {tensor.partition('/')[2]}")
    print("\npassed" if passed else "\nFAILED")
    return passed


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("command", choices=["reference", "compare"])
    parser.add_argument("folder", type=pathlib.Path)
    arguments = parser.parse_args()
    if arguments.command == "reference":
        reference(arguments.folder)
    elif not compare(arguments.folder):
        sys.exit(1)


if __name__ == "__main__":
    main()
