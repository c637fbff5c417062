"""Writes crates/data/tests/fixtures/mel.f32.gz: a signal, and its log-mel spectrograms by torchaudio, for the cases of
crates/data/src/write/mel.rs. Run it again only for another version of torchaudio or other cases:

    .venv-parity/bin/python scripts/parity/mel.py
"""

import gzip
import pathlib

import torch
from torchaudio.transforms import AmplitudeToDB, MelSpectrogram

FILE = pathlib.Path(__file__).resolve().parents[2] / "crates/data/tests/fixtures/mel.f32.gz"
SAMPLES = 1000
# Samples per second, length of the transform, hop, bands.
CASES = [(8000, 256, 100, 20), (16000, 400, 160, 64), (8000, 255, 60, 13), (11025, 512, 200, 40)]


def signal():
    """A rising tone in noise, with silence at its end."""
    generator = torch.Generator().manual_seed(0)
    seconds = torch.arange(SAMPLES) / 8000
    tone = 0.5 * torch.sin(2 * torch.pi * (300 * seconds + 8000 * seconds**2))
    noise = 0.01 * torch.randn(SAMPLES, generator=generator)
    return torch.where(torch.arange(SAMPLES) < 800, tone + noise, 0.0).to(torch.float32)


def main():
    wave = signal()
    values = [wave]
    for rate, length, hop, bands in CASES:
        mel = MelSpectrogram(sample_rate=rate, n_fft=length, hop_length=hop, n_mels=bands)
        values.append(AmplitudeToDB("power")(mel(wave)).flatten())
    data = torch.cat(values).numpy().astype("<f4").tobytes()
    with gzip.GzipFile(FILE, "wb", mtime=0) as file:
        file.write(data)


if __name__ == "__main__":
    main()
