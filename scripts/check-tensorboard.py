#!/usr/bin/env python3
"""Reads a folder of event files like TensorBoard, and checks the properties of Baton's series; part of `make test`.

PYTHONPATH=.tools/python scripts/check-tensorboard.py RUN/tensorboard
"""

import itertools
import math
import sys
from pathlib import Path

from tensorboard.backend.event_processing import event_accumulator, plugin_event_accumulator
from tensorboard.util import tensor_util

PREFIXES = ("train/", "val/", "val_ema/", "val_subset/", "val_subset_ema/", "run/generation")


def series(folder: str) -> dict[str, list[tuple[int, float]]]:
    """All scalars, from TensorBoard's public reader."""
    reader = event_accumulator.EventAccumulator(folder, size_guidance={event_accumulator.SCALARS: 0})
    reader.Reload()
    return {tag: [(e.step, e.value) for e in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


def series_of_the_page(folder: str) -> dict[str, list[tuple[int, float]]]:
    """All scalars, from the reader of TensorBoard's page."""
    reader = plugin_event_accumulator.EventAccumulator(folder, size_guidance={plugin_event_accumulator.TENSORS: 0})
    reader.Reload()
    tags = reader.PluginTagToContent("scalars")
    value = lambda event: float(tensor_util.make_ndarray(event.tensor_proto))
    return {tag: [(event.step, value(event)) for event in reader.Tensors(tag)] for tag in tags}


def texts_of_the_page(folder: str) -> dict[str, tuple[int, list[str]]]:
    """The last texts with each tag, and their step, as TensorBoard's page of texts reads them."""
    reader = plugin_event_accumulator.EventAccumulator(folder)
    reader.Reload()
    plugins = reader.summary_metadata
    tags = [tag for tag in reader.Tags()["tensors"] if plugins[tag].plugin_data.plugin_name == "text"]
    last = {tag: reader.Tensors(tag)[-1] for tag in tags}
    decoded = lambda event: [text.decode() for text in tensor_util.make_ndarray(event.tensor_proto)]
    return {tag: (event.step, decoded(event)) for tag, event in last.items()}


def same(left: list[tuple[int, float]], right: list[tuple[int, float]]) -> bool:
    """Whether both are equal; NaN is equal to NaN here."""
    return len(left) == len(right) and all(
        a[0] == b[0] and (a[1] == b[1] or (math.isnan(a[1]) and math.isnan(b[1]))) for a, b in zip(left, right)
    )


def problems(found: dict[str, list[tuple[int, float]]], page: dict[str, list[tuple[int, float]]]):
    """Yields one line per error."""
    if not found:
        yield "no series"
    if found.keys() != page.keys():
        yield f"the page has other series: {sorted(found.keys() ^ page.keys())}"
    for tag, points in found.items():
        steps = [step for step, _ in points]
        if not tag.startswith(PREFIXES):
            yield f"{tag}: unknown tag"
        # A generation may begin at the same step as the previous one.
        if tag != "run/generation" and any(a >= b for a, b in itertools.pairwise(steps)):
            yield f"{tag}: steps do not increase; rolled-back points may not have been purged"
        if not same(points, page.get(tag, [])):
            yield f"{tag}: the page has other points"


def main() -> int:
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        print(f"usage: {sys.argv[0]} FOLDER", file=sys.stderr)
        return 2
    found, page = series(sys.argv[1]), series_of_the_page(sys.argv[1])
    for tag, points in sorted(found.items()):
        (first, _), (last, value) = points[0], points[-1]
        print(f"{tag:26} {len(points):5} points, steps {first} to {last}, last {value:.6g}")
    for tag, (step, texts) in sorted(texts_of_the_page(sys.argv[1]).items()):
        print(f"{tag}: at step {step} {texts}")
    wrong = list(problems(found, page))
    for line in wrong:
        print(f"error: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
