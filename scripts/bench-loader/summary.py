"""Reads the results of run.sh and prints tables of medians, then the line `RESULT {...}`.

Fails if a figure is missing, or if Baton's memory grew from one epoch to two.
"""

import argparse
import json
import pathlib
import statistics
import sys

# Two runs differ by a few buffers that were in use at the same time.
MEMORY_GROWTH_ALLOWED = 1.05
MEMORY_GROWTH_ALLOWED_MB = 8
BUSY_LOAD = 0.7


class Results:
    """Results of the runs, by `name-round`."""

    def __init__(self, folder, rounds, warm_up):
        self.folder, self.rounds, self.warm_up = folder, rounds, warm_up

    def run(self, name):
        path = self.folder / f"{name}.json"
        try:
            return json.loads(path.read_text())
        except (OSError, ValueError) as error:
            sys.exit(f"bench-loader: {path} is not one JSON object: {error}")

    def field(self, name, key):
        """One figure of one run."""
        run = self.run(name)
        if run.get(key) is None:
            sys.exit(
                f"bench-loader: {self.folder / name}.json has no '{key}'; "
                "if baton is older than this script, run: make build"
            )
        return run[key]

    def fields(self, name, key):
        """One figure of every round."""
        return [self.field(f"{name}-{i}", key) for i in range(1, self.rounds + 1)]

    def rates(self, name):
        """Images per second of every round: the median of the epochs that count."""
        # ffcv's side omits its warm-up; Baton reports every epoch.
        skip = 0 if "ffcv" in name else self.warm_up
        counted = [epochs[skip:] for epochs in self.fields(name, "images_per_second")]
        if not all(counted):
            sys.exit(f"bench-loader: a run of {name} has no epoch after {skip} of warm-up")
        return [statistics.median(epochs) for epochs in counted]

    def rate(self, name):
        return statistics.median(self.rates(name))

    def median(self, name, key):
        return statistics.median(self.fields(name, key))


def print_table(header, rows):
    """Prints a table with aligned columns; the first is aligned to the left."""
    table = [header, *rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(header))]
    for row in table:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:])]
        print("  ".join(cells))
    print()


def speed_row(results, label, name):
    rates = results.rates(name)
    return [
        label,
        f"{statistics.median(rates):,.0f}",
        f"{min(rates):,.0f} to {max(rates):,.0f}",
        f"{results.median(name, 'cpu_seconds_per_image') * 1e6:,.0f}",
        f"{results.median(name, 'peak_rss_mb'):,.0f}",
    ]


def ratio_row(results, label, baton, ffcv):
    """Baton's images per second divided by ffcv's; and the same of CPU time, which depends less on other programs."""
    rounds = [b / f for b, f in zip(results.rates(baton), results.rates(ffcv))]
    cpu = results.median(ffcv, "cpu_seconds_per_image") / results.median(baton, "cpu_seconds_per_image")
    return [
        label,
        f"{results.rate(baton) / results.rate(ffcv):.2f}",
        f"{min(rounds):.2f} to {max(rounds):.2f}",
        f"{cpu:.2f}",
    ]


def print_stages(results):
    """Prints Baton's time in each stage of a JPEG image, from the first run, as stages have no median."""
    stages = results.run("jpeg-fast-1").get("stages") or {}
    for name, microseconds in stages.items():
        if isinstance(microseconds, (int, float)):
            print(f"  {name}: {microseconds:,.0f} µs")
    floor = results.median("jpeg-fast", "huffman_floor_images_per_second")
    share = results.rate("jpeg-fast") / floor
    print(f"  entropy decoding alone: {floor:,.0f} images/s; Baton's rate is {share:.0%} of it")
    print()


def memory_grew(results, key):
    """Prints a figure after one epoch and after two; returns whether it grew by more than the allowed noise."""
    one, two = results.field("memory-1", key), results.field("memory-2", key)
    allowed = one * MEMORY_GROWTH_ALLOWED + MEMORY_GROWTH_ALLOWED_MB
    print(f"  {key}: {one:,.1f} MB over one epoch, {two:,.1f} MB over two (allowed: {allowed:,.1f})")
    return two > allowed


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--warm-up", type=int, required=True, help="epochs of Baton's not to count")
    args = parser.parse_args()
    results = Results(args.folder, args.rounds, args.warm_up)

    load = [(args.folder / name).read_text().strip() for name in ("load_before", "load_after")]
    print(f"\nRounds: {args.rounds}. Load average before and after: {' and '.join(load)}.")
    if float(load[0]) > BUSY_LOAD:
        print("The machine was busy with other work: images/s are too low, and ratios less certain.")
    print()
    print_table(
        ["one thread, one core", "images/s", "slowest to fastest run", "CPU µs/image", "peak RSS MB"],
        [
            speed_row(results, "jpeg: ffcv", "jpeg-ffcv"),
            speed_row(results, "jpeg: baton, fast", "jpeg-fast"),
            speed_row(results, "jpeg: baton, area", "jpeg-area"),
            speed_row(results, "raw: ffcv", "raw-ffcv"),
            speed_row(results, "raw: baton, fast", "raw-fast"),
        ],
    )
    print_table(
        ["baton ÷ ffcv", "images/s", "of single rounds", "per CPU second"],
        [
            ratio_row(results, "jpeg, fast", "jpeg-fast", "jpeg-ffcv"),
            ratio_row(results, "jpeg, area", "jpeg-area", "jpeg-ffcv"),
            ratio_row(results, "raw, fast", "raw-fast", "raw-ffcv"),
        ],
    )
    print("One JPEG image in Baton, fast:")
    print_stages(results)

    scaling = None
    if (args.folder / "scaling-1-1.json").exists():
        scaling = results.rate("scaling-2") / results.rate("scaling-1")
        print(f"Two threads do {scaling:.2f} times the images of one, not pinned.")
    else:
        print("Two threads against one: this machine has one core.")
    start = results.median("start-baton", "first_batch_ms")
    start_ffcv = results.median("start-ffcv", "first_batch_ms")
    print(f"First batch of 1,281,167 samples: baton {start:,.0f} ms, ffcv {start_ffcv:,.0f} ms.")
    print("Baton's memory, 100,000 samples:")
    grew = [memory_grew(results, key) for key in ("peak_rss_mb", "peak_anonymous_rss_mb")]
    if any(grew):
        print("FAILED: Baton's memory grows with the epochs.")

    figures = {
        "jpeg_ratio": results.rate("jpeg-fast") / results.rate("jpeg-ffcv"),
        "raw_ratio": results.rate("raw-fast") / results.rate("raw-ffcv"),
        "area_mode_jpeg_ratio": results.rate("jpeg-area") / results.rate("jpeg-ffcv"),
        "rss_mb": results.field("memory-2", "peak_rss_mb"),
        "epoch_start_ms": start,
        "scaling_2": scaling,
    }
    rounded = {key: value if value is None else round(value, 3) for key, value in figures.items()}
    print(f"\nRESULT {json.dumps(rounded)}")
    sys.exit(1 if any(grew) else 0)


if __name__ == "__main__":
    main()
