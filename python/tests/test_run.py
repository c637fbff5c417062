"""Reading run folders."""

import json
from pathlib import Path

import baton
import pytest
from run_files import evaluation, point, step


@pytest.fixture
def run(tmp_path):
    """A run folder: `run(points)` writes its metrics."""
    (tmp_path / "journal.redb").touch()

    def write(*points):
        lines = "".join(json.dumps(point) + "\n" for point in points)
        (tmp_path / "metrics.jsonl").write_text(lines)
        return baton.Run(tmp_path)

    return write


def test_steps_that_were_lost_are_there_once(run):
    points = [
        point(1, 1, began_at=0),
        step(2, 1, 10, 2.0, 0.1),
        step(3, 1, 20, 1.9, 0.2),
        step(4, 1, 30, 1.8, 0.3),
        point(5, 2, began_at=20),
        step(6, 2, 25, 1.85, 0.25),
    ]
    rows = run(*points).metrics()
    assert [(row["step"], row["generation"], row["top1"]) for row in rows] == [
        (10, 1, 0.1),
        (20, 1, 0.2),
        (25, 2, 0.25),
    ]
    assert rows[0] == {"unix_millis": 2, "generation": 1, "step": 10, "epoch": 0, "loss": 2.0, "top1": 0.1}


def test_an_evaluation_that_was_repeated_is_there_once_with_averaged_weights(run):
    points = [evaluation(1, 1, 22, 0.5), point(2, 2, began_at=22), evaluation(3, 2, 22, 0.6, ema=0.7)]
    (row,) = run(*points).evaluations()
    assert (row["unix_millis"], row["top1"], row["ema_top1"], row["step"]) == (3, 0.6, 0.7, 22)
    assert "metrics" not in row and "ema" not in row


def test_a_line_that_is_being_written_is_left_out_and_a_damaged_one_named(run):
    found = run(step(1, 1, 10, 2.0, 0.1))
    path = found.path / "metrics.jsonl"
    with path.open("a") as lines:
        lines.write('{"unix_millis": 2, "gener')
    assert len(found.metrics()) == 1
    with path.open("a") as lines:
        lines.write("\n")
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 2 is no JSON object"):
        found.metrics()
    path.write_text("[1]\n")
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 1 is no JSON object: the file is damaged"):
        found.evaluations()
    for damaged in ("{", "[]", "{}"):
        (found.path / "report.json").write_text(damaged)
        with pytest.raises(ValueError, match=r"report.json is no report: the file is damaged"):
            found.status()


def test_a_run_without_metrics_yet_has_none_and_says_that_there_is_no_report(run):
    found = run()
    (found.path / "metrics.jsonl").unlink()
    assert found.metrics() == found.evaluations() == []
    with pytest.raises(FileNotFoundError, match=r"report.json is not there yet: it is written when the job ends"):
        found.events()


def test_events_recoveries_and_status_are_those_of_the_report(run):
    found = run()
    report = {"status": {"phase": "ended", "recoveries": [{"cause": "kill"}]}, "events": [{"id": 1}]}
    (found.path / "report.json").write_text(json.dumps(report))
    assert (found.events(), found.recoveries(), found.status()["phase"]) == ([{"id": 1}], [{"cause": "kill"}], "ended")


def test_a_run_of_an_older_version_can_be_read():
    run = baton.Run(Path(__file__).resolve().parents[2] / "tests/compat/7d60ec3/run")
    assert len(run.metrics()) > 1 and run.evaluations()[-1]["top1"] > 0


def test_checkpoints_are_listed_by_baton(run, programs):
    programs("baton", """printf '{"name": "%s"}\\n{"name": "b"}\\n' "$*" """)
    found = run()
    # An earlier job in the folder may have saved here, and the newest one elsewhere: `baton` knows.
    (found.path / "checkpoints").mkdir()
    listed = [checkpoint["name"] for checkpoint in found.checkpoints()]
    assert listed == [f"checkpoint ls --json --run-dir {found.path}", "b"]


def test_a_bucket_has_checkpoints_and_nothing_else(programs):
    programs("baton", """printf '{"name": "%s"}\\n' "$*" """)
    bucket = baton.Run("s3://weights/digits")
    assert repr(bucket) == "baton.Run('s3://weights/digits')"
    assert bucket.checkpoints()[0]["name"] == "checkpoint ls --json --dir s3://weights/digits"
    with pytest.raises(FileNotFoundError, match="s3://weights/digits has checkpoints only"):
        bucket.metrics()


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"is no run folder: it has no journal.redb"):
        baton.Run(tmp_path / "missing")
