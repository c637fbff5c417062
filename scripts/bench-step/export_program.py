"""Exports ResNet-50 as a program: `export_program.py OUT.pt2`."""

import sys

import torch
import torchvision

torch.manual_seed(0)
model = torchvision.models.resnet50(num_classes=1000).train()
batch = torch.export.Dim("batch", min=2, max=4096)
program = torch.export.export(model, (torch.randn(2, 3, 64, 64),), dynamic_shapes=({0: batch},))
torch.export.save(program, sys.argv[1])
