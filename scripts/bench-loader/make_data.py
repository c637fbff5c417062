"""Creates the files of the loader bench in a folder; complete files are kept.

    jpeg.beton   photo-like pictures as JPEG q90, the longer side 500 px, as ImageNet is often stored
    raw.beton    the same pictures as raw pixels, the longer side 256 px
    many.beton   100,000 small raw images of noise, 0.9 GB: does memory grow with the file?
    huge.beton   1,281,167 tiny raw images, ImageNet's count: how long until the first batch?

ffcv's writer writes the first two; the last two are written directly, as the writer would need a Python call per sample.
All data are generated from a fixed seed. Run it with .venv-ffcv's Python.
"""

import argparse
import hashlib
import os
import pathlib
import sys
import time

os.environ["CUDA_VISIBLE_DEVICES"] = ""

import cv2
import numpy as np

SEED = 20261121
JPEG_SIDE = 500
RAW_SIDE = 256
MANY_SAMPLES = 100_000
MANY_SHAPE = (48, 64)  # height, width
HUGE_SAMPLES = 1_281_167
HUGE_SHAPE = (8, 8)
CLASSES = 1000
PAGE_BYTES = 8 << 20  # ffcv's default

# Width, height and how many of a hundred pictures: ImageNet's usual shapes at a longer side of 500.
SHAPES = [
    (500, 375, 52),
    (500, 333, 18),
    (375, 500, 13),
    (333, 500, 6),
    (500, 400, 3),
    (500, 500, 3),
    (500, 281, 3),
    (400, 500, 2),
]


class Pictures:
    """Photo-like pictures by index: smooth light, shapes with edges, textures that fall off as 1/f.

    Natural images have the 1/f spectrum; regions of differing contrast and a little sensor noise
    give JPEG sizes that vary as photographs' do.
    """

    SHEET = 1024
    SHEETS = 6

    def __init__(self, count):
        self.count = count
        random = np.random.default_rng(SEED)
        self.sheets = [self._one_over_f(random) for _ in range(self.SHEETS)]

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        """The picture and its label, for ffcv's writer."""
        return self.picture(index), index % CLASSES

    def _one_over_f(self, random):
        """A square of noise whose amplitude falls as 1/frequency, with deviation 1."""
        frequency = np.hypot(np.fft.fftfreq(self.SHEET)[:, None], np.fft.rfftfreq(self.SHEET)[None, :])
        frequency[0, 0] = np.inf
        noise = np.fft.rfft2(random.standard_normal((self.SHEET, self.SHEET))) / frequency
        texture = np.fft.irfft2(noise)
        return (texture / texture.std()).astype(np.float32)

    def _texture(self, random, width, height):
        """A window of one of the sheets, turned or mirrored."""
        sheet = self.sheets[random.integers(self.SHEETS)]
        top = random.integers(self.SHEET - height + 1)
        left = random.integers(self.SHEET - width + 1)
        window = sheet[top : top + height, left : left + width]
        return window[:: random.choice([-1, 1]), :: random.choice([-1, 1])]

    def _shape_mask(self, random, width, height):
        """An ellipse or a polygon with soft or sharp edges, as weights in 0..1."""
        mask = np.zeros((height, width), np.uint8)
        centre = (int(random.integers(width)), int(random.integers(height)))
        if random.random() < 0.5:
            axes = tuple(int(a) for a in random.integers(15, 160, 2))
            cv2.ellipse(mask, centre, axes, random.uniform(0, 180), 0, 360, 255, -1, cv2.LINE_AA)
        else:
            corners = np.array(centre) + random.integers(-160, 160, (random.integers(3, 7), 2))
            cv2.fillPoly(mask, [corners.astype(np.int32)], 255, cv2.LINE_AA)
        if random.random() < 0.4:
            mask = cv2.GaussianBlur(mask, (0, 0), random.uniform(1, 6))
        return mask.astype(np.float32)[..., None] / 255

    def _surface(self, random, width, height):
        """One material: a colour under uneven light, with a texture of random strength."""
        colour = random.uniform(30, 220, 3).astype(np.float32)
        across = np.linspace(-1, 1, width, dtype=np.float32)[None, :]
        down = np.linspace(-1, 1, height, dtype=np.float32)[:, None]
        light = random.uniform(-35, 35) * across + random.uniform(-35, 35) * down
        light = light + random.gamma(2.0, 8.0) * self._texture(random, width, height)
        tint = random.uniform(2, 10) * self._texture(random, width, height)
        balance = random.uniform(-1, 1, 3).astype(np.float32)
        return colour + light[..., None] + tint[..., None] * balance

    def picture(self, index):
        random = np.random.default_rng([SEED, index])
        share = np.array([share for _, _, share in SHAPES])
        width, height, _ = SHAPES[random.choice(len(SHAPES), p=share / share.sum())]
        image = self._surface(random, width, height)
        for _ in range(random.integers(3, 10)):
            mask = self._shape_mask(random, width, height)
            image += mask * (self._surface(random, width, height) - image)
        grain = random.standard_normal((height, width, 1), np.float32)
        image += random.uniform(0.5, 3.0) * grain
        return np.clip(image, 0, 255).astype(np.uint8)


def write_pictures(path, pictures, **field):
    """By ffcv's writer. One process, so that the file is the same each time."""
    from ffcv.fields import IntField, RGBImageField
    from ffcv.writer import DatasetWriter

    fields = {"image": RGBImageField(**field), "label": IntField()}
    writer = DatasetWriter(str(path), fields, page_size=PAGE_BYTES, num_workers=1)
    writer.from_indexed_dataset(pictures)


def write_noise(path, samples, shape):
    """Writes raw images of noise with labels in FFCV's format, a page at a time.

    Header, two field descriptors, a metadata row per sample, pages, allocation table: FORMAT in
    ffcv's terms. A page has as many whole images as fit, as in ffcv's writer.
    """
    height, width = shape
    image_bytes = 3 * height * width
    row = np.dtype(
        {
            "names": ["mode", "width", "height", "pointer", "label"],
            "formats": ["u1", "<u2", "<u2", "<u8", "<i8"],
            "offsets": [0, 1, 3, 5, 16],
            "itemsize": 24,
        }
    )
    allocation = np.dtype([("sample", "<u8"), ("pointer", "<u8"), ("size", "<u8")])
    rgb_image, integer, raw_mode = 2, 1, 1

    per_page = PAGE_BYTES // image_bytes
    pages = -(-samples // per_page)
    descriptors = b"".join(
        bytes([kind]) + name.ljust(16, b"\0") + bytes(1024)
        for kind, name in [(rgb_image, b"image"), (integer, b"label")]
    )
    metadata_end = 24 + len(descriptors) + samples * row.itemsize
    data_start = -(-metadata_end // PAGE_BYTES) * PAGE_BYTES

    index = np.arange(samples)
    rows = np.zeros(samples, row)
    rows["mode"], rows["width"], rows["height"] = raw_mode, width, height
    rows["pointer"] = data_start + index // per_page * PAGE_BYTES + index % per_page * image_bytes
    rows["label"] = index % CLASSES
    allocations = np.empty(samples, allocation)
    allocations["sample"], allocations["size"] = index, image_bytes
    allocations["pointer"] = rows["pointer"]

    header = np.zeros((), np.dtype("<u2, <u2, <u4, <u8, <u8"))
    header[()] = (2, 2, PAGE_BYTES, samples, data_start + pages * PAGE_BYTES)
    random = np.random.default_rng(SEED)
    with open(path, "wb") as file:
        file.write(header.tobytes() + descriptors)
        file.write(rows.tobytes())
        file.write(bytes(data_start - metadata_end))
        for _ in range(pages):
            file.write(random.bytes(PAGE_BYTES))
        file.write(allocations.tobytes())


def report(path):
    """A line about the file, and the mean bytes of a stored image, by its allocation table."""
    header = np.fromfile(path, "<u8", 3)
    samples, table = int(header[1]), int(header[2])
    sizes = np.fromfile(path, "<u8", offset=table).reshape(-1, 3)[:, 2]
    print(
        f"make_data: {path.name}: {samples:,} samples, {path.stat().st_size / 1e6:,.0f} MB, "
        f"{sizes.mean() / 1e3:,.1f} KB an image (10 % below {np.percentile(sizes, 10) / 1e3:,.1f}, "
        f"10 % above {np.percentile(sizes, 90) / 1e3:,.1f})",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--samples", type=int, default=2000, help="pictures in jpeg and raw")
    parser.add_argument("--only", help="one file, without its ending: jpeg, raw, many or huge")
    args = parser.parse_args()

    pictures = Pictures(args.samples)
    makers = {
        "jpeg": lambda path: write_pictures(
            path, pictures, write_mode="jpg", jpeg_quality=90, max_resolution=JPEG_SIDE
        ),
        "raw": lambda path: write_pictures(path, pictures, write_mode="raw", max_resolution=RAW_SIDE),
        "many": lambda path: write_noise(path, MANY_SAMPLES, MANY_SHAPE),
        "huge": lambda path: write_noise(path, HUGE_SAMPLES, HUGE_SHAPE),
    }
    if args.only is not None and args.only not in makers:
        sys.exit(f"make_data: no file '{args.only}'; known: {', '.join(makers)}")

    args.folder.mkdir(parents=True, exist_ok=True)
    source = hashlib.sha256(pathlib.Path(__file__).read_bytes()).hexdigest()[:16]
    for name, make in makers.items():
        if args.only not in (None, name):
            continue
        path = args.folder / f"{name}.beton"
        stamp = args.folder / f"{name}.stamp"
        recipe = f"{source} samples={args.samples}\n"
        if path.exists() and stamp.exists() and stamp.read_text() == recipe:
            continue
        # The stamp is removed first and written last, so that an interrupted file never counts as complete.
        stamp.unlink(missing_ok=True)
        print(f"make_data: writing {path.name}", flush=True)
        begin = time.monotonic()
        make(path)
        stamp.write_text(recipe)
        report(path)
        print(f"make_data: {path.name} took {time.monotonic() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
