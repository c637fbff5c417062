"""Sums the kernels of a file of `ncu --csv` by name: how often, milliseconds, bytes of device memory, the rate.

kernels.py FILE
"""

import csv
import re
import sys
from collections import defaultdict

UNITS = {
    "byte": 1,
    "Kbyte": 1e3,
    "Mbyte": 1e6,
    "Gbyte": 1e9,
    "ns": 1,
    "us": 1e3,
    "ms": 1e6,
    "nsecond": 1,
    "usecond": 1e3,
}


def short(name):
    """A kernel's name without its template arguments."""
    while (shorter := re.sub(r"<[^<>]*>|\([^()]*\)", "", name)) != name:
        name = shorter
    return name.split("::")[-1].split()[-1][:70]


def main():
    with open(sys.argv[1], encoding="utf-8") as file:
        lines = file.readlines()
    begin = next((number for number, line in enumerate(lines) if line.startswith('"ID"')), None)
    if begin is None:
        sys.exit(f"{sys.argv[1]} has no table of ncu: its output was {''.join(lines)[-300:]!r}")
    counts, times, moved, launches = defaultdict(set), defaultdict(float), defaultdict(float), set()
    for row in csv.DictReader(lines[begin:]):
        if row["Metric Unit"] not in UNITS:
            continue
        name = short(row["Kernel Name"])
        value = float(row["Metric Value"].replace(",", "")) * UNITS[row["Metric Unit"]]
        launches.add(row["ID"])
        counts[name].add(row["ID"])
        (moved if row["Metric Name"].startswith("dram") else times)[name] += value
    print(f"{len(launches)} launches, {sum(times.values()) / 1e6:.2f} ms")
    for name in sorted(times, key=times.get, reverse=True):
        rate = moved[name] / times[name] if times[name] else 0
        print(f"{times[name] / 1e6:8.3f} ms {len(counts[name]):5} {moved[name] / 1e9:8.3f} GB {rate:7.0f} GB/s  {name}")


if __name__ == "__main__":
    main()
