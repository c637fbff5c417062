"""A data set by the Python package: data.py FROM TO copies digits into another file, with an array and a number each."""

import sys

import baton
import numpy as np

source, target = sys.argv[1:]
digits = baton.BetonDataset(source)
rows = ({"image": image, "label": label, "mean": image.mean((0, 1)).astype(np.float32)} for image, label in digits)
print(baton.write_beton(target, rows))
