"""JPEGs of .beton files, which need Pillow, and a DataLoader that reads them."""

import baton
import numpy as np
import torch
from ffcv_files import value_of, written_by_ffcv


def smooth(height, width):
    """An image that JPEG changes little."""
    x, y = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    return np.stack([x, y, (x + y) / 2], axis=-1).astype(np.uint8)


def test_jpegs_that_ffcv_wrote_have_the_pixels_of_an_accurate_decoder(tmp_path):
    dataset, samples = written_by_ffcv(tmp_path, "b_jpg90")
    for number, sample in enumerate(samples):
        expected = sample["fields"]["image"]
        found = value_of(dataset, number, "image")
        assert found.shape == (expected["height"], expected["width"], 3)
        assert np.abs(found.mean(axis=(0, 1)) - expected["rgb_mean_islow"]).max() < 0.1


def test_a_data_loader_with_workers_reads_jpegs(tmp_path):
    path = tmp_path / "set.beton"
    images = [smooth(32, 48) // (1 + number) for number in range(8)]
    assert baton.write_beton(path, [(image, n) for n, image in enumerate(images)], jpeg_quality=95) == 8
    dataset = baton.BetonDataset(path)
    assert sum(dataset._allocations["size"]) < sum(image.nbytes for image in images) / 4
    loader = torch.utils.data.DataLoader(dataset, batch_size=4, num_workers=2)
    batches = list(loader)
    assert torch.cat([label for _, label in batches]).tolist() == list(range(8))
    found = torch.cat([image for image, _ in batches]).numpy()
    assert found.shape == (8, 32, 48, 3) and np.abs(found.astype(int) - np.stack(images)).mean() < 2
