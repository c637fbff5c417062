"""Torch's side of the parity check; run.sh calls it before and after Baton's side.

`reference DIR` makes one folder per network with what both sides start from (`weights`, `batch`) and
torch's results in either memory format (`torch-nhwc`, `torch-nchw`). Baton adds `baton-nhwc` and
`baton-nchw` (crates/trainer/examples/parity.rs). `compare DIR` prints a table and fails if Baton is
off.

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
import torchvision
from safetensors.torch import load_file, save_file

TOLERANCE = 1e-5
CLASSES = 1000
LABEL_SMOOTHING = 0.1
# ImageNet's statistics in 0..255 units, as a recipe has them by default.
MEAN = torch.tensor([123.675, 116.28, 103.53])
STD = torch.tensor([58.395, 57.12, 57.375])
# Large steps and decay, so that an error in either shows in the updated weights.
LR, WEIGHT_DECAY, MOMENTUM = 0.1, 0.1, 0.9
ADAM_LR = 0.01
THREADS = 1
SAMPLES = 8
# Side of the images in pixels.
NETWORKS = {"resnet18": 96, "resnet34": 96, "resnet50": 96, "resnet101": 64, "resnet152": 64}
FORMATS = {"nhwc": torch.channels_last, "nchw": torch.contiguous_format}


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
        return torch.optim.AdamW(groups, lr=ADAM_LR)
    return torch.optim.SGD(groups, lr=LR, momentum=MOMENTUM, nesterov=kind == "nesterov")


def results(name, weights, batch, memory_format):
    """Everything that Baton computes too, by the same names."""
    model = torchvision.models.get_model(name, weights=None, num_classes=CLASSES)
    model.load_state_dict(weights)
    model.to(memory_format=memory_format)
    images = ((batch["images"].float() - MEAN) / STD).permute(0, 3, 1, 2)
    images = images.contiguous(memory_format=memory_format)
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
    torch.set_num_threads(THREADS)
    for name, side in NETWORKS.items():
        print(f"parity: {name}, torch", file=sys.stderr)
        case = folder / name
        case.mkdir(parents=True)
        weights = new_model(name).state_dict()
        batch = {
            "images": torch.randint(0, 256, (SAMPLES, side, side, 3), dtype=torch.uint8),
            "labels": torch.randint(0, CLASSES, (SAMPLES,)),
        }
        save_file(weights, case / "weights.safetensors")
        save_file(batch, case / "batch.safetensors")
        for label, memory_format in FORMATS.items():
            tensors = results(name, weights, batch, memory_format)
            save_file(tensors, case / f"torch-{label}.safetensors")


def errors(found, expected):
    """The error of each tensor, grouped by what was computed: {kind: {tensor: error}}."""
    if found.keys() != expected.keys():
        sys.exit(f"parity: not the same tensors: {sorted(found.keys() ^ expected.keys())}")
    kinds = {}
    for key, right in expected.items():
        if found[key].shape != right.shape:
            sys.exit(f"parity: {key} is {tuple(found[key].shape)}, not {tuple(right.shape)}")
        right = right.double()
        difference = found[key].double() - right
        kind, _, tensor = key.partition("/")
        kinds.setdefault(kind, {})[tensor] = (difference.norm() / right.norm()).item()
    return kinds


def compare(folder):
    print(f"worst error per kind of result; tolerance {TOLERANCE:g}\n")
    print(f"{'network':10} {'format':7} {'result':18} {'tensors':>7} {'error':>8}  worst tensor")
    passed = True
    for name in NETWORKS:
        for label in FORMATS:
            found, expected = (
                load_file(folder / name / f"{side}-{label}.safetensors")
                for side in ["baton", "torch"]
            )
            for kind, tensors in errors(found, expected).items():
                worst = max(tensors, key=tensors.get)
                # `not <=` so that NaN fails, of which `max` need not take notice.
                good = not any(not error <= TOLERANCE for error in tensors.values())
                passed &= good
                numbers = f"{len(tensors):7} {tensors[worst]:8.1e}"
                print(f"{name:10} {label:7} {kind:18} {numbers}  {worst}{'' if good else ' FAILED'}")
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
