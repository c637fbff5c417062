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


class WithLoss(nn.Module):
    """Computes its loss and metrics itself, from images, another field and the target."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.drop = nn.Dropout(0.5)
        self.age = nn.Linear(1, 8)
        self.fc = nn.Linear(8, CLASSES)

    def forward(self, age, image, target):
        x = torch.relu(self.norm(self.conv(image))).mean((2, 3))
        scores = self.fc(self.drop(x + self.age(age)))
        loss = nn.functional.cross_entropy(scores, target, reduction="none", label_smoothing=0.1)
        probability = scores.softmax(1).gather(1, target[:, None]).squeeze(1)
        return {"accuracy": scores.argmax(1) == target, "loss": loss, "probability_error": 1 - probability}


class Function(nn.Module):
    """Calls a function with a tensor of shape (samples, 5) and the target."""

    def __init__(self, function):
        super().__init__()
        self.fc = nn.Linear(4, CLASSES)
        self.function = function

    def forward(self, x, target):
        return self.function(self.fc(x), target)


def with_root(scores, target):
    """A loss, and a metric of which the derivative is infinite."""
    return {"loss": (scores.sum(1) - target) ** 2, "distance_error": (scores * 0).sum(1).sqrt()}


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
