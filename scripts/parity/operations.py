"""Writes crates/data/tests/fixtures/operations.rgb.gz: an image, and what the operations of torchvision's RandAugment and
TrivialAugment make of it, in the order of `cases` in crates/data/src/augment/operation.rs. Run it again only for another
version of torchvision or other cases:

    .venv-parity/bin/python scripts/parity/operations.py
"""

import gzip
import pathlib

import torch
from torchvision.transforms.autoaugment import RandAugment, TrivialAugmentWide, _apply_op
from torchvision.transforms.functional import InterpolationMode

FILE = pathlib.Path(__file__).resolve().parents[2] / "crates/data/tests/fixtures/operations.rgb.gz"
SIDE, BINS = 20, 31
# Weak, of middle strength, and the strongest. With 4, a shear of 0.04 has positions halfway between two pixels.
CHOSEN = [5, 15, 30]


def image():
    """Smooth, with noise, and a different range in every channel."""
    generator = torch.Generator().manual_seed(0)
    y, x = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    smooth = torch.stack([5 * x + 4 * y, 9 * y + 40, 150 - 5 * x])
    noise = torch.randint(0, 40, (3, SIDE, SIDE), generator=generator)
    return (smooth + noise).clamp(0, 255).to(torch.uint8)


def results(picture):
    spaces = [
        TrivialAugmentWide()._augmentation_space(BINS),
        RandAugment()._augmentation_space(BINS, (SIDE, SIDE)),
    ]
    for space in spaces:
        for name, (magnitudes, signed) in space.items():
            for strength in CHOSEN:
                for sign in [1.0, -1.0] if signed else [1.0]:
                    magnitude = float(magnitudes[strength]) if magnitudes.ndim else 0.0
                    yield _apply_op(picture, name, sign * magnitude, InterpolationMode.NEAREST, None)


picture = image()
pixels = [tensor.permute(1, 2, 0).reshape(-1) for tensor in [picture, *results(picture)]]
FILE.write_bytes(gzip.compress(torch.cat(pixels).numpy().tobytes(), mtime=0))
print(f"{FILE.name}: {len(pixels)} images, {FILE.stat().st_size:,} bytes")
