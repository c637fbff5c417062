"""The files of a run folder."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baton import _card, _programs

if TYPE_CHECKING:
    import torch


class Run:
    """What a run folder holds: metrics, evaluations, events, recoveries, checkpoints.

    It can be read while the job trains, and after its end, on any machine that has the folder. Every method reads the
    files anew. Rows are dictionaries, of which `pandas.DataFrame` makes a table:

        pandas.DataFrame(baton.Run("runs/digits_cpu").metrics()).plot("step", "loss")
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Opens a run folder, such as `runs/digits_cpu`, or the bucket of its checkpoints, `s3://BUCKET/PREFIX`, which has
        checkpoints and weights only.

        Raises FileNotFoundError if no job has run there.
        """
        self._bucket = os.fspath(path) if str(path).startswith("s3://") else None
        self._folder = None if self._bucket else Path(path)
        if self._folder and not (self._folder / "journal.redb").exists():
            raise FileNotFoundError(f"{self._folder} is no run folder: it has no journal.redb")

    def __repr__(self) -> str:
        return f"baton.Run({str(self._folder or self._bucket)!r})"

    def _repr_html_(self) -> str | None:
        """In a notebook: the report, once the job has ended."""
        page = _card.report_file(self._folder) if self._folder else None
        return _card.frame(page) if page else None

    @property
    def path(self) -> Path:
        """The run folder. Raises FileNotFoundError if this is a bucket."""
        if self._folder is None:
            raise FileNotFoundError(f"{self._bucket} has checkpoints only: the rest is in the run folder")
        return self._folder

    def metrics(self) -> list[dict[str, Any]]:
        """A row per reported step, of the steps that count: those that were repeated after a rollback or from a
        checkpoint are there once.

        Columns: `unix_millis`, `generation`, `step`, `epoch`, `loss`, `lr`, `gradient_norm`, `samples_per_second` and
        others of docs/watching.md, and one per metric of the task, such as `top1`.
        """
        return self._rows("step")

    def evaluations(self) -> list[dict[str, Any]]:
        """A row per evaluation that counts, with `step`, `samples`, `extent` and one column per metric; those of
        averaged weights begin with `ema_`. `texts` are those that a language model wrote, shortened."""
        return self._rows("evaluation")

    def events(self) -> list[dict[str, Any]]:
        """The events until the job last ended, the oldest first: `id`, `unix_millis`, `kind`, `generation`, `step`,
        `message`. While it runs, `Job.watch` has them.

        Raises FileNotFoundError if the job has not ended yet.
        """
        events: list[dict[str, Any]] = self._report()["events"]
        return events

    def recoveries(self) -> list[dict[str, Any]]:
        """The newest recoveries until the job last ended, with their cause, durations in seconds and lost steps.

        Raises FileNotFoundError if the job has not ended yet.
        """
        recoveries: list[dict[str, Any]] = self.status()["recoveries"]
        return recoveries

    def status(self) -> dict[str, Any]:
        """The status when the job last ended, as `baton status --json` prints it. While it runs, `Job.status` has it.

        Raises FileNotFoundError if the job has not ended yet.
        """
        status: dict[str, Any] = self._report()["status"]
        return status

    def checkpoints(self) -> list[dict[str, Any]]:
        """The checkpoints of the run or in the bucket, the newest first, as `baton checkpoint ls --json` prints them; also
        those of other jobs that used the same store.

        Raises JobError if they cannot be listed.
        """
        return _programs.call_baton("checkpoint", "ls", "--json", *self._place())

    def load_state_dict(self, checkpoint: str | None = None, *, ema: bool = False) -> dict[str, torch.Tensor]:
        """The weights in a checkpoint (default: the newest), or with `ema` their moving average, floats in f32, on the CPU, for
        `model.load_state_dict`: with torchvision's names for its networks, a program's own, or those of an adapter.

        Needs torch and safetensors. Raises JobError if there is no such checkpoint, it is damaged, or has no average.
        """
        try:
            from safetensors.torch import load_file
        except ImportError:
            raise ImportError("load_state_dict needs PyTorch and safetensors: pip install torch safetensors") from None
        if checkpoint is not None and (not isinstance(checkpoint, str) or checkpoint.startswith("-") or not checkpoint):
            raise ValueError(f"{checkpoint!r} is no name of a checkpoint: see checkpoints()")
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "weights.safetensors")
            chosen = ([checkpoint] if checkpoint else []) + (["--ema"] if ema else [])
            _programs.call_baton("checkpoint", "export", *chosen, "--json", *self._place(), "--out", file)
            return load_file(file)

    def _place(self) -> tuple[str, str]:
        """Flags of `baton checkpoint`. With the run folder it knows which checkpoints are the run's own; while the job runs
        and after its end also which ones were rolled back, and where it saved."""
        return ("--dir", self._bucket) if self._bucket else ("--run-dir", str(self.path))

    def _report(self) -> dict[str, Any]:
        path = self.path / "report.json"
        try:
            report = json.loads(path.read_bytes())
        except ValueError:
            report = None
        except FileNotFoundError:
            raise FileNotFoundError(
                f"{path} is not there yet: it is written when the job ends; until then, baton.attach has its status"
            ) from None
        if not isinstance(report, dict) or not {"status", "events"} <= report.keys():
            raise ValueError(f"{path} is no report: the file is damaged")
        return report

    def _rows(self, kind: str) -> list[dict[str, Any]]:
        rows: dict[int, dict[str, Any]] = {}
        for point in self._points():
            if (began_at := point.get("began_at")) is not None:
                # Later steps were lost, and are trained again.
                rows = {step: row for step, row in rows.items() if step <= began_at}
            elif value := point.get(kind):
                rows[value["step"]] = flat(point, value)
        return [rows[step] for step in sorted(rows)]

    def _points(self) -> Iterator[dict[str, Any]]:
        path = self.path / "metrics.jsonl"
        if not path.exists():
            return
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.endswith(b"\n"):
                    return  # It is being written.
                yield parsed_point(line, f"{path}, line {number}")


def parsed_point(line: bytes, place: str) -> dict[str, Any]:
    """A line of a file of metrics. Raises ValueError, with its place, if it is damaged."""
    with contextlib.suppress(ValueError):
        point = json.loads(line)
        if isinstance(point, dict):
            return point
    raise ValueError(f"{place} is no JSON object: the file is damaged")


def flat(point: dict[str, Any], value: dict[str, Any]) -> dict[str, Any]:
    """A row without nested values."""
    row = {"unix_millis": point["unix_millis"], "generation": point["generation"]}
    row |= {name: field for name, field in value.items() if name not in ("metrics", "ema")}
    # Versions in which metrics had no names have the fields alone.
    row |= {metric["name"]: metric["value"] for metric in value.get("metrics", [])}
    if ema := value.get("ema"):
        row |= {f"ema_{metric['name']}": metric["value"] for metric in ema.get("metrics", [])}
    return row
