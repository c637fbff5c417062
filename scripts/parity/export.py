"""A model trained by Baton, loaded into torchvision: the raw weights and their moving average, exported
from the last checkpoint of a short training on the digits, and all 360 digits of the validation set.

Torchvision must load the files with `strict`, predict the same class for every digit, and compute the loss and the
accuracy that the job measured. The digits' pixels come from Baton.
"""

import torch
import torchvision
from cases import error, load, normalised, write_recipe
from torch.nn import functional

TOLERANCE = 1e-4
ARCH, CLASSES, DIGITS = "resnet50", 10, 360
LABEL_SMOOTHING = 0.1


def reference(folder):
    data = {
        "train": "assets/digits/digits-train.beton",
        "val": "assets/digits/digits-val.beton",
    }
    write_recipe(
        folder / ARCH / "digits.toml",
        model={"arch": ARCH, "num_classes": CLASSES},
        data=data,
        augment={"crop_scale": [0.8, 1.0], "flip": 0.0},
        train={"epochs": 1, "global_batch": 32, "resolution": 32},
        optimizer={"kind": "adamw", "weight_decay": 0.01},
        schedule={"kind": "constant", "lr": 1e-3},
        loss={"label_smoothing": LABEL_SMOOTHING},
        ema={"decay": 0.9},
        evaluation={"crop_ratio": 1.0, "batch": 60},
    )


def compare(folder, table):
    case = folder / ARCH
    found = load(case / "baton-digits.safetensors")
    labels, images = found["labels"], normalised(found["pixels"], torch.contiguous_format)
    for kind in ["raw", "averaged"]:
        model = torchvision.models.get_model(ARCH, weights=None, num_classes=CLASSES)
        model.load_state_dict(load(case / f"{kind}.safetensors"), strict=True)
        with torch.no_grad():
            logits = model.eval()(images)
        loss = functional.cross_entropy(logits, labels, label_smoothing=LABEL_SMOOTHING)
        right = (logits.argmax(1) == labels).sum().item()
        baton, (baton_loss, baton_top1) = found[f"logits/{kind}"], found[f"accuracy/{kind}"]

        differ = (baton.argmax(1) != logits.argmax(1)).sum().item()
        table.row(kind, f"different predictions of {len(logits)}", differ, 0, f"{right} right")
        table.row(kind, "digits left out", abs(DIGITS - len(baton)), 0)
        table.row(kind, "logits", error(baton, logits), TOLERANCE)
        table.row(kind, "measured loss", error(baton_loss, loss), TOLERANCE)
        table.row(kind, "measured top-1", abs(round(baton_top1.item() * DIGITS) - right), 0)
