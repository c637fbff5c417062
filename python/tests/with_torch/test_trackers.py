"""Metrics of a job with interruptions, as W&B's and MLflow's own clients store them."""

import collections
import json
import os
import socket
from pathlib import Path

import baton
import pytest
from baton.__main__ import main
from baton._track import leveldb_records
from run_files import add_points, evaluation, step

pytestmark = pytest.mark.usefixtures("real_programs")
ROOT = Path(__file__).resolve().parents[3]


def wandb_history(folder):
    """Name and step of every value of the offline runs in a folder, and the ids of the runs.

    Rows that are not of a greater number than the one before would be lost."""
    from wandb.proto.wandb_internal_pb2 import Record

    found, runs, newest = collections.Counter(), set(), 0
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for record in map(Record.FromString, leveldb_records(path.read_bytes())):
            if record.WhichOneof("record_type") == "run":
                runs.add(record.run.run_id)
            row = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            assert row.get("_step", newest + 1) > newest
            newest = row.get("_step", newest)
            found.update((name, row[f"{name.partition('/')[0]}/step"]) for name in row if "/" in name)
    return found, runs


def test_a_job_with_two_interruptions_is_one_run_with_every_value_once(tmp_path, monkeypatch, capsys):
    from mlflow.tracking import MlflowClient

    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    folder, store = tmp_path / "run", f"file:{tmp_path / 'mlruns'}"
    changes = {"model.arch": "linear", "optimizer": {"kind": "sgd"}, "train.epochs": 90, "checkpoint.every_epochs": 20}
    for interruption in range(3):
        job = baton.up("digits_cpu", set=changes, run_dir=folder, ranks=2)
        if interruption < 2:
            for event in job.watch():
                if event["kind"] == "saved":
                    break
            job.drain()
        job.wait(timeout=120)
        for service in (["--wandb", "cats"], ["--mlflow", store]):
            assert main(["track", str(folder), *service]) == 0
        if interruption == 0:
            # As if the tracker had been killed: W&B's client writes every 15 seconds.
            (file,) = folder.glob("wandb/offline-run-*/*.wandb")
            os.truncate(file, file.stat().st_size // 2)
    capsys.readouterr()

    run = baton.Run(folder)
    expected = {("train/loss", row["step"]) for row in run.metrics()}
    expected |= {("val/top1", row["step"]) for row in run.evaluations()}
    assert len(expected) > 50 and run.status()["outcome"]["kind"] == "completed"
    found, runs = wandb_history(folder)
    assert len(runs) == 1
    assert expected <= found.keys() and set(found.values()) == {1}

    client = MlflowClient(tracking_uri=store)
    (experiment,) = [found for found in client.search_experiments() if found.name == "baton"]
    (tracked,) = client.search_runs([experiment.experiment_id])
    assert tracked.info.status == "FINISHED"
    for name in ("train/loss", "val/top1"):
        steps = [metric.step for metric in client.get_metric_history(tracked.info.run_id, name)]
        assert sorted(steps) == sorted(step for wanted, step in expected if wanted == name)


def test_wandb_gets_evaluations_that_come_after_later_steps_and_after_an_interruption(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_MODE", "offline")
    folder = tmp_path / "run"
    steps = [step(number, 1, number, 1.0 / number, 0.0) for number in range(1, 31)]
    late = [evaluation(number, 1, number, 0.5) for number in (15, 18, 20)]
    at_once = [evaluation(10, 1, 10, 0.4, extent="subset"), evaluation(10, 1, 10, 0.5)]
    for points in (steps[:10], at_once, [*steps[10:20], *late], steps[20:]):
        add_points(folder, *points)
        assert main(["track", str(folder), "--wandb", "cats", "--once"]) == 0
        assert f"{len(points)} points sent" in capsys.readouterr().out
    found, runs = wandb_history(folder)
    assert len(runs) == 1 and set(found.values()) == {1}
    assert {at for name, at in found if name == "train/loss"} == set(range(1, 31))
    assert {at for name, at in found if name == "val/top1"} == {10, 15, 18, 20}
    assert ("val_subset/top1", 10) in found


def test_an_mlflow_that_cannot_be_reached_is_named_within_seconds(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    with socket.create_server(("127.0.0.1", 0)) as server:
        free = server.getsockname()[1]
    job = baton.up(
        "digits_cpu",
        set={"model.arch": "linear", "optimizer": {"kind": "sgd"}, "train.epochs": 2},
        run_dir=tmp_path / "run",
    )
    job.wait(timeout=120)
    with pytest.raises(SystemExit) as ended:
        main(["track", str(tmp_path / "run"), "--mlflow", f"http://me:secret@127.0.0.1:{free}", "--once"])
    error = capsys.readouterr().err
    assert ended.value.code == 1 and "secret" not in error
    assert f"error: MLflow at http://…@127.0.0.1:{free}: " in error
    assert "check that its server runs and that --mlflow has its address" in error
