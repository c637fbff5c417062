#!/usr/bin/env python3
"""Generates spectrograms of four kinds of sound, as PNG files in a folder per class: for docs/studies/spectrograms.md.

    scripts/studies/spectrograms.py FOLDER [--images 1200] [--side 64]

FOLDER/CLASS/NNNN.png.
"""

import argparse
from pathlib import Path

import numpy as np
from PIL import Image

KINDS = ["falling", "pulsed", "rising", "steady"]
RATE = 8000


def sound(kind: str, random: np.random.Generator) -> np.ndarray:
    """One second."""
    seconds = np.arange(RATE) / RATE
    low, high = random.uniform(300, 1200), random.uniform(1400, 3500)
    start, end = {"rising": (low, high), "falling": (high, low)}.get(kind, (low, low))
    wave = np.sin(2 * np.pi * (start * seconds + (end - start) * seconds**2 / 2))
    if kind == "pulsed":
        wave *= np.sin(2 * np.pi * random.uniform(3, 8) * seconds) > 0
    return random.uniform(0.2, 1.0) * wave + random.normal(0, 0.5, RATE)


def spectrogram(wave: np.ndarray, side: int) -> Image.Image:
    """Decibels as grey levels: time to the right, frequency upwards."""
    frames = np.lib.stride_tricks.sliding_window_view(wave, 256)[::128] * np.hanning(256)
    decibel = 20 * np.log10(np.abs(np.fft.rfft(frames)).clip(1e-3)).T[::-1]
    levels = ((decibel + 20) / 70 * 255).clip(0, 255).astype(np.uint8)
    return Image.fromarray(levels).resize((side, side))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--images", type=int, default=1200)
    parser.add_argument("--side", type=int, default=64)
    args = parser.parse_args()
    random = np.random.default_rng(0)
    for number in range(args.images):
        kind = KINDS[number % len(KINDS)]
        folder = args.folder / kind
        folder.mkdir(parents=True, exist_ok=True)
        spectrogram(sound(kind, random), args.side).save(folder / f"{number:04}.png")


if __name__ == "__main__":
    main()
