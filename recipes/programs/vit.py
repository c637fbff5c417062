"""Writes vit.pt2, the program of recipes/vit_digits.toml: a small vision transformer (Dosovitskiy et al. 2021).

PYTHONPATH=python python recipes/programs/vit.py [PATH]
"""

import sys

import baton
import torch
from torchvision.models import VisionTransformer

torch.manual_seed(0)
model = VisionTransformer(
    image_size=32,
    patch_size=4,
    num_layers=6,
    num_heads=4,
    hidden_dim=96,
    mlp_dim=384,
    dropout=0.1,
    num_classes=10,
)

if __name__ == "__main__":
    path = sys.argv[1] if len(sys.argv) > 1 else "vit.pt2"
    images = torch.randn(2, 3, 32, 32)
    print(baton.export(model, images, path, classes=10, mean=[77.9] * 3, std=[95.9] * 3))
