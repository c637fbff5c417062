"""Small networks for the tests."""

import torch
from torch import nn

CLASSES, SIDE = 5, 8


class Small(nn.Module):
    """A BatchNorm, dropout, a tied weight, buffers, a parameter that nothing uses."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(8, momentum=0.3)
        self.drop = nn.Dropout(0.5)
        self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.second.weight = self.first.weight
        self.fc = nn.Linear(8, CLASSES)
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("order", torch.arange(7, -1, -1))

    def forward(self, image):
        x = torch.relu(self.norm(self.conv(image))).mean((2, 3))[:, self.order]
        return self.fc(self.second(torch.tanh(self.first(self.drop(x)))))


class Two(nn.Module):
    """Two inputs."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, CLASSES)

    def forward(self, left, right):
        return self.fc(left) * torch.sigmoid(self.fc(right))


class Inner(nn.Module):
    """Applies a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def with_function(function):
    """A classifier whose module `1` applies the function to a tensor of shape (samples, 4)."""
    return nn.Sequential(nn.Linear(4, 4), Inner(function), nn.Linear(4, CLASSES))


def images(samples=4):
    return torch.randn(samples, 3, SIDE, SIDE)
