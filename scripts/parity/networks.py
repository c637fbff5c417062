"""The reference networks: torchvision's, and additions for what it lacks."""

import dataclasses
import types

import torch
import torchvision
from torch import nn
from torch.nn import functional

CLASSES = 1000
# Memory formats, by their names in the recipes' file names.
FORMATS = {"nhwc": torch.channels_last, "nchw": torch.contiguous_format}


@dataclasses.dataclass
class Network:
    # The name in Baton.
    arch: str
    # Side of the images in pixels.
    side: int
    blur: bool = False

    def recipe(self, label):
        """The model section of a recipe."""
        return {
            "arch": self.arch,
            "num_classes": CLASSES,
            "channels_last": label == "nhwc",
            "blur_pool": self.blur,
        }

    def build(self, label, pointwise="baton"):
        """The network in a memory format; with Baton's 1×1 convolutions, or with torchvision's."""
        model = torchvision.models.get_model(self.arch, weights=None, num_classes=CLASSES)
        convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
        for module in convolutions:
            if self.blur and max(module.stride) > 1 and module.in_channels >= 16:
                module.register_forward_pre_hook(blurred)
            if label == "nhwc" and pointwise == "baton" and module.kernel_size == (1, 1):
                module.forward = types.MethodType(product, module)
        return model.to(memory_format=FORMATS[label])


# Small images for the deep ones, which take longest.
NETWORKS = {
    "resnet18": Network("resnet18", 96),
    "resnet34": Network("resnet34", 96),
    "resnet50": Network("resnet50", 96),
    "resnet50 blur_pool": Network("resnet50", 96, blur=True),
    "resnet101": Network("resnet101", 64),
    "resnet152": Network("resnet152", 64),
}


def blurred(convolution, arguments):
    """ffcv-imagenet's BlurPoolConv2d as a hook, so that parameters keep their names."""
    (x,) = arguments
    row = torch.tensor([1.0, 2.0, 1.0])
    filters = (row.outer(row) / 16).repeat(convolution.in_channels, 1, 1, 1)
    return functional.conv2d(x, filters, padding=1, groups=convolution.in_channels)


def product(convolution, x):
    """A 1×1 convolution as Baton computes it on a CPU in channels-last format."""
    rows, columns = convolution.stride
    pixels = x.permute(0, 2, 3, 1)[:, ::rows, ::columns]
    return functional.linear(pixels, convolution.weight.flatten(1)).permute(0, 3, 1, 2)


class Block1d(nn.Module):
    """torchvision's BasicBlock in one dimension, with kernels of nine samples."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv1d(inputs, outputs, 9, stride, 4, bias=False)
        self.bn1 = nn.BatchNorm1d(outputs)
        self.conv2 = nn.Conv1d(outputs, outputs, 9, 1, 4, bias=False)
        self.bn2 = nn.BatchNorm1d(outputs)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv1d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm1d(outputs))

    def forward(self, x):
        shortcut = x if self.downsample is None else self.downsample(x)
        y = functional.relu(self.bn1(self.conv1(x)))
        return functional.relu(self.bn2(self.conv2(y)) + shortcut)


class ResNet1d(nn.Module):
    """ResNet-34 for signals (samples, channels, length), with torchvision's names."""

    def __init__(self, channels, outputs):
        super().__init__()
        self.conv1 = nn.Conv1d(channels, 64, 15, 2, 7, bias=False)
        self.bn1 = nn.BatchNorm1d(64)
        width = 64
        for number, depth in enumerate([3, 4, 6, 3], 1):
            blocks = []
            for index in range(depth):
                stride = 2 if number > 1 and index == 0 else 1
                blocks.append(Block1d(width, 64 << (number - 1), stride))
                width = 64 << (number - 1)
            setattr(self, f"layer{number}", nn.Sequential(*blocks))
        self.fc = nn.Linear(width, outputs)

    def forward(self, x):
        x = functional.relu(self.bn1(self.conv1(x)))
        x = functional.max_pool1d(x, 3, 2, 1)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(functional.adaptive_avg_pool1d(x, 1).flatten(1))


def without_special_values(model):
    """Random weights without special values such as scales of 1 or shifts of 0."""
    for module in model.modules():
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, 0, 0.1)
            nn.init.normal_(module.running_mean, 0, 0.1)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    return model.state_dict()
