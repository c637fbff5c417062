#!/usr/bin/env python3
"""Generates pulse waves of patients with glucose values, as a wearable would record them: for docs/studies/ppg.md.

    scripts/studies/ppg.py FOLDER [--patients 20] [--minutes 8]

FOLDER/recordings/PATIENT-N.npy: two recordings of each patient, f32 at 50 Hz, with gaps (NaN) where the sensor slipped.
FOLDER/labels.csv: recording, patient, seconds, glucose (g/L), every two minutes.

The pulse's second wave comes later and is weaker with more glucose; heart rate, shape and noise are each patient's own.
None of this is physiology: it is a task whose answer is in the signal.
"""

import argparse
import csv
from pathlib import Path

import numpy as np

RATE = 50
LABEL_SECONDS = 120


def glucose_course(random: np.random.Generator, seconds: int) -> np.ndarray:
    """Glucose for each second, g/L: meals raise it, then it falls back."""
    course = np.full(seconds, random.uniform(0.7, 1.1))
    for _ in range(random.integers(1, 4)):
        since = np.arange(seconds) - random.uniform(-600, seconds)
        rise = np.where(since > 0, (since / 900) * np.exp(1 - since / 900), 0.0)
        course += random.uniform(0.3, 1.2) * rise
    return course


def pulse_wave(random: np.random.Generator, glucose: np.ndarray, traits: dict[str, float]) -> np.ndarray:
    """The signal of a recording, one value per position."""
    positions = len(glucose) * RATE
    level = np.repeat(glucose, RATE)
    # Each beat takes its own time.
    beats = traits["period"] * (1 + 0.03 * random.standard_normal(int(positions / RATE / traits["period"]) + 10))
    starts = np.concatenate([[0.0], np.cumsum(beats)])
    seconds = np.arange(positions) / RATE
    beat = np.searchsorted(starts, seconds, side="right") - 1
    phase = (seconds - starts[beat]) / beats[np.minimum(beat, len(beats) - 1)]
    first = np.exp(-(((phase - 0.2) / traits["width"]) ** 2))
    delay = 0.45 + 0.10 * (level - 1.0) + traits["delay"]
    second = (0.6 - 0.15 * (level - 1.0)) * np.exp(-(((phase - delay) / 0.12) ** 2))
    drift = 0.2 * np.sin(2 * np.pi * seconds / traits["breath"])
    signal = traits["gain"] * (first + second) + drift + 0.1 * random.standard_normal(positions)
    for _ in range(random.integers(0, 4)):
        start = random.integers(0, positions)
        signal[start : start + random.integers(50, 1500)] = np.nan
    return signal.astype(np.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--patients", type=int, default=20)
    parser.add_argument("--minutes", type=int, default=8, help="of each recording")
    args = parser.parse_args()
    recordings = args.folder / "recordings"
    recordings.mkdir(parents=True, exist_ok=True)
    with (args.folder / "labels.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["recording", "patient", "seconds", "glucose"])
        for patient in range(args.patients):
            random = np.random.default_rng(patient)
            traits = {
                "period": random.uniform(0.6, 1.1),
                "width": random.uniform(0.08, 0.12),
                "delay": random.normal(0, 0.005),
                "gain": random.uniform(0.7, 1.3),
                "breath": random.uniform(3, 6),
            }
            for number in range(2):
                name = f"p{patient:03}-{number}"
                glucose = glucose_course(random, args.minutes * 60)
                np.save(recordings / f"{name}.npy", pulse_wave(random, glucose, traits))
                for second in range(0, len(glucose), LABEL_SECONDS):
                    table.writerow([name, f"p{patient:03}", second, f"{glucose[second]:.3f}"])


if __name__ == "__main__":
    main()
