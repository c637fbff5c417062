"""Compares Baton's training step with PyTorch's on a GPU; see bench.sh for the options.

Each run starts new processes, the sides alternate, and ratios are of medians over the rounds: above 1 Baton is faster.
Nothing here imports PyTorch.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

HERE = Path(__file__).absolute().parent
# Steps that neither side measures: libraries choose algorithms, and a compiled step is compiled.
WARM_UP = 10
# Duration of the run in which idle time is measured, and the sample interval.
IDLE_SECONDS = 20
IDLE_SAMPLE_MS = 100
# Share of that run, at its end, that is evaluated; the time before is the start.
IDLE_SHARE = 0.6


def say(text):
    print(f"gpu-bench: {text}", file=sys.stderr, flush=True)


def fail(text):
    sys.exit(f"gpu-bench: {text}")


class Bench:
    def __init__(self, options):
        self.options = options
        self.results = options.worker.parent / "gpu-bench"
        self.results.mkdir(exist_ok=True)
        self.seen = {}

    def run(self, name, command, may_fail=False):
        """Runs one side and returns its results, or None if it failed and `may_fail` is set."""
        log = self.results / f"{name}.log"
        with log.open("w", encoding="utf-8") as errors:
            found = subprocess.run(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        (self.results / f"{name}.json").write_text(found.stdout, encoding="utf-8")
        lines = found.stdout.strip().splitlines()
        if found.returncode != 0 or not lines:
            tail = "".join(log.read_text(encoding="utf-8").splitlines(keepends=True)[-15:])
            problem = f"{name} failed with status {found.returncode}; the end of {log}:\n{tail}command: {command}"
            if not may_fail:
                fail(problem)
            say(problem)
            return None
        return json.loads(lines[-1])

    def measure(self, side_name, side, number, command, may_fail=False):
        name = f"{side_name}-{side}"
        found = self.run(f"{name}-{number}", command, may_fail)
        if found is None:
            return
        # Baton also reports a median of steps with a wait after each; PyTorch's side does not wait.
        found["step_seconds"] = found.get("mean_step_seconds", found["step_seconds"])
        self.seen.setdefault(name, []).append(found)
        say(f"round {number}: {name}: {found['step_seconds'] * 1e3:.2f} ms a step")

    def baton(self, side, steps, *more, determinism="fast"):
        options = self.options
        command = [str(options.worker), "bench", "--device", options.device, "--arch", options.arch, "--json"]
        command += ["--resolution", str(side), "--batch", str(options.batch), "--steps", str(steps)]
        command += ["--warm-up", str(WARM_UP), "--set", f"precision.compute={options.compute}"]
        # As on PyTorch's side, libraries may choose algorithms by trying them.
        return [*command, "--set", f"precision.determinism={determinism}", *more]

    def torch(self, side, *more):
        options = self.options
        command = [sys.executable, str(HERE / "torch_side.py"), "--device", options.device, "--arch", options.arch]
        command += ["--side", str(side), "--batch", str(options.batch), "--steps", str(options.steps)]
        command += ["--warm-up", str(WARM_UP)]
        return [*command, "--compute", options.compute, *more]

    def medians(self, name, key):
        values = [found[key] for found in self.seen[name]]
        if any(value is None for value in values):
            return None
        return statistics.median(values)

    def ratio(self, side, peer, ours="baton"):
        """PyTorch's time divided by Baton's; None if one of them is missing."""
        if f"{peer}-{side}" not in self.seen or f"{ours}-{side}" not in self.seen:
            return None
        ratio = self.medians(f"{peer}-{side}", "step_seconds") / self.medians(f"{ours}-{side}", "step_seconds")
        return round(ratio, 3)

    def idle_percent(self, side):
        """Percent of the time in the middle of training without a running kernel, sampled by the driver; None on a CPU."""
        if self.options.device != "cuda":
            return None
        # The first GPU that is visible to this process, which the bench uses.
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        query = ["nvidia-smi", f"--id={visible}", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
        try:
            watch = subprocess.Popen([*query, f"-lms={IDLE_SAMPLE_MS}"], stdout=subprocess.PIPE, text=True)
        except OSError as error:
            say(f"the idle share is not measured: {error}")
            return None
        samples = []

        def note():
            for line in watch.stdout:
                samples.append((time.monotonic(), line.strip()))

        reader = threading.Thread(target=note, daemon=True)
        reader.start()
        step_seconds = self.medians(f"baton-{side}", "step_seconds")
        steps = max(10, math.ceil(IDLE_SECONDS / step_seconds))
        self.run(f"idle-{side}", self.baton(side, steps), may_fail=True)
        end = time.monotonic()
        watch.kill()
        watch.wait()
        reader.join()
        begin = end - IDLE_SHARE * steps * step_seconds
        # In the last second the process shuts down.
        busy = [int(text) for at, text in samples if begin <= at <= end - 1.0 and text.isdigit()]
        if not busy:
            say(f"the idle share is not measured: nvidia-smi printed {[text for _, text in samples[-3:]]}")
            return None
        return 100.0 - statistics.mean(busy)


def positive(text):
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def arguments():
    parser = argparse.ArgumentParser(prog="bench.sh", description=__doc__.partition("\n")[0])
    parser.add_argument("--worker", type=Path, required=True, help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--sides", default="160,192,224")
    parser.add_argument("--batch", type=positive, default=256)
    parser.add_argument("--steps", type=positive, default=40)
    parser.add_argument("--compute", choices=["bf16", "fp16", "fp32"], default="bf16")
    parser.add_argument("--arch", choices=["resnet18", "resnet50"], default="resnet50")
    parser.add_argument("--data", type=Path, default=HERE / "../../assets/digits/digits-train.beton")
    parser.add_argument("--decode-threads", type=positive, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    options = parser.parse_args()
    try:
        options.sides = [positive(side) for side in options.sides.split(",")]
    except (ValueError, argparse.ArgumentTypeError):
        parser.error(f"--sides '{options.sides}': give numbers of pixels, as 160,192,224")
    options.worker = options.worker.absolute()
    if not os.access(options.worker, os.X_OK):
        parser.error(f"no worker at '{options.worker}'; run: make gpu-programs")
    if not options.data.is_file():
        parser.error(f"no beton file at '{options.data}'; set one with --data")
    return options


def main():
    options = arguments()
    bench, last = Bench(options), options.sides[-1]
    for number in range(1, options.rounds + 1):
        for side in options.sides:
            more = ["--roofline", "--snapshot"] if side == last else []
            bench.measure("baton", side, number, bench.baton(side, options.steps, *more))
            bench.measure("eager", side, number, bench.torch(side))
        # A data set through the loader; PyTorch's images are already in memory.
        data = ["--data", str(options.data), "--decode-threads", str(options.decode_threads)]
        bench.measure("baton_real", last, number, bench.baton(last, options.steps, *data))
        strict = bench.baton(last, options.steps, determinism="strict")
        bench.measure("baton_strict", last, number, strict)
        # Needs NVRTC, which a machine with PyTorch should have.
        fused = bench.baton(last, options.steps, "--set", "precision.fused=true")
        bench.measure("baton_fused", last, number, fused, may_fail=True)
        # Needs a C compiler, which a machine with a GPU may lack.
        bench.measure("compiled", last, number, bench.torch(last, "--compile"), may_fail=True)

    print(f"{'':16} {'ms a step':>12} {'images/s':>12}   lowest to highest ms")
    for name in sorted(bench.seen):
        times = [found["step_seconds"] for found in bench.seen[name]]
        middle = statistics.median(times)
        spread = f"{min(times) * 1e3:.2f} to {max(times) * 1e3:.2f}"
        print(f"{name:16} {middle * 1e3:12.2f} {options.batch / middle:12.1f}   {spread}")
    newest = bench.seen[f"baton-{last}"][-1]
    print(f"at best, as measured: {json.dumps(newest['peaks'])}", flush=True)
    idle = bench.idle_percent(last)
    result = {"device": bench.seen[f"eager-{last}"][-1]["device"]}
    for side in options.sides:
        result[f"eager_ratio_{side}"] = bench.ratio(side, "eager")
    result[f"real_input_ratio_{last}"] = bench.ratio(last, "eager", ours="baton_real")
    result[f"compile_ratio_{last}"] = bench.ratio(last, "compiled")
    # Baton with fused kernels against PyTorch without a compiler.
    result[f"fused_ratio_{last}"] = bench.ratio(last, "eager", "baton_fused")
    result[f"roofline_share_{last}"] = round(bench.medians(f"baton-{last}", "roofline_share"), 3)
    result["idle_percent"] = None if idle is None else round(idle, 2)
    result["snapshot_ms"] = round(bench.medians(f"baton-{last}", "snapshot_seconds") * 1e3, 2)
    print(f"RESULT {json.dumps(result)}")


main()
