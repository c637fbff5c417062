"""PyTorch's side of the recovery bench: DDP over gloo as torchrun's users write it.

    torchrun --nproc-per-node 2 --max-restarts 10 torch_side.py --checkpoint FILE

Continues from FILE if it exists, and trains until it is killed. Rank 0 saves every few steps and prints a line per
finished step: seconds since 1970, the step, and its process, which a restart replaces.
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torchvision
from torch.nn.parallel import DistributedDataParallel

# Like RECIPE in race.py.
BATCH, SIDE, CLASSES, SAVE_EVERY = 8, 32, 10, 5


class Training:
    """A network, its optimizer and one batch that is used in every step."""

    def __init__(self, checkpoint):
        torch.manual_seed(0)
        network = torchvision.models.resnet50(num_classes=CLASSES)
        self.network = network.to(memory_format=torch.channels_last)
        self.rule = torch.optim.SGD(self.network.parameters(), lr=0.001, momentum=0.9)
        self.checkpoint = checkpoint
        self.finished = self.resume() if checkpoint.exists() else 0
        self.model = DistributedDataParallel(self.network)
        images = torch.randn(BATCH, 3, SIDE, SIDE)
        self.images = images.contiguous(memory_format=torch.channels_last)
        self.labels = torch.randint(0, CLASSES, (BATCH,))

    def resume(self):
        """Restores the saved state; returns its number of finished steps."""
        state = torch.load(self.checkpoint, map_location="cpu")
        self.network.load_state_dict(state["model"])
        self.rule.load_state_dict(state["optimizer"])
        return state["finished"]

    def step(self):
        self.rule.zero_grad(set_to_none=True)
        torch.nn.functional.cross_entropy(self.model(self.images), self.labels).backward()
        self.rule.step()
        self.finished += 1

    def save(self):
        """Saves to a temporary file first: a kill leaves a complete checkpoint."""
        state = {
            "model": self.network.state_dict(),
            "optimizer": self.rule.state_dict(),
            "finished": self.finished,
        }
        unfinished = self.checkpoint.with_suffix(".unfinished")
        torch.save(state, unfinished)
        unfinished.replace(self.checkpoint)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--checkpoint", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    training = Training(arguments.checkpoint)
    is_first = torch.distributed.get_rank() == 0
    while True:
        training.step()
        if is_first:
            print(f"{time.time():.4f} step {training.finished} of process {os.getpid()}", flush=True)
            if training.finished % SAVE_EVERY == 0:
                training.save()


if __name__ == "__main__":
    main()
