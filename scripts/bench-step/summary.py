"""Prints the results of scripts/bench-step/run.sh: medians over the rounds, and their ratios."""

import argparse
import json
import pathlib
import statistics
import sys

# Speed relative to the better of torch's two formats, or share of torch's value.
AIMS = {
    "step64_ratio": (1.15, "at least"),
    "step128_ratio": (1.15, "at least"),
    "optimizer_ratio": (0.5, "at most"),
    "memory_ratio": (1.0, "at most"),
    # Time with sums through shared memory, as a share of the time with sums over TCP on the loopback device, at 128 px.
    "shared_memory_ratio": (1.0, "at most"),
    # Time with the all-reduce beside the backward pass, as a share of the time without, over a slow line.
    "overlap_ratio": (0.8, "at most"),
    # Time with strict sums of four ranks on three hosts with slow lines, as a share of DDP's with gloo's ring.
    "strict_ratio": (1.1, "at most"),
    # Speed of a program relative to the native network and to eager PyTorch; its memory as a share of PyTorch's.
    "program_ratio": (0.95, "at least"),
    "program_eager_ratio": (0.98, "at least"),
    "program_memory_ratio": (1.0, "at most"),
}


def median(folder, rounds, name, key):
    values = [json.loads((folder / f"{name}-{number}.json").read_text())[key] for number in range(1, rounds + 1)]
    spread = f"{min(values):.4g} to {max(values):.4g}"
    print(f"  {name:24} {key:18} {statistics.median(values):10.4f}  ({spread})")
    return statistics.median(values)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, required=True)
    arguments = parser.parse_args()

    def value(name, key):
        return median(arguments.folder, arguments.rounds, name, key)

    print("seconds per step; MiB; medians over the rounds (lowest to highest)")
    results = {}
    baton = {}
    memory = []
    for side in [64, 128]:
        baton[side] = value(f"{side}-plain-baton", "step_seconds")
        formats = [f"{side}-plain-torch_{format}" for format in ["nhwc", "nchw"]]
        best = min(formats, key=lambda name: value(name, "step_seconds"))
        results[f"step{side}_ratio"] = value(best, "step_seconds") / baton[side]
        # Memory of the faster format, which users would choose.
        memory.append(value(f"{side}-plain-baton", "peak_mib") / value(best, "peak_mib"))
    results["shared_memory_ratio"] = baton[128] / value("128-tcp-baton", "step_seconds")
    kinds = [f"64-full-torch_{kind}" for kind in ["foreach", "fused", "loop"]]
    quickest = min(value(name, "optimizer_seconds") for name in kinds)
    results["optimizer_ratio"] = value("64-full-baton", "optimizer_seconds") / quickest
    results["memory_ratio"] = max(memory)
    beside, after = (value(f"64-slow-{overlap}", "step_seconds") for overlap in ["true", "false"])
    results["overlap_ratio"] = beside / after
    print(
        f"  without an overlap, the all-reduce takes {value('64-slow-false', 'all_reduce_seconds') / after:.0%} of it"
    )
    strict, ring = (value(f"64-hosts-{side}", "step_seconds") for side in ["baton", "torch"])
    results["strict_ratio"] = strict / ring
    program = value("64-alone-program", "step_seconds")
    results["program_ratio"] = value("64-alone-native", "step_seconds") / program
    results["program_eager_ratio"] = value("64-alone-torch", "step_seconds") / program
    program, eager = (value(f"64-alone-{side}", "peak_mib") for side in ["program", "torch"])
    results["program_memory_ratio"] = program / eager

    loads = [(arguments.folder / f"load_{when}").read_text().strip() for when in ["before", "after"]]
    print(f"load average {loads[0]} before, {loads[1]} after")
    for name, (aim, bound) in AIMS.items():
        met = results[name] >= aim if bound == "at least" else results[name] <= aim
        print(f"{name}: {results[name]:.3f}, aim {bound} {aim}: {'met' if met else 'MISSED'}")
    print("RESULT " + json.dumps({name: round(ratio, 3) for name, ratio in results.items()}))


if __name__ == "__main__":
    sys.exit(main())
