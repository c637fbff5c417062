"""Checks that the real ffcv reads the files of `baton data write` and `baton data synth`.

    .venv-ffcv/bin/python scripts/parity/ffcv_write.py target/debug/baton

runs Baton on generated images, of every supported format and pixel type, and opens the files
with ffcv 1.0.2 (the environment of scripts/ffcv/setup.sh). Prints a line per case; exits with 1 at
the first difference. About a minute, most of it ffcv's compilation.

What is compared, bit by bit:
- the order of images and their labels with torchvision's ImageFolder (its rule is repeated here);
- raw images with Pillow's `convert("RGB")`, reduced ones with ffcv's own resize (OpenCV) of that;
- JPEGs, decoded by ffcv, with what Pillow encodes from those pixels (quality 90, 4:2:0), so the
  quantised coefficients are libjpeg's; untouched ones with the source file;
- batches of ffcv.loader.Loader with those pixels;
- synthetic signals with their formula in numpy, to the last digits of f32.
Decoders of WebP and lossy formats differ between libraries, so these images are lossless.
"""

import io
import os
import pathlib
import subprocess
import sys
import tempfile

import cv2
import numpy as np
from ffcv.fields.decoders import (
    CenterCropRGBImageDecoder,
    FloatDecoder,
    IntDecoder,
    NDArrayDecoder,
    SimpleRGBImageDecoder,
)
from ffcv.libffcv import imdecode, resize_crop
from ffcv.loader import Loader, OrderOption
from ffcv.reader import Reader
from PIL import Image

EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp", ".gif")
# ffcv's minimum, for small files.
PAGE_BYTES = 2 << 20
RNG = np.random.default_rng(1)


def pixels(width, height):
    """A smooth picture with some noise: u8 (height, width, 3)."""
    y, x = np.mgrid[0:height, 0:width]
    smooth = np.stack([x * 3 + y, y * 2, (x + y) // 2], -1) % 256
    return np.clip(smooth + RNG.integers(-10, 10, smooth.shape), 0, 255).astype(np.uint8)


def picture(width=80, height=90):
    return Image.fromarray(pixels(width, height))


def make_folder(root):
    """Three classes whose names test the sort order, and files of every kind."""
    for folder in ["b", "A/sub", "A/sub-x", "A-x"]:
        (root / folder).mkdir(parents=True)
    for folder in ["b", "A", "A/sub", "A/sub-x", "A-x"]:
        for number in range(8):
            width, height = RNG.integers(30, 400, 2)
            picture(width, height).save(root / folder / f"{number:02d}.jpg", quality=92)
    (root / "A/notes.txt").write_text("no image")
    picture().save(root / "A/large.PNG")
    picture().convert("L").save(root / "A/grey.png")
    picture().convert("LA").save(root / "A/grey-alpha.png")
    picture().convert("1").save(root / "A/one-bit.png")
    picture().convert("RGBA").save(root / "A/alpha.png")
    picture().quantize(50).save(root / "A/palette.png")
    grey16 = (np.arange(80 * 60).reshape(60, 80) % 256).astype(np.uint16)
    Image.fromarray(grey16).save(root / "A/grey16.png")
    cv2.imwrite(str(root / "A/rgb16.png"), RNG.integers(0, 1 << 16, (40, 50, 3)).astype(np.uint16))
    picture().convert("CMYK").save(root / "A/cmyk.jpeg", quality=95)
    picture().convert("L").save(root / "A/grey.jpg")
    picture().save(root / "A/progressive.jpg", progressive=True)
    picture().save(root / "A/full-chroma.jpg", subsampling=0)
    picture().save(root / "A/x.bmp")
    picture().save(root / "A/x.ppm")
    picture().save(root / "A/x.tiff")
    picture().save(root / "A/x.webp", lossless=True)
    picture().quantize(200).save(root / "A/x.gif")
    picture(700, 20).save(root / "A/wide.png")


def image_folder(root):
    """(path, label) of each image as torchvision's ImageFolder orders them."""
    classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
    samples = []
    for label, name in enumerate(classes):
        for folder, _, files in sorted(os.walk(root / name, followlinks=True)):
            paths = [os.path.join(folder, file) for file in sorted(files)]
            samples += [(path, label) for path in paths if path.lower().endswith(EXTENSIONS)]
    return samples, classes


def resized(image, width, height):
    out = np.zeros((height, width, 3), np.uint8)
    resize_crop(np.ascontiguousarray(image), 0, image.shape[0], 0, image.shape[1], out)
    return out


def stored(path, most):
    """The expected stored pixels of an image file: Pillow's pixels, ffcv's reduction."""
    image = np.asarray(Image.open(path).convert("RGB"))
    height, width = image.shape[:2]
    if most and max(width, height) > most:
        ratio = most / max(width, height)
        image = resized(image, max(1, int(ratio * width)), max(1, int(ratio * height)))
    return image


def decoded(jpeg, width, height):
    out = np.zeros((height, width, 3), np.uint8)
    imdecode(np.frombuffer(jpeg, np.uint8), out, height, width, height, width, 0, 0, 1, 1, False, False)
    return out


def encoded_by_pillow(image):
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "JPEG", quality=90, subsampling="4:2:0")
    return buffer.getvalue()


def images(path, image="image", label="label"):
    """Mode, width, height, stored bytes and label of each sample, read by ffcv."""
    reader = Reader(str(path))
    assert reader.field_names == [image, label], reader.field_names
    sizes = {(int(row["sample_id"]), int(row["ptr"])): int(row["size"]) for row in reader.alloc_table}
    assert len(sizes) == len(reader.alloc_table)
    file = np.memmap(path, np.uint8, "r")
    for sample, row in enumerate(reader.metadata):
        cell, number = row["f0"], row["f1"]
        start = int(cell["data_ptr"])
        data = bytes(file[start : start + sizes[sample, start]])
        first, last = start // PAGE_BYTES, (start + len(data) - 1) // PAGE_BYTES
        assert first == last, f"sample {sample} crosses pages"
        # The row's u16 would overflow in sums.
        yield int(cell["mode"]), int(cell["width"]), int(cell["height"]), data, int(number)


class Case:
    def __init__(self, baton, work):
        self.baton, self.work = baton, work

    def write(self, source, name, *flags):
        target = self.work / f"{name}.beton"
        command = [self.baton, "data", "write", "--from", source, "--to", target]
        command += ["--page-size", PAGE_BYTES, *flags]
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return target

    def check(self, name, path, samples, most=None, modes=(0, 1), untouched=False, **names):
        """Compares a file with the samples it should have."""
        count = {0: 0, 1: 0}
        got = list(images(path, **names))
        assert len(got) == len(samples), (len(got), len(samples))
        for (mode, width, height, data, label), (source, expected_label) in zip(got, samples):
            expected = stored(source, most)
            where = f"{name}: {source}"
            assert label == expected_label, where
            assert (height, width) == expected.shape[:2], where
            if mode == 1:
                assert data == expected.tobytes(), where
            elif untouched and data == pathlib.Path(source).read_bytes():
                count["untouched"] = count.get("untouched", 0) + 1
            else:
                by_pillow = decoded(encoded_by_pillow(expected), width, height)
                assert (decoded(data, width, height) == by_pillow).all(), where
            count[mode] += 1
        assert {mode for mode in (0, 1) if count[mode]} == set(modes), (name, count)
        more = f", {count['untouched']} untouched" if untouched else ""
        print(f"ok  {name}: {count[0]} JPEG{more}, {count[1]} raw")
        return got

    def load(self, name, path, got, decoder, view):
        """Compares the loader's batches with the same images seen through `view`."""
        loader = Loader(
            str(path),
            batch_size=7,
            num_workers=1,
            order=OrderOption.SEQUENTIAL,
            drop_last=False,
            pipelines={"image": [decoder], "label": [IntDecoder()]},
        )
        batches = [(x.copy(), y.copy()) for x, y in loader]
        x, y = (np.concatenate(parts) for parts in zip(*batches))
        assert len(x) == len(got)
        for image, label, (mode, width, height, data, expected_label) in zip(x, y[:, 0], got):
            raw = np.frombuffer(data, np.uint8).reshape(height, width, 3) if mode else None
            expected = view(raw if mode else decoded(data, width, height))
            assert (image == expected).all() and label == expected_label, name
        print(f"ok  {name}: {len(x)} samples through ffcv.loader.Loader")


def centre(image):
    """ffcv's CenterCropRGBImageDecoder((64, 64), ratio 1)."""
    side = min(image.shape[:2])
    top, left = (image.shape[0] - side) // 2, (image.shape[1] - side) // 2
    return resized(image[top : top + side, left : left + side], 64, 64)


def philox4x32(counter, key):
    """Salmon et al. 2011: ten rounds on four columns of 32 bits."""
    mask = (1 << 32) - 1
    for _ in range(10):
        first, second = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [second >> 32 ^ counter[1] ^ key[0], second & mask, first >> 32 ^ counter[3] ^ key[1], first & mask]
        key = [(key[0] + 0x9E3779B9) & mask, (key[1] + 0xBB67AE85) & mask]
    return counter


def uniforms(seed, part, sample, count):
    """Baton's random numbers for a synthetic signal: see crates/data/src/random.rs."""
    numbers = []
    for block in range((count + 1) // 2):
        a, b, c, d = philox4x32([(17 << 24) + block, part, sample, 0], [seed, 0])
        numbers += [((high << 32 | low) >> 11) / 2**53 for low, high in [(a, b), (c, d)]]
    return numbers


def signal(seed, part, sample, channels, window, noise):
    """A synthetic signal and its target: the formula of crates/data/src/synth.rs."""
    numbers = iter(uniforms(seed, part, sample, 2 + channels * (4 + 2 * window)))

    def between(low, high):
        return low + (high - low) * next(numbers)

    target, damping = between(0, 1), between(0, 3)
    time = np.arange(window) / window
    rows = []
    for _ in range(channels):
        amplitude, phase = between(0.5, 2), between(0, 2 * np.pi)
        offset, drift = between(-1, 1), between(-2, 2)
        x = amplitude * np.exp(-damping * time) * np.sin(2 * np.pi * (2 + 10 * target) * time + phase)
        draws = np.array([next(numbers) for _ in range(2 * window)]).reshape(window, 2)
        normal = np.sqrt(-2 * np.log(1 - draws[:, 0])) * np.cos(2 * np.pi * draws[:, 1])
        rows.append(x + offset + drift * (time - 0.5) + noise * normal)
    return np.array(rows), target


def check_signals(baton, work):
    """Reads synthetic signals with ffcv and compares them with the formula."""
    seed, channels, window, noise = 5, 2, 50, 0.25
    flags = {
        "--out": work,
        "--samples": 20,
        "--val-samples": 11,
        "--seed": seed,
        "--channels": channels,
        "--window": window,
        "--noise": noise,
    }
    command = [baton, "data", "synth", "signals", *(part for flag in flags.items() for part in flag)]
    subprocess.run([str(part) for part in command], check=True, capture_output=True)
    for part, (name, samples) in enumerate([("train", 20), ("val", 11)]):
        pipelines = {"signal": [NDArrayDecoder()], "target": [FloatDecoder()]}
        loader = Loader(
            str(work / f"signals-{name}.beton"),
            batch_size=7,
            num_workers=1,
            order=OrderOption.SEQUENTIAL,
            drop_last=False,
            pipelines=pipelines,
        )
        batches = [(x.copy(), y.copy()) for x, y in loader]
        x, y = (np.concatenate(parts) for parts in zip(*batches))
        assert x.shape == (samples, channels, window) and x.dtype == np.float32, x.shape
        for sample in range(samples):
            expected, target = signal(seed, part, sample, channels, window, noise)
            assert np.allclose(x[sample], expected, rtol=1e-6, atol=1e-6), (name, sample)
            assert y[sample, 0] == target, (name, sample)
    print("ok  signals: 31 samples through ffcv.loader.Loader")


def main(baton):
    with tempfile.TemporaryDirectory() as work:
        work = pathlib.Path(work)
        case = Case(os.path.abspath(baton), work)
        folder = work / "images"
        make_folder(folder)
        samples, classes = image_folder(folder)

        path = case.write(folder, "raw", "--jpeg-fraction", 0)
        got = case.check("raw", path, samples, modes=[1])
        case.load("raw", path, got, CenterCropRGBImageDecoder((64, 64), 1.0), centre)
        assert pathlib.Path(f"{path}.classes.txt").read_text().split() == classes

        case.check("jpeg", case.write(folder, "jpeg"), samples, modes=[0])

        path = case.write(
            folder, "mixed", "--jpeg-fraction", 0.5, "--image-field", "sixteen_letters_", "--label-field", "y"
        )
        case.check("mixed", path, samples, image="sixteen_letters_", label="y")

        path = case.write(folder, "smart", "--smart-threshold", 60_000)
        for mode, width, height, _, _ in case.check("smart", path, samples):
            assert (mode == 0) == (3 * width * height > 60_000)

        for most in [64, 150]:
            flags = ["--max-resolution", most, "--jpeg-fraction", 0.5]
            path = case.write(folder, f"reduced-{most}", *flags)
            got = case.check(f"reduced to {most}", path, samples, most)
        case.load("reduced", path, got, CenterCropRGBImageDecoder((64, 64), 1.0), centre)

        path = case.write(folder, "kept", "--keep-jpeg", "--max-resolution", 300)
        case.check("kept", path, samples, 300, modes=[0], untouched=True)

        case.write(folder, "sharded", "--shards", 5, "--jpeg-fraction", 0.5)
        parts = [work / f"sharded-{shard:05}-of-00005.beton" for shard in range(5)]
        starts = [len(samples) * shard // 5 for shard in range(6)]
        for shard, part in enumerate(parts):
            case.check(f"shard {shard}", part, samples[starts[shard] : starts[shard + 1]])

        (work / "bad.jpg").write_bytes((folder / "b/00.jpg").read_bytes()[:2_000])
        rows = [*samples[:3], (str(work / "bad.jpg"), 7), (str(work / "missing.png"), 8), *samples[3:9]]
        (work / "list.tsv").write_text("".join(f"{path}\t{label}\n" for path, label in rows))
        path = case.write(work / "list.tsv", "skipped", "--on-bad-image", "skip", "--jpeg-fraction", 0)
        case.check("two bad images skipped", path, samples[:9], modes=[1])

        (work / "one.csv").write_text("images/b/03.jpg,-5\n")
        path = case.write(work / "one.csv", "one", "--jpeg-fraction", 0)
        case.check("one sample", path, [(folder / "b/03.jpg", -5)], modes=[1])

        same = work / "same"
        (same / "only").mkdir(parents=True)
        for number in range(30):
            picture(96, 64).save(same / "only" / f"{number:02}.png")
        path = case.write(same, "same", "--jpeg-fraction", 0.5)
        got = case.check("one size", path, image_folder(same)[0])
        case.load("one size", path, got, SimpleRGBImageDecoder(), lambda image: image)

        check_signals(case.baton, work)


if __name__ == "__main__":
    main(sys.argv[1])
