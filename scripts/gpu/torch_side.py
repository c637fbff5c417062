"""PyTorch's side of the GPU bench: ResNet under automatic mixed precision in channels-last, as its users run it.

    torch_side.py --side 224 --batch 256 --steps 40 --compute bf16 [--compile] [--device cuda]

Prints one JSON object. Images are bytes in pinned memory that are copied to the device in every step and
normalised there. The host waits for the device only before and after the measured steps: the wait of a user's loop that
reads the loss is not counted against PyTorch. The network is defined here, as a machine with PyTorch may not have
torchvision.
"""

import argparse
import json
import time

import torch
from torch import nn
from torch.nn import functional

CLASSES = 1000
DEPTHS = {"resnet18": (2, 2, 2, 2), "resnet50": (3, 4, 6, 3)}
# Number of trained values of torchvision's networks, to check that the networks are the same.
PARAMETERS = {"resnet18": 11_689_512, "resnet50": 25_557_032}
FORMATS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Block(nn.Module):
    """He et al. 2015 (arXiv 1512.03385), figure 5; the stride sits in the 3×3 convolution ("v1.5")."""

    def __init__(self, inputs, width, stride, bottleneck):
        super().__init__()
        outputs = width * (4 if bottleneck else 1)
        sizes = [(inputs, width, 1, 1), (width, width, 3, stride), (width, outputs, 1, 1)]
        if not bottleneck:
            sizes = [(inputs, width, 3, stride), (width, outputs, 3, 1)]
        self.body = nn.ModuleList(conv_norm(*size) for size in sizes)
        self.shortcut = None
        if stride != 1 or inputs != outputs:
            self.shortcut = conv_norm(inputs, outputs, 1, stride)

    def forward(self, x):
        y = x
        for number, layer in enumerate(self.body):
            y = layer(y if number == 0 else functional.relu(y, inplace=True))
        y += x if self.shortcut is None else self.shortcut(x)
        return functional.relu(y, inplace=True)


def conv_norm(inputs, outputs, side, stride):
    conv = nn.Conv2d(inputs, outputs, side, stride, side // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs))


def network(arch):
    bottleneck = arch == "resnet50"
    stem = [*conv_norm(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    blocks, inputs = [], 64
    for stage, depth in enumerate(DEPTHS[arch]):
        width = 64 << stage
        for index in range(depth):
            stride = 2 if stage > 0 and index == 0 else 1
            blocks.append(Block(inputs, width, stride, bottleneck))
            inputs = width * (4 if bottleneck else 1)
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, CLASSES)]
    made = nn.Sequential(*stem, *blocks, *head)
    count = sum(parameter.numel() for parameter in made.parameters())
    assert count == PARAMETERS[arch], f"{arch} has {count} parameters"
    return made


def measure(arguments):
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    device, on_gpu = torch.device(arguments.device), arguments.device == "cuda"
    model = network(arguments.arch).to(device, memory_format=torch.channels_last)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 1e-4},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    rule = torch.optim.SGD(groups, lr=0.1, momentum=0.9, fused=True)
    kind = FORMATS[arguments.compute]
    scaler = torch.amp.GradScaler(arguments.device, enabled=kind is torch.float16)
    side, batch = arguments.side, arguments.batch
    images = torch.randint(0, 256, (batch, side, side, 3), dtype=torch.uint8)
    labels = torch.randint(0, 10, (batch,))
    if on_gpu:
        images, labels = images.pin_memory(), labels.pin_memory()
    mean = torch.tensor([123.675, 116.28, 103.53], device=device)
    std = torch.tensor([58.395, 57.12, 57.375], device=device)

    def loss_of(images, labels):
        inputs = ((images.float() - mean) / std).permute(0, 3, 1, 2)
        with torch.autocast(arguments.device, kind or torch.bfloat16, enabled=kind is not None):
            return functional.cross_entropy(model(inputs), labels, label_smoothing=0.1)

    if arguments.compile:
        loss_of = torch.compile(loss_of)

    def step():
        rule.zero_grad(set_to_none=True)
        loss = loss_of(images.to(device, non_blocking=True), labels.to(device, non_blocking=True))
        scaler.scale(loss).backward()
        scaler.step(rule)
        scaler.update()

    def wait():
        if on_gpu:
            torch.cuda.synchronize()

    for _ in range(arguments.warm_up):
        step()
    wait()
    begin = time.perf_counter()
    for _ in range(arguments.steps):
        step()
    wait()
    seconds = (time.perf_counter() - begin) / arguments.steps
    peak = torch.cuda.max_memory_allocated() / 2**20 if on_gpu else None
    name = torch.cuda.get_device_name() if on_gpu else "cpu"
    return {"step_seconds": seconds, "device_mib": peak, "device": name, "torch": torch.__version__}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--arch", choices=DEPTHS, default="resnet50")
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--warm-up", type=int, default=10)
    parser.add_argument("--compute", choices=FORMATS, default="bf16")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--compile", action="store_true")
    print(json.dumps(measure(parser.parse_args())))


if __name__ == "__main__":
    main()
