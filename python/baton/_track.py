"""Sends a job's metrics to Weights & Biases or MLflow, by their own clients.

It follows `metrics.jsonl` beside the job. A step is sent once: steps that are trained again after a failure have the
same values, and are left out. What has been sent is in the run folder, so that a tracker that is started again, on
another machine too, continues the same run.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from baton._files import read_json, write_json
from baton._job import Job
from baton._programs import JobError
from baton._run import Run, flat, parsed_point

_POLL_SECONDS = 2.0
# MLflow takes at most 1,000 values at once, and a point has about ten.
_POINTS_PER_RECORD = 50
# Columns that are no metrics.
_NOT_SENT = {"unix_millis", "generation", "step", "total_steps", "steps_per_epoch", "extent", "texts", "samples"}


class Tracker(Protocol):
    """A service that keeps curves."""

    name: str

    def log(self, step: int, unix_millis: int, values: dict[str, float]) -> None: ...

    def flush(self) -> None: ...

    def finish(self, succeeded: bool) -> None: ...


class WandbTracker:
    """A run of Weights & Biases."""

    name = "wandb"

    def __init__(self, project: str, name: str, folder: Path, known: str | None) -> None:
        import wandb

        self._run = wandb.init(project=project, name=name, id=known, resume="allow" if known else None, dir=folder)
        self.run_id = str(self._run.id)

    def log(self, step: int, unix_millis: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def flush(self) -> None:
        """Its client sends by itself."""

    def finish(self, succeeded: bool) -> None:
        self._run.finish(exit_code=0 if succeeded else 1)


class MlflowTracker:
    """A run of MLflow."""

    name = "mlflow"

    def __init__(self, uri: str, experiment: str, name: str, known: str | None) -> None:
        from mlflow.entities import Metric
        from mlflow.tracking import MlflowClient

        self._metric = Metric
        self._client = MlflowClient(tracking_uri=uri)
        if known is None:
            found = self._client.get_experiment_by_name(experiment)
            number = found.experiment_id if found else self._client.create_experiment(experiment)
            known = self._client.create_run(number, run_name=name).info.run_id
        self.run_id = str(known)
        self._client.update_run(self.run_id, status="RUNNING")
        self._waiting: list[Any] = []

    def log(self, step: int, unix_millis: int, values: dict[str, float]) -> None:
        self._waiting += [self._metric(name, value, unix_millis, step) for name, value in values.items()]

    def flush(self) -> None:
        if self._waiting:
            self._client.log_batch(self.run_id, metrics=self._waiting)
            self._waiting = []

    def finish(self, succeeded: bool) -> None:
        self._client.set_terminated(self.run_id, "FINISHED" if succeeded else "FAILED")


def track(run_dir: Path, open_tracker: Callable[[str, str | None], Any], name: str, *, follow: bool = True) -> int:
    """Sends what has not been sent yet, and with `follow` what comes until the job has ended. Returns the number of
    points sent.

    `open_tracker(title, known)` opens the service for a run with this title, or goes on with a known one.
    """
    run = Run(run_dir)
    record = _Record(run.path / f"track-{name}.json")
    tracker = open_tracker(_title(run), record.run_id)
    record.run_id = tracker.run_id
    record.write()
    points = _Points(run.path / "metrics.jsonl")
    sent = 0
    while True:
        # Whether it has ended comes first: what it has written last is then there.
        ended = not follow or _has_ended(run)
        for point in points.new():
            sent += _send(tracker, record, point)
            if sent % _POINTS_PER_RECORD == 0:
                tracker.flush()
                record.write()
        tracker.flush()
        record.write()
        if ended:
            break
        time.sleep(_POLL_SECONDS)
    tracker.finish(_succeeded(run))
    return sent


class _Record:
    """What has been sent: a file of the run folder."""

    def __init__(self, path: Path) -> None:
        self._path = path
        known = read_json(path)
        self.run_id: str | None = known.get("run")
        self.newest: dict[str, int] = known.get("newest", {})

    def write(self) -> None:
        write_json(self._path, {"run": self.run_id, "newest": self.newest})


class _Points:
    """New lines of a file that grows, and that is replaced when it has become long."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0
        self._inode = 0

    def new(self) -> Iterator[dict[str, Any]]:
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return
        with file:
            found = os.fstat(file.fileno())
            if found.st_ino != self._inode or found.st_size < self._read:
                self._inode, self._read = found.st_ino, 0
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):
                    return  # It is being written.
                self._read += len(line)
                yield parsed_point(line, f"{self._path}, before byte {self._read}")


def _send(tracker: Tracker, record: _Record, point: dict[str, Any]) -> int:
    for kind, prefix in (("step", "train/"), ("evaluation", "val/")):
        value = point.get(kind)
        if value is None or value["step"] <= record.newest.get(kind, 0):
            continue
        row = flat(point, value)
        values = {prefix + name: number for name, number in row.items() if name not in _NOT_SENT and _is_number(number)}
        tracker.log(value["step"], point["unix_millis"], values)
        record.newest[kind] = value["step"]
        return 1
    return 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _title(run: Run) -> str:
    try:
        return str(Job(run.path).status()["name"])
    except (JobError, FileNotFoundError):
        return run.path.name


def _has_ended(run: Run) -> bool:
    return Job(run.path)._is_gone()


def _succeeded(run: Run) -> bool:
    try:
        outcome = run.status()["outcome"]
    except FileNotFoundError:
        return True
    return not outcome or outcome["kind"] != "failed"
