"""Writes binding.pt2, the network of docs/studies/sequences.md: embeddings of two sequences, attention of one to the other.

PYTHONPATH=python python scripts/studies/binding_network.py [PATH]
"""

import sys

import baton
import torch
from torch import nn

LETTERS, WIDTH = 21, 48  # 20 amino acids, and 0 behind the end


class Binding(nn.Module):
    def __init__(self, loop_length: int = 20, epitope_length: int = 12):
        super().__init__()
        self.letters = nn.Embedding(LETTERS, WIDTH)
        self.loop_places = nn.Parameter(torch.randn(loop_length, WIDTH) * 0.1)
        self.epitope_places = nn.Parameter(torch.randn(epitope_length, WIDTH) * 0.1)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.layers = nn.Sequential(nn.Linear(2 * WIDTH, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))

    def forward(self, loop, epitope):
        loop = self.letters(loop.long()) + self.loop_places
        epitope = self.letters(epitope.long()) + self.epitope_places
        met, _ = self.attention(loop, epitope, epitope, need_weights=False)
        return self.layers(torch.cat([loop, met], 2)).mean(1)


if __name__ == "__main__":
    torch.manual_seed(0)
    path = sys.argv[1] if len(sys.argv) > 1 else "binding.pt2"
    inputs = {"loop": torch.ones(2, 20), "epitope": torch.ones(2, 12)}
    print(baton.export(Binding(), inputs, path, task="regression"))
