"""PyTorch's side of the checkpoint bench: torch.distributed.checkpoint under DDP over gloo.

    torch_side.py --folder DIR [--saves N] [--steps N] [--ranks N]
    torch_side.py --folder DIR --restore [--ranks N]

ResNet-50 with SGD's momentum and a moving average of the weights. Between saves it trains like Baton's side. Prints one
JSON object: the slowest rank's medians.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import ranks
import torch
import torch.distributed.checkpoint as dcp
import torchvision
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

BATCH, SIDE, CLASSES = 8, 32, 10


class Training:
    def __init__(self, ranks):
        torch.manual_seed(0)
        network = torchvision.models.resnet50(num_classes=CLASSES).to(memory_format=torch.channels_last)
        self.network = network
        self.model = DistributedDataParallel(network) if ranks > 1 else network
        self.average = AveragedModel(network, multi_avg_fn=get_ema_multi_avg_fn(0.999))
        self.rule = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
        self.images = torch.randn(BATCH, 3, SIDE, SIDE).contiguous(memory_format=torch.channels_last)
        self.labels = torch.randint(0, CLASSES, (BATCH,))

    def step(self):
        self.rule.zero_grad(set_to_none=True)
        torch.nn.functional.cross_entropy(self.model(self.images), self.labels).backward()
        self.rule.step()
        self.average.update_parameters(self.network)

    def state(self):
        model, optimizer = get_state_dict(self.network, self.rule)
        return {"model": model, "optimizer": optimizer, "average": self.average.state_dict()}

    def take(self, state):
        set_state_dict(
            self.network,
            self.rule,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.average.load_state_dict(state["average"])


def save(training, folder, arguments):
    # A separate group: collectives of the saving thread must not mix with those of training.
    group = torch.distributed.new_group(backend="gloo")
    stalls, durables = [], []
    training.step()
    for number in range(arguments.saves + 1):
        folder_of_save = folder / f"save-{number}"
        writer = dcp.FileSystemWriter(folder_of_save)
        torch.distributed.barrier()
        began = time.perf_counter()
        future = dcp.async_save(training.state(), storage_writer=writer, process_group=group)
        stalls.append(time.perf_counter() - began)
        ended = []
        future.add_done_callback(lambda _, ended=ended: ended.append(time.perf_counter()))
        for _ in range(arguments.steps):
            training.step()
        future.result()
        while not ended:
            time.sleep(0.001)
        durables.append(ended[0] - began)
    # The first one allocates its memory.
    return {"stall": statistics.median(stalls[1:]), "durable": statistics.median(durables[1:])}


def restore(training, folder):
    training.step()
    newest = max(folder.glob("save-*"), key=lambda path: int(path.name.split("-")[1]))
    torch.distributed.barrier()
    # Once, as in a process that continues after another was killed: its memory is not mapped yet.
    began = time.perf_counter()
    state = training.state()
    dcp.load(state, checkpoint_id=newest)
    training.take(state)
    torch.distributed.barrier()
    return {"restore": time.perf_counter() - began}


def part(arguments):
    training = Training(arguments.ranks)
    folder = Path(arguments.folder)
    return restore(training, folder) if arguments.restore else save(training, folder, arguments)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--restore", action="store_true")
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    print(json.dumps(ranks.run(part, parser.parse_args())))


if __name__ == "__main__":
    main()
