"""Training curves of ResNet-18: the loss before every update, the averaged weights and running
statistics at the end, and the loss scale of fp16 after every update. All with label smoothing, clipping and a moving
average, on a few repeated batches of random images.

References: torch.optim, torch.autocast with fp32 weights, torch.amp.GradScaler.
"""

import contextlib
import dataclasses

import torch
from cases import load, normalised, save, write_recipe
from networks import CLASSES, FORMATS, Network
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

DECAY, CLIP, LABEL_SMOOTHING = 0.99, 1.0, 0.1
SGD = {"kind": "sgd", "momentum": 0.9, "weight_decay": 5e-5}
ADAMW = {"kind": "adamw", "weight_decay": 0.01}
# Chosen so that the first updates overflow, and the scale also grows.
LOSS_SCALE = {"initial": 2.0**17, "growth": 2.0, "backoff": 0.5, "growth_interval": 4}
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Tolerances of losses, relative; and of averaged weights and statistics, as a share of their total change. The two
# sides round optimizer updates differently and then diverge, as torch's own two formats do (`compared with` in the
# table). Half-precision formats: about twice the distance of torch's bf16 from its fp32.
TOLERANCES = {
    "fp32": (1e-3, {"weights": 1e-1, "statistics": 1e-3}),
    "bf16": (5e-3, {"weights": 5e-1, "statistics": 5e-3}),
    "fp16": (5e-3, {"weights": 5e-1, "statistics": 5e-3}),
}


@dataclasses.dataclass
class Data:
    """Random images, and how often they are repeated."""

    batches: int
    samples: int
    side: int
    epochs: int


@dataclasses.dataclass
class Curve:
    data: str
    rule: dict
    lr: float
    compute: str
    # Formats, each with another training of torch on the same data, whose distance is shown.
    formats: dict


DATA = {
    "64 px": Data(batches=10, samples=16, side=64, epochs=5),
    # torch's fp16 gradients take seconds on a CPU.
    "32 px": Data(batches=4, samples=8, side=32, epochs=4),
}
# Rates are low enough for two trainings with different rounding to stay close: at twenty times the rate torch's own two
# formats differ by 1 % after 50 updates.
CURVES = {
    "sgd": Curve("64 px", SGD, 1e-3, "fp32", {"nhwc": "sgd-nchw", "nchw": "sgd-nhwc"}),
    "adamw": Curve("64 px", ADAMW, 1e-5, "fp32", {"nhwc": "adamw-nchw", "nchw": "adamw-nhwc"}),
    "bf16": Curve("64 px", SGD, 1e-3, "bf16", {"nhwc": "sgd-nhwc"}),
    # fp32 skips no update, so its curve is not comparable.
    "fp16": Curve("32 px", ADAMW, 1e-5, "fp16", {"nhwc": None}),
}


def optimizer(curve, model):
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": curve.rule["weight_decay"]},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    if curve.rule["kind"] == "adamw":
        return torch.optim.AdamW(groups, lr=curve.lr)
    return torch.optim.SGD(groups, lr=curve.lr, momentum=curve.rule["momentum"])


def autocast(compute):
    if compute == "fp32":
        return contextlib.nullcontext()
    return torch.autocast("cpu", dtype=HALVES[compute])


def train(curve, label, weights, batches):
    """A usual PyTorch training; results have Baton's names."""
    model = Network("resnet18", 0).build(label)
    model.load_state_dict(weights)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY), use_buffers=True)
    update = optimizer(curve, model)
    scaler = torch.amp.GradScaler(
        "cpu",
        LOSS_SCALE["initial"],
        LOSS_SCALE["growth"],
        LOSS_SCALE["backoff"],
        LOSS_SCALE["growth_interval"],
        enabled=curve.compute == "fp16",
    )
    losses, scales = [], []
    for pixels, labels in DATA[curve.data].epochs * list(zip(batches["inputs"], batches["labels"])):
        with autocast(curve.compute):
            logits = model(normalised(pixels, FORMATS[label]))
        loss = functional.cross_entropy(logits.float(), labels, label_smoothing=LABEL_SMOOTHING)
        update.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(update)
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        scaler.step(update)
        scaler.update()
        average.update_parameters(model)
        losses.append(loss.item())
        scales.append(scaler.get_scale())
    out = {"loss": torch.tensor(losses, dtype=torch.float64)}
    if scaler.is_enabled():
        out["scale"] = torch.tensor(scales, dtype=torch.float64)
    for key, value in average.module.state_dict().items():
        if value.is_floating_point():
            out[f"average/{key}"] = value
    return out


def reference(folder):
    # torchvision's initial values, with which the network can be trained.
    weights = Network("resnet18", 0).build("nchw").state_dict()
    for name, data in DATA.items():
        case, shape = folder / name, (data.batches, data.samples)
        save(weights, case / "weights.safetensors")
        batches = {
            "inputs": torch.randint(0, 256, (*shape, data.side, data.side, 3), dtype=torch.uint8),
            "labels": torch.randint(0, CLASSES, shape),
        }
        save(batches, case / "batches.safetensors")
        for kind, curve in CURVES.items():
            if curve.data == name:
                for label in curve.formats:
                    reference_curve(curve, case, f"{kind}-{label}", label, weights, batches)


def reference_curve(curve, case, name, label, weights, batches):
    data = DATA[curve.data]
    precision = {"compute": curve.compute}
    if curve.compute == "fp16":
        precision["loss_scale"] = LOSS_SCALE
    write_recipe(
        case / f"{name}.toml",
        model=Network("resnet18", 0).recipe(label),
        train={"epochs": data.epochs, "clip_grad_norm": CLIP},
        optimizer=curve.rule,
        schedule={"kind": "constant", "lr": curve.lr},
        loss={"label_smoothing": LABEL_SMOOTHING},
        precision=precision,
        ema={"decay": DECAY},
    )
    save(train(curve, label, weights, batches), case / f"torch-{name}.safetensors")


def largest(found, expected):
    """The largest relative difference of the losses."""
    return ((found["loss"] - expected["loss"]).abs() / expected["loss"]).max().item()


def distance_of_averages(found, expected, start, part):
    """Distance of the averages from each other, as a share of their total change."""
    averages = [key for key in expected if key.startswith("average/")]
    keys = [key for key in averages if ("running_" in key) == (part == "statistics")]
    flat = [torch.cat([side[key].flatten() for key in keys]).double() for side in (found, expected)]
    begin = torch.cat([start[key.removeprefix("average/")].flatten() for key in keys]).double()
    return ((flat[0] - flat[1]).norm() / (flat[1] - begin).norm()).item()


def compare(folder, table):
    for name, curve in CURVES.items():
        for label in curve.formats:
            compare_curve(folder / curve.data, name, label, table)


def compare_curve(case, name, label, table):
    curve, start = CURVES[name], load(case / "weights.safetensors")
    found, expected = (load(case / f"{side}-{name}-{label}.safetensors") for side in ["baton", "torch"])
    reference = curve.formats[label]
    other = load(case / f"torch-{reference}.safetensors") if reference else None
    where, losses = f"{name} {label}", expected["loss"]
    loss_tolerance, tolerances = TOLERANCES[curve.compute]

    def note(distance, *arguments):
        return f"compared with {reference}: {distance(other, expected, *arguments):.1e}" if reference else ""

    fall = f"{losses[0]:.2f} to {losses.min():.2f}  {note(largest)}"
    table.row(where, f"{len(losses)} losses", largest(found, expected), loss_tolerance, fall)
    for part, tolerance in tolerances.items():
        distance = distance_of_averages(found, expected, start, part)
        table.row(where, f"averaged {part}", distance, tolerance, note(distance_of_averages, start, part))
    if "scale" in expected:
        differ = (found["scale"] != expected["scale"]).sum().item()
        changes = (expected["scale"].diff() != 0).sum().item()
        table.row(where, "other loss scales", differ, 0, f"{changes} changes in {len(losses)} updates")
