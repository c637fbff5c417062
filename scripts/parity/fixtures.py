"""Writes the programs that tests read, crates/program/tests/fixtures/*.pt2, with torch.export. Run it again only for a new
version of PyTorch or another network:

    .venv-parity/bin/python scripts/parity/fixtures.py
"""

import json
import pathlib
import re
import sys
import tempfile
import zipfile

import torch
from torch import nn

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "python"))
import baton

FOLDER = ROOT / "crates/program/tests/fixtures"
# Not part of a program, or names of the machine that wrote it.
LEFT_OUT = ["data/sample_inputs/", ".data/"]


class Small(nn.Module):
    """A little of everything: BatchNorm, dropout, stochastic depth, a tied weight, buffers, a part without gradient."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(8, momentum=0.3)
        self.drop = nn.Dropout(0.25)
        self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.second.weight = self.first.weight
        self.fc = nn.Linear(8, 10)
        self.register_buffer("order", torch.arange(7, -1, -1))
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 8), persistent=False)

    def forward(self, x):
        x = torch.relu(self.norm(self.conv(x)))
        if self.training:
            x = x * torch.empty(x.shape[0], 1, 1, 1).bernoulli_(0.8).div_(0.8)
        x = x.mean((2, 3))[:, self.order] * self.scale
        x = self.second(torch.tanh(self.first(self.drop(x))))
        with torch.no_grad():
            shift = x * 0.1
        return self.fc(x + shift.view(shift.shape[0], -1))


class Sequence(nn.Module):
    """For the costs of what Small has not: operators in place, views and copies, attention, a recurrent layer, a frozen
    weight; images of any size."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.norm = nn.LayerNorm(4)
        self.qkv = nn.Linear(4, 12, bias=False)
        self.rnn = nn.GRU(4, 6, batch_first=True)
        self.frozen = nn.Linear(6, 6, bias=False).requires_grad_(False)
        self.fc = nn.Linear(6, 10)

    def forward(self, x):
        x = nn.functional.max_pool2d(nn.functional.silu(self.conv(x), inplace=True), 2)
        x = self.norm(x.flatten(2).transpose(1, 2))
        query, key, value = self.qkv(x).chunk(3, -1)
        x = x + nn.functional.scaled_dot_product_attention(query, key, value)
        x, _ = self.rnn(x[:, :3])
        return self.fc(torch.relu_(self.frozen(x.mean(1))))


class WithoutValues(nn.Module):
    """Layers of width 0 beside another, and a buffer without values."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(12, 10)
        self.nothing, self.none = nn.Linear(0, 10), nn.Linear(0, 10)
        self.last = nn.LayerNorm(10)
        self.register_buffer("bounds", torch.zeros(2, 0))

    def forward(self, x):
        x = x[:, :, ::4, ::4].flatten(1)
        x = self.first(x) + self.nothing(x[:, :0]) + self.none(x[:, :0]) + self.bounds.sum()
        return self.last(x)


class Running(nn.Module):
    """Keeps a buffer that is not BatchNorm's."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(192, 10)
        self.register_buffer("average", torch.zeros(10))

    def forward(self, x):
        y = self.fc(x.flatten(1))
        with torch.no_grad():
            self.average.lerp_(y.mean(0), 0.1)
        return y - self.average


class Clipped(nn.Module):
    """Changes its own weight."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(192, 10)

    def forward(self, x):
        with torch.no_grad():
            self.fc.weight.clamp_(-0.05, 0.05)
        return self.fc(x.flatten(1))


class WithLoss(nn.Module):
    """Computes its loss and metrics itself, from an image, another field and the target."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.drop = nn.Dropout(0.25)
        self.hint = nn.Linear(1, 8)
        self.fc = nn.Linear(8, 10)

    def forward(self, x, label, target):
        x = torch.relu(self.norm(self.conv(x))).mean((2, 3))
        scores = self.fc(self.drop(x + self.hint(label)))
        loss = nn.functional.cross_entropy(scores, target, reduction="none", label_smoothing=0.1)
        expected = (scores.softmax(1) * torch.arange(10)).sum(1)
        right = (scores.argmax(1) == target).float()
        return {"loss": loss, "accuracy": right, "digit_error": (expected - target).abs()}


class NotFinite(nn.Module):
    """Has a metric that is never finite."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 10)

    def forward(self, x, target):
        scores = self.fc(x.mean((2, 3)))
        loss = nn.functional.cross_entropy(scores, target, reduction="none")
        right = (scores.argmax(1) == target).float()
        return {"loss": loss, "score": right / torch.zeros_like(right), "accuracy": right}


class Views(nn.Module):
    """A module returns a view of its input, which an operator then changes in place."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.flat = nn.Flatten()
        self.fc = nn.Linear(144, 10)

    def forward(self, x):
        x = self.conv(x)
        x = x * x
        y = self.flat(x)
        y.mul_(0.5)
        return self.fc(y) + (x * x).sum((1, 2, 3)).unsqueeze(1)


class TokenLoss(nn.Module):
    """Returns a loss for each token, not for each sample."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 10)

    def forward(self, x, target):
        scores = self.fc(x).flatten(0, 2)
        return nn.functional.cross_entropy(scores, target.expand(-1, 24).flatten(), reduction="none")


class ClippedView(nn.Module):
    """Changes its own weight through a view of it."""

    def __init__(self, view):
        super().__init__()
        self.fc = nn.Linear(192, 10)
        self.view = view

    def forward(self, x):
        with torch.no_grad():
            self.view(self.fc.weight).clamp_(-0.05, 0.05)
        return self.fc(x.flatten(1))


class WithoutGradient(nn.Module):
    """Ends with what has no gradient."""

    def __init__(self, last):
        super().__init__()
        self.fc = nn.Linear(192, 10)
        self.last = last

    def forward(self, x):
        return self.last(self.fc(x.flatten(1)))


class SparseGradient(nn.Module):
    """A table whose gradient has only the rows in use."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(8, 10, sparse=True)

    def forward(self, x):
        return self.table((7 * x.sigmoid()).flatten(1).long()).mean(1)


class Squeezed(nn.Module):
    """Loses the axis of the samples if there is one sample."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 10)

    def forward(self, x):
        return self.fc(x.mean((2, 3), keepdim=True).squeeze()).squeeze()


BATCH = {0: torch.export.Dim("batch", min=2, max=256)}
ANY_SIDE = {2: torch.export.Dim.AUTO, 3: torch.export.Dim.AUTO}


def write(name, model, open_sizes=BATCH, others=()):
    example = (torch.randn(3, 3, 8, 8), *others)
    shapes = tuple(open_sizes for _ in example) if open_sizes else None
    program = torch.export.export(model, example, dynamic_shapes=shapes)
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/{name}.pt2"
        torch.export.save(program, path)
        copy(path, FOLDER / f"{name}.pt2")


def write_described(name):
    """A program by the Python package, with everything that it can say."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 10))
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/{name}.pt2"
        digits = [f"digit {number}" for number in range(10)]
        normalisation = {"mean": [77.9] * 3, "std": [95.9] * 3}
        baton.export(model, torch.randn(3, 3, 8, 8), path, classes=digits, **normalisation)
        copy(path, FOLDER / f"{name}.pt2")


def copy(source, target):
    """Copies the entries that count, with paths of files shortened to their names."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for entry in old.infolist():
            if any(part in entry.filename for part in LEFT_OUT):
                continue
            content = old.read(entry)
            if entry.filename.endswith("models/model.json"):
                text = json.loads(content)
                content = json.dumps(text, separators=(",", ":"))
                content = re.sub(r'File \\"[^"]*/site-packages/', r'File \\"/site-packages/', content)
                content = re.sub(r'File \\"(?!/site-packages/)[^"]*/', r'File \\"', content)
            new.writestr(zipfile.ZipInfo(entry.filename), content)


def main():
    torch.manual_seed(0)
    write("small", Small().train())
    write("other_weights", Small().train())
    write("evaluation", Small().eval())
    write("fixed_batch", Small().train(), open_sizes=None)
    write("running_buffer", Running().train())
    write("changed_parameter", Clipped().train())
    write("with_loss", WithLoss().train(), others=(torch.rand(3, 1), torch.tensor([1, 2, 3])))
    write("sequence", Sequence().train(), {**BATCH, **ANY_SIDE})
    write("not_finite_metric", NotFinite().train(), others=(torch.tensor([1, 2, 3]),))
    write("views", Views().train())
    write("without_values", WithoutValues().train())
    write("no_gradient", WithoutGradient(torch.detach).train())
    write("no_gradient_at_run_time", WithoutGradient(lambda x: (x > 0).float()).train())
    write("sparse_gradient", SparseGradient().train())
    write("token_loss", TokenLoss().train(), others=(torch.tensor([[1], [2], [3]]),))
    write_described("described")
    write("changed_view", ClippedView(lambda weight: weight[:5]).train())
    # Only PyTorch knows whether the result is a view.
    write("changed_reshaped", ClippedView(lambda weight: weight.reshape(-1)).train())
    # Changes a buffer by an argument `out`.
    linear = nn.utils.parametrizations.spectral_norm(nn.Linear(192, 10))
    write("spectral_norm", nn.Sequential(nn.Flatten(), linear).train())
    write("squeezed", Squeezed().train())


if __name__ == "__main__":
    main()
