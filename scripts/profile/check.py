"""Records profiles of a job, checks them with Perfetto's trace processor, and measures what recording costs.

check.py BATON FOLDER: the program, and the folder of Perfetto's user interface.
"""

import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
RANKS = 2
STEPS = 5
# Rounds of the measurement, each with as many steps recorded as not.
ROUNDS = 6
MEASURED_STEPS = 20
START_SECONDS = 120

baton, perfetto = sys.argv[1:]


def run(*arguments: str, run_dir: Path) -> str:
    """The output of a command about the job."""
    command = [baton, *arguments, "--run-dir", str(run_dir)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def query(trace: Path, *queries: str) -> list[list[dict]]:
    """The rows of each query."""
    command = ["node", str(HERE / "trace_processor.mjs"), perfetto, str(trace), *queries]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [json.loads(line) for line in output.splitlines()]


def check(trace: Path) -> None:
    """Reads a trace as Perfetto does."""
    errors, steps, nested, ops, names = query(
        trace,
        "select name, value from stats where severity = 'error' and value > 0",
        "select process.name as rank, extract_arg(slice.arg_set_id, 'args.step') as step from slice "
        "join thread_track on slice.track_id = thread_track.id join thread using (utid) "
        "join process using (upid) where slice.name = 'step' order by rank, step",
        "select parent.name as parent, count(*) as count from slice "
        "join slice parent on slice.parent_id = parent.id "
        "where slice.name in ('gradient', 'update') group by parent",
        "select count(*) as count from slice op join slice parent on op.parent_id = parent.id "
        "where op.category = 'op' and op.name like 'aten::%'",
        "select distinct thread.name as name from thread join thread_track using (utid)",
    )
    assert errors == [], f"Perfetto could not read all of it: {errors}"
    assert len(steps) == RANKS * STEPS, steps
    first = steps[0]["step"]
    for rank in range(RANKS):
        found = [row["step"] for row in steps if row["rank"].startswith(f"rank {rank} on ")]
        # A rank may begin one step later.
        assert abs(found[0] - first) <= 1, steps
        assert found == list(range(found[0], found[0] + STEPS)), steps
    assert [row["parent"] for row in nested] == ["step"], nested
    assert nested[0]["count"] == 2 * RANKS * STEPS, nested
    assert ops[0]["count"] > 1_000, ops
    threads = {row["name"] for row in names}
    assert {"main", "all-reduce", "decode-0"} <= threads, threads
    print(f"{trace.name}: {RANKS} ranks, {STEPS} steps, {ops[0]['count']} operations of PyTorch")


def step_times(run_dir: Path, seconds: float) -> tuple[float, float]:
    """Median seconds from one step to the next, before and while they are recorded; a step takes about `seconds`."""
    # Nothing else runs meanwhile.
    time.sleep(1.2 * MEASURED_STEPS * seconds)
    out = run_dir / "measured.json"
    run("profile", "--steps", str(MEASURED_STEPS), "--out", str(out), "--json", run_dir=run_dir)
    info = json.loads(out.read_text())["baton"][0]
    points = map(json.loads, run("metrics", "--json", run_dir=run_dir).splitlines())
    made = {point["step"]["step"]: point["unix_millis"] / 1e3 for point in points if point.get("step")}

    def median(steps: range) -> float:
        times = [made[step] for step in steps if step in made]
        assert len(times) > MEASURED_STEPS / 2, "the history lacks steps"
        return statistics.median(b - a for a, b in itertools.pairwise(times))

    first, last = info["first_step"], info["last_step"]
    return median(range(first - MEASURED_STEPS, first)), median(range(first, last + 1))


def latest(run_dir: Path) -> int:
    """The newest step."""
    status = json.loads(run("status", "--json", run_dir=run_dir))
    return (status["latest"] or {"step": 0})["step"]


def main() -> None:
    """Runs a job, profiles it and ends it."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        command = [baton, "up", "recipes/digits_cpu.toml", "--ranks", str(RANKS), "--run-dir", str(run_dir)]
        command += ["--listen", "127.0.0.1:0", "--set", "train.epochs=100", "--set", "train.log_every=1"]
        command += ["--set", "evaluation.every_epochs=50", "--set", "checkpoint.every_epochs=50"]
        job = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + START_SECONDS
            while not (run_dir / "coordinator.json").exists() or latest(run_dir) < 3:
                assert time.monotonic() < deadline and job.poll() is None, "the job does not train"
                time.sleep(0.2)
            out = Path(folder) / "profile.json"
            print(run("profile", "--steps", str(STEPS), "--out", str(out), run_dir=run_dir), end="")
            check(out)
            events = json.loads(out.read_text())["traceEvents"]
            seconds = statistics.median(event["dur"] / 1e6 for event in events if event["name"] == "step")
            pairs = [step_times(run_dir, seconds) for _ in range(ROUNDS)]
        finally:
            job.terminate()
            job.wait()
    ratios = [recorded / plain for plain, recorded in pairs]
    for plain, recorded in pairs:
        print(f"a step: {1e3 * plain:.1f} ms, recorded {1e3 * recorded:.1f} ms")
    print("RESULT", json.dumps({"profile_ratio": round(statistics.median(ratios), 4)}))


if __name__ == "__main__":
    main()
