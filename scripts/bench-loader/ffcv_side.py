"""ffcv's side of the loader bench: epochs of random-resized-crop, flip and labels, timed.

Prints one JSON object on one line. Two epochs run before those that count: in the first, ffcv compiles
its pipeline and the file is read into the page cache; in the second, ffcv spent three times as long in the kernel as in
later epochs, on memory that the process had not touched before, and ran at half its speed. Run it with .venv-ffcv's
Python; taskset pins it.
"""

import argparse
import json
import os
import resource
import statistics
import sys
import time


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--file", required=True)
    parser.add_argument("--resolution", type=int, default=160, help="side of the crops in pixels")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--workers", type=int, default=1, help="threads that decode")
    parser.add_argument("--epochs", type=int, default=3, help="epochs that count")
    parser.add_argument("--order", choices=["random", "sequential"], default="random")
    parser.add_argument("--first-batch-only", action="store_true", help="stop each epoch after its first batch")
    return parser.parse_args()


ARGS = arguments()
WARM_UP_EPOCHS = 2
# The libraries read these when they are loaded, so they are set before the imports below. OpenCV gets one thread in
# each worker, as ffcv calls it image by image.
os.environ["NUMBA_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = str(ARGS.workers)
os.environ["OPENCV_FOR_THREADS_NUM"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch
from ffcv.fields.basics import IntDecoder
from ffcv.fields.rgb_image import RandomResizedCropRGBImageDecoder
from ffcv.loader import Loader, OrderOption
from ffcv.transforms import RandomHorizontalFlip, ToTensor


def new_loader():
    side = ARGS.resolution
    crop = RandomResizedCropRGBImageDecoder((side, side), scale=(0.08, 1), ratio=(3 / 4, 4 / 3))
    return Loader(
        ARGS.file,
        batch_size=ARGS.batch,
        num_workers=ARGS.workers,
        os_cache=True,
        order=OrderOption[ARGS.order.upper()],
        drop_last=False,
        pipelines={
            "image": [crop, RandomHorizontalFlip(), ToTensor()],
            "label": [IntDecoder(), ToTensor()],
        },
    )


def one_epoch(loader):
    """Runs an epoch; returns the number of images, and the seconds to its first batch and to its end."""
    begin = time.perf_counter()
    images = 0
    first_batch = None
    for batch, labels in loader:
        if first_batch is None:
            first_batch = time.perf_counter() - begin
            expected = (min(ARGS.batch, len(loader.indices)), ARGS.resolution, ARGS.resolution, 3)
            if batch.shape != expected or len(labels) != len(batch):
                sys.exit(f"ffcv_side: a batch has the shape {tuple(batch.shape)}, not {expected}")
        images += len(batch)
        if ARGS.first_batch_only:
            break
    return images, first_batch, time.perf_counter() - begin


def cpu_seconds():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main():
    torch.set_num_threads(ARGS.workers)
    loader = new_loader()
    for _ in range(WARM_UP_EPOCHS):
        one_epoch(loader)
    cpu_before = cpu_seconds()
    epochs = [one_epoch(loader) for _ in range(ARGS.epochs)]
    cpu = cpu_seconds() - cpu_before
    images = sum(images for images, _, _ in epochs)
    rates = [images / seconds for images, _, seconds in epochs]
    result = {
        "side": "ffcv",
        "workers": ARGS.workers,
        "images": images,
        "images_per_second": rates,
        "median_images_per_second": statistics.median(rates),
        "cpu_seconds": cpu,
        "cpu_seconds_per_image": cpu / images,
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "first_batch_ms": statistics.median(first for _, first, _ in epochs) * 1e3,
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
