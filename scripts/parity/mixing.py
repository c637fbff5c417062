"""MixUp and CutMix: the images that the network sees, and their loss with label smoothing, for the
shares and windows that Baton chose.

References: torchvision.transforms.v2 with those numbers, and the cross entropy with mixed targets.
Torch's side is computed in `compare`, as it needs Baton's choices.
"""

import torch
from cases import error, load, normalised, save, write_recipe
from models import LABEL_SMOOTHING, SAMPLES
from networks import CLASSES, FORMATS, NETWORKS, without_special_values
from torch.nn import functional
from torchvision.transforms import v2

TOLERANCE = 1e-6
BATCHES, SIDE = 4, 64
NETWORK = NETWORKS["resnet18"]
KINDS = {"mixup": {"mixup_alpha": 1.0}, "cutmix": {"cutmix_probability": 1.0}}


class MixUp(v2.MixUp):
    def __init__(self, found):
        super().__init__(num_classes=CLASSES)
        self.found = found

    def make_params(self, _):
        return {"lam": self.found["lambda"].item()}


class CutMix(v2.CutMix):
    def __init__(self, found):
        super().__init__(num_classes=CLASSES)
        self.found = found

    def make_params(self, _):
        x1, x2, y1, y2 = self.found["window"].tolist()
        # The share comes from the window, not from Baton.
        kept = 1 - (x2 - x1) * (y2 - y1) / (SIDE * SIDE)
        return {"box": (x1, y1, x2, y2), "lam_adjusted": kept}


MIXERS = {"mixup": MixUp, "cutmix": CutMix}


def reference(folder):
    case = folder / NETWORK.arch
    save(without_special_values(NETWORK.build("nchw")), case / "weights.safetensors")
    batches = {
        "inputs": torch.randint(0, 256, (BATCHES, SAMPLES, SIDE, SIDE, 3), dtype=torch.uint8),
        "labels": torch.randint(0, CLASSES, (BATCHES, SAMPLES)),
    }
    save(batches, case / "batches.safetensors")
    for kind, augment in KINDS.items():
        for label in FORMATS:
            write_recipe(
                case / f"{kind}-{label}.toml",
                model=NETWORK.recipe(label),
                augment=augment,
                loss={"label_smoothing": LABEL_SMOOTHING},
            )


def compare(folder, table):
    case = folder / NETWORK.arch
    batches, weights = load(case / "batches.safetensors"), load(case / "weights.safetensors")
    for kind in KINDS:
        for label in FORMATS:
            model = NETWORK.build(label)
            model.load_state_dict(weights)
            results = load(case / f"baton-{kind}-{label}.safetensors")
            for number, (pixels, labels) in enumerate(zip(batches["inputs"], batches["labels"])):
                names = [name for name in results if name.endswith(f"/{number}")]
                found = {name.partition("/")[0]: results[name] for name in names}
                images, targets = MIXERS[kind](found)(normalised(pixels, FORMATS[label]), labels)
                with torch.no_grad():
                    logits = model.train()(images)
                loss = functional.cross_entropy(logits, targets, label_smoothing=LABEL_SMOOTHING)
                where, note = f"{kind} {label} {number}", f"lambda {found['lambda'].item():.3f}"
                table.row(where, "images", error(found["images"], images), TOLERANCE, note)
                table.row(where, "loss", error(found["loss"], loss), TOLERANCE)
