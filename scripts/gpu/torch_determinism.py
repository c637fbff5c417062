"""What cuDNN's deterministic flag costs PyTorch, and which gradients change without it.

    torch_determinism.py [--device cuda] [--arch resnet50] [--side 224] [--batch 128] [--repeats 10]

Prints one JSON object: for the default, for `cudnn.benchmark`, and for `cudnn.deterministic`, the number of values of
the gradient whose bits differ between two backward passes, and the median seconds of a forward and backward pass.
"""

import argparse
import json
import statistics
import time

import torch
from torch.nn import functional
from torch_side import DEPTHS, FORMATS, network

SETTINGS = {
    "default": {"benchmark": False, "deterministic": False},
    "benchmark": {"benchmark": True, "deterministic": False},
    "deterministic": {"benchmark": False, "deterministic": True},
    "benchmark_deterministic": {"benchmark": True, "deterministic": True},
}


def measure(options, compute, setting):
    torch.backends.cudnn.benchmark = setting["benchmark"]
    torch.backends.cudnn.deterministic = setting["deterministic"]
    torch.manual_seed(0)
    device, kind = torch.device(options.device), FORMATS[compute]
    # The scales of all BatchNorms are 1, so that no gradient is zero.
    model = network(options.arch).to(device, memory_format=torch.channels_last)
    images = torch.randn(options.batch, 3, options.side, options.side, device=device)
    images = images.to(memory_format=torch.channels_last)
    labels = torch.randint(0, 10, (options.batch,), device=device)

    def gradient():
        model.zero_grad(set_to_none=True)
        with torch.autocast(options.device, kind or torch.bfloat16, enabled=kind is not None):
            loss = functional.cross_entropy(model(images), labels)
        loss.backward()
        if options.device == "cuda":
            torch.cuda.synchronize()

    def bits():
        return [parameter.grad.detach().clone().view(torch.int32) for parameter in model.parameters()]

    gradient()
    first = bits()
    times = []
    for _ in range(options.repeats):
        begin = time.perf_counter()
        gradient()
        times.append(time.perf_counter() - begin)
    other = sum(int((a != b).sum()) for a, b in zip(first, bits(), strict=True))
    return {"other_bits": other, "seconds": statistics.median(times)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--arch", choices=DEPTHS, default="resnet50")
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args()
    found = {}
    for compute in FORMATS:
        for name, setting in SETTINGS.items():
            found[f"{compute} {name}"] = measure(options, compute, setting)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
