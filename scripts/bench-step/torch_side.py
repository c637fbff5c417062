"""PyTorch's side of the step bench: ResNet under DDP over gloo, as its users run it.

    torch_side.py --resolution 64 --ranks 2 --steps 10 --format nhwc [--recipe full]

Starts one process per rank, as torchrun does, and prints one JSON object: the slowest rank's medians.
`--recipe plain` is SGD with momentum and weight decay; `full` adds clipping and a moving average of the
weights. `--optimizer` selects torch's implementation: a loop over tensors, foreach, or fused.
"""

import argparse
import json
import resource
import statistics
import time

import ranks
import torch
import torchvision
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

CLASSES = 1000
# The same number as in `baton-worker bench`.
WARM_UP = 2
FORMATS = {"nhwc": torch.channels_last, "nchw": torch.contiguous_format}
OPTIMIZERS = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def measure(arguments):
    torch.manual_seed(0)
    memory_format = FORMATS[arguments.format]
    network = torchvision.models.get_model(arguments.arch, weights=None, num_classes=CLASSES)
    network = network.to(memory_format=memory_format)
    model = DistributedDataParallel(network) if arguments.ranks > 1 else network
    full = arguments.recipe == "full"
    average = None
    if full:
        multi = get_ema_multi_avg_fn(0.999)
        average = AveragedModel(network, multi_avg_fn=multi, use_buffers=True)
    groups = [
        {"params": [p for p in network.parameters() if p.ndim > 1], "weight_decay": 1e-4},
        {"params": [p for p in network.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    rule = torch.optim.SGD(groups, lr=0.1, momentum=0.9, **OPTIMIZERS[arguments.optimizer])
    side = arguments.resolution
    images = torch.randint(0, 256, (arguments.batch, side, side, 3), dtype=torch.uint8)
    labels = torch.randint(0, 10, (arguments.batch,))
    mean = torch.tensor([123.675, 116.28, 103.53])
    std = torch.tensor([58.395, 57.12, 57.375])

    steps, updates = [], []
    for _ in range(WARM_UP + arguments.steps):
        start = time.perf_counter()
        inputs = ((images.float() - mean) / std).permute(0, 3, 1, 2)
        inputs = inputs.contiguous(memory_format=memory_format)
        rule.zero_grad(set_to_none=True)
        logits = model(inputs)
        loss = torch.nn.functional.cross_entropy(logits, labels, label_smoothing=0.1)
        loss.backward()
        update = time.perf_counter()
        if full:
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        rule.step()
        if full:
            average.update_parameters(network)
        loss.item()
        end = time.perf_counter()
        steps.append(end - start)
        updates.append(end - update)
    return {
        "step_seconds": statistics.median(steps[WARM_UP:]),
        "best_step_seconds": min(steps[WARM_UP:]),
        "optimizer_seconds": statistics.median(updates[WARM_UP:]),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--arch", default="resnet50")
    parser.add_argument("--resolution", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hosts", type=int, default=1, help="those of scripts/bench-step/hosts.sh, which starts this")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--format", choices=FORMATS, default="nhwc")
    parser.add_argument("--recipe", choices=["plain", "full"], default="plain")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="foreach")
    arguments = parser.parse_args()
    print(json.dumps(ranks.run(measure, arguments, arguments.hosts)))


if __name__ == "__main__":
    main()
