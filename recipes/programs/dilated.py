"""Writes dilated.pt2, the program of recipes/dilated_signals.toml: dilated convolutions over time, and attention that
says which positions of the signal count.

PYTHONPATH=python python recipes/programs/dilated.py [PATH]
"""

import sys

import baton
import torch
from torch import nn

CHANNELS, HEADS = 64, 4


class Block(nn.Module):
    """Two convolutions with gaps of `dilation` positions, added to the input. The length stays the same."""

    def __init__(self, dilation):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(CHANNELS, CHANNELS, 3, padding=dilation, dilation=dilation, bias=False),
            nn.BatchNorm1d(CHANNELS),
            nn.ReLU(),
            nn.Conv1d(CHANNELS, CHANNELS, 3, padding=dilation, dilation=dilation, bias=False),
            nn.BatchNorm1d(CHANNELS),
        )

    def forward(self, x):
        return torch.relu(x + self.layers(x))


class AttentionPool(nn.Module):
    """Weighted means over all positions; each head has its own weights and its own part of the channels."""

    def __init__(self):
        super().__init__()
        self.scores = nn.Conv1d(CHANNELS, HEADS, 1)

    def forward(self, x):
        weights = self.scores(x).softmax(2).unsqueeze(2)
        return (x.unflatten(1, (HEADS, CHANNELS // HEADS)) * weights).sum(3).flatten(1)


torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv1d(1, CHANNELS, 7, padding=3, bias=False),
    nn.BatchNorm1d(CHANNELS),
    nn.ReLU(),
    *[Block(dilation) for dilation in [1, 2, 4, 8, 16]],
    AttentionPool(),
    nn.Dropout(0.1),
    nn.Linear(CHANNELS, 1),
)

if __name__ == "__main__":
    path = sys.argv[1] if len(sys.argv) > 1 else "dilated.pt2"
    signals = torch.randn(2, 1, 100)  # (samples, channels, positions)
    print(baton.export(model, signals, path, task="regression"))
