"""Sends a job's metrics to Weights & Biases or MLflow, by their own clients.

It follows `metrics.jsonl` beside the job. A step is sent once: steps that are trained again after a failure have the
same values, and are left out. What has been sent is in the run folder, so that a tracker that is started again, on
another machine too, continues the same run. W&B's client sends behind our back and loses what it has not sent when it
is killed, so it is asked what its service or file has.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from baton._files import read_json, write_json
from baton._job import Job
from baton._programs import JobError
from baton._run import Run, flat, parsed_point

_POLL_SECONDS = 2.0
# A point has about ten values.
_POINTS_PER_RECORD = 50
_MLFLOW_MAX_VALUES = 1_000
# The report of an end is written this long before the last metrics, at most.
_REPORT_SECONDS = 2.0
# After the job's end, a service that does not answer is tried again this often.
_LAST_ATTEMPTS = 5
# What is sent, and how the names of its metrics begin.
_KINDS = {"step": "train/", "evaluation": "val/", "subset_evaluation": "val_subset/"}
# Columns that are no metrics.
_NOT_SENT = {"unix_millis", "generation", "step", "total_steps", "steps_per_epoch", "extent", "texts", "samples"}


class TrackerUnavailableError(JobError):
    """The service does not take what is sent. It may later."""


class Tracker(Protocol):
    """A service that keeps curves."""

    run_id: str
    # The newest step of each kind that the service has; None if what was recorded is right.
    newest: dict[str, int] | None

    def log(self, kind: str, step: int, unix_millis: int, values: dict[str, float]) -> None: ...

    def flush(self) -> None:
        """Sends what was logged.

        Raises `TrackerUnavailableError` if it was not; the next call sends it."""

    def finish(self, succeeded: bool) -> None: ...


class WandbTracker:
    """A run of Weights & Biases.

    Its rows have numbers of their own, which only grow, but an evaluation may come after later steps: each kind has its
    step as a value too, which is the x axis of its charts.
    """

    def __init__(self, project: str, name: str, folder: Path, known: str | None) -> None:
        import wandb

        self._run = wandb.init(project=project, name=name, id=known, resume="allow" if known else None, dir=folder)
        self.run_id = str(self._run.id)
        for prefix in _KINDS.values():
            self._run.define_metric(f"{prefix}step")
            self._run.define_metric(f"{prefix}*", step_metric=f"{prefix}step")
        self.newest: dict[str, int] | None = None
        # The newest row, and the kinds that it has. To one of an earlier client nothing can be added.
        self._row, self._row_kinds = 0, set(_KINDS)
        if self._run.offline:
            latest = _latest_offline_values(folder, self.run_id)
            if "_step" in latest:
                self._continue(int(latest["_step"]), latest)
        elif self._run.resumed:
            self._continue(self._run.starting_step - 1, self._run.summary)

    def _continue(self, row: int, latest: Any) -> None:
        """After this row, and these latest values by name."""
        self._row = row
        steps = {kind: int(latest.get(f"{prefix}step", 0)) for kind, prefix in _KINDS.items()}
        # The values may have arrived before the rows.
        self.newest = {kind: min(step, row) for kind, step in steps.items()}

    def log(self, kind: str, step: int, unix_millis: int, values: dict[str, float]) -> None:
        if step > self._row or kind in self._row_kinds:
            self._row, self._row_kinds = max(step, self._row + 1), set()
        self._row_kinds.add(kind)
        self._run.log({**values, f"{_KINDS[kind]}step": step}, step=self._row)

    def flush(self) -> None:
        """Its client sends by itself."""

    def finish(self, succeeded: bool) -> None:
        self._run.finish(exit_code=0 if succeeded else 1)


def _latest_offline_values(folder: Path, run_id: str) -> dict[str, Any]:
    """By name, from the files of an offline run; none if there are no files, as after `wandb sync --clean`."""
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]  # made when it is imported

    latest = {}
    for file in sorted(folder.glob(f"wandb/offline-run-*/run-{run_id}.wandb")):
        for text in leveldb_records(file.read_bytes()):
            for item in Record.FromString(text).history.item:
                latest[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
    return latest


def leveldb_records(data: bytes) -> Iterator[bytes]:
    """The records of a file of W&B's: LevelDB's log format, after a header of 7 bytes. What was cut off is left out.

    https://github.com/google/leveldb/blob/main/doc/log_format.md
    """
    at, parts = 7, b""
    while at + 7 <= len(data):
        left = 32_768 - at % 32_768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        part = data[at + 7 : at + 7 + length]
        if kind not in (1, 2, 3, 4) or len(part) < length:
            return
        at += 7 + length
        parts += part
        if kind in (1, 4):  # Whole, or the last part.
            yield parts
            parts = b""


class MlflowTracker:
    """A run of MLflow."""

    newest = None

    def __init__(self, uri: str, experiment: str, name: str, known: str | None) -> None:
        # By default its client tries again for minutes without a word; `track` tries again itself.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        from mlflow.entities import Metric
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        self._uri = uri
        self._metric = Metric
        self._error = MlflowException
        with self._named_errors():
            self._client = MlflowClient(tracking_uri=uri)
            if known is None:
                found = self._client.get_experiment_by_name(experiment)
                number = found.experiment_id if found else self._client.create_experiment(experiment)
                known = self._client.create_run(number, run_name=name).info.run_id
            self.run_id = str(known)
            self._client.update_run(self.run_id, status="RUNNING")
        self._waiting: list[Any] = []

    def log(self, kind: str, step: int, unix_millis: int, values: dict[str, float]) -> None:
        self._waiting += [self._metric(name, value, unix_millis, step) for name, value in values.items()]

    def flush(self) -> None:
        while self._waiting:
            with self._named_errors():
                self._client.log_batch(self.run_id, metrics=self._waiting[:_MLFLOW_MAX_VALUES])
            del self._waiting[:_MLFLOW_MAX_VALUES]

    def finish(self, succeeded: bool) -> None:
        with self._named_errors():
            self._client.set_terminated(self.run_id, "FINISHED" if succeeded else "FAILED")

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Adds to the client's errors where it happened and what to do."""
        try:
            yield
        except self._error as error:
            where = _without_password(self._uri)
            problem = _without_password(str(error).strip().partition("\n")[0])[:300]
            remedy = (
                "check that its server runs and that --mlflow has its address"
                if self._uri.startswith("http")
                else "a database needs `pip install mlflow`; mlflow-skinny reaches servers only"
            )
            raise TrackerUnavailableError(f"MLflow at {where}: {problem}; {remedy}") from None


def _without_password(text: str) -> str:
    return re.sub(r"//[^/@\s]+@", "//…@", text)


def track(
    run_dir: Path, open_tracker: Callable[[str, str | None], Tracker], name: str, place: str, *, follow: bool = True
) -> int:
    """Sends what has not been sent yet, and with `follow` what comes until the job has ended. Returns the number of
    points sent.

    `open_tracker(title, run_id)` opens the service `name` for a new run with this title, or continues the run `run_id`;
    `place` is where in that service.
    """
    run = Run(run_dir)
    record = _Record(run.path / f"track-{name}.json", place)
    points = _Points(run.path / "metrics.jsonl")
    record.begin(points.newest_job())
    tracker: Tracker | None = _open(run, record, open_tracker, name)
    sent, failed, is_reported, is_lost = 0, 0, False, False
    while True:
        # Whether it has ended comes first: what it has written last is then there.
        ended = not follow or _has_ended(run)
        try:
            tracker = tracker or _open(run, record, open_tracker, name)
            for point in points.new():
                if (job := point.get("job_id")) and job != record.job:
                    # It was started in the run folder of the last one, from fresh weights.
                    tracker.flush()
                    tracker.finish(True)
                    # If the next one cannot be opened now, nothing may go to this one.
                    tracker = None
                    record.begin(job)
                    tracker = _open(run, record, open_tracker, name)
                if not _send(tracker, record, point):
                    continue
                sent += 1
                if sent % _POINTS_PER_RECORD == 0:
                    tracker.flush()
                    record.write()
            tracker.flush()
            record.write()
        except TrackerUnavailableError as error:
            failed += ended
            if not follow or failed == _LAST_ATTEMPTS:
                raise TrackerUnavailableError(f"{error}; the same command sends what is left") from None
            if not is_reported:
                print(f"{error}; metrics wait until it answers", file=sys.stderr)
            is_reported = True
        else:
            if is_reported:
                print("the metrics that waited are sent", file=sys.stderr)
            is_reported = False
            if ended:
                break
            if not is_lost and _is_lost(run):
                text = "all processes of the job are gone before its end; this command waits until it is started again"
                print(f"{run.path}: {text} (--once does not wait)", file=sys.stderr)
                is_lost = True
            elif is_lost:
                is_lost = _is_lost(run)
        time.sleep(_POLL_SECONDS)
    tracker.finish(_succeeded(run))
    return sent


def _open(run: Run, record: _Record, open_tracker: Callable[[str, str | None], Tracker], name: str) -> Tracker:
    tracker = open_tracker(_title(run), record.run_id)
    record.run_id = tracker.run_id
    if tracker.newest is not None:
        record.newest = dict(tracker.newest)
    record.write()
    print(f"{run.path}: metrics go to {name}, run {tracker.run_id}", file=sys.stderr)
    return tracker


class _Record:
    """What has been sent, and where: a file of the run folder."""

    def __init__(self, path: Path, place: str) -> None:
        self._path = path
        self._place = place
        known = read_json(path)
        before = known.get("place", place)
        if before != place:
            raise ValueError(f"metrics went to {before}, not {place}: remove {path} to send all of them there")
        self.job: str | None = known.get("job")
        self.run_id: str | None = known.get("run")
        self.newest: dict[str, int] = known.get("newest", {})

    def begin(self, job: str | None) -> None:
        """The next points are those of this job. Of another one nothing has been sent yet."""
        if job and self.job and job != self.job:
            self.run_id, self.newest = None, {}
        self.job = job or self.job

    def write(self) -> None:
        known = {"job": self.job, "run": self.run_id, "place": self._place, "newest": self.newest}
        write_json(self._path, known)


class _Points:
    """New lines of the newest job in a file that grows, and that is replaced when it has become long."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0
        self._inode = 0

    def newest_job(self) -> str | None:
        """The newest job of the file; None if there is none, or version 0.1.0 wrote it."""
        try:
            with self._path.open("rb") as file:
                return self._newest_job(file)[0]
        except FileNotFoundError:
            return None

    def _newest_job(self, file: BinaryIO) -> tuple[str | None, int]:
        """The newest job, and where its first line begins."""
        job, start, at = None, 0, 0
        for line in file:
            if b'"began_at"' in line and line.endswith(b"\n"):
                point = parsed_point(line, f"{self._path}, after byte {at}")
                found = point.get("job_id")
                # Version 0.1.0 wrote no jobs: fresh weights may be those of a new one.
                if (found and job and found != job) or (not found and point["began_at"] == 0):
                    start = at
                job = found or job
            at += len(line)
        return job, start

    def new(self) -> Iterator[dict[str, Any]]:
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return
        with file:
            found = os.fstat(file.fileno())
            if found.st_ino != self._inode or found.st_size < self._read:
                self._inode, self._read = found.st_ino, self._newest_job(file)[1]
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):
                    return  # It is being written.
                yield parsed_point(line, f"{self._path}, after byte {self._read}")
                # One that could not be sent is read again.
                self._read += len(line)


def _send(tracker: Tracker, record: _Record, point: dict[str, Any]) -> bool:
    """Returns false if it has been sent before, or is of no kind that is sent."""
    kind = "evaluation" if point.get("evaluation") else "step"
    value = point.get(kind)
    if value and value.get("extent") == "subset":
        kind = "subset_evaluation"
    if not value or value["step"] <= record.newest.get(kind, 0):
        return False
    row, prefix = flat(point, value), _KINDS[kind]
    values = {prefix + name: number for name, number in row.items() if name not in _NOT_SENT and _is_number(number)}
    tracker.log(kind, value["step"], point["unix_millis"], values)
    record.newest[kind] = value["step"]
    return True


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _title(run: Run) -> str:
    try:
        return str(Job(run.path).status()["name"])
    except (JobError, FileNotFoundError):
        return run.path.name


def _has_ended(run: Run) -> bool:
    return _is_gone(run) and _end_is_reported(run)


def _is_lost(run: Run) -> bool:
    return _is_gone(run) and not _end_is_reported(run)


def _is_gone(run: Run) -> bool:
    return Job(run.path)._is_gone()


def _end_is_reported(run: Run) -> bool:
    """Whether the report is that of the newest end, and not of one after which the job was started again."""
    report, metrics = (run.path / name for name in ("report.json", "metrics.jsonl"))
    if not report.exists():
        return False
    return not metrics.exists() or report.stat().st_mtime >= metrics.stat().st_mtime - _REPORT_SECONDS


def _succeeded(run: Run) -> bool:
    try:
        outcome = run.status()["outcome"]
    except FileNotFoundError:
        return True
    return not outcome or outcome["kind"] != "failed"
