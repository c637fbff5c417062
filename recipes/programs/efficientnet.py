"""Writes efficientnet.pt2, the program of recipes/efficientnet_digits.toml: EfficientNet-B0 with random weights.

PYTHONPATH=python python recipes/programs/efficientnet.py [PATH]
"""

import sys

import baton
import torch
import torchvision

torch.manual_seed(0)
model = torchvision.models.efficientnet_b0(num_classes=10)

if __name__ == "__main__":
    path = sys.argv[1] if len(sys.argv) > 1 else "efficientnet.pt2"
    images = torch.randn(2, 3, 32, 32)
    print(baton.export(model, images, path, classes=10, mean=[77.9] * 3, std=[95.9] * 3))
