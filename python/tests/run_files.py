"""Run folders for tests."""

import json


def top1(value):
    return [{"name": "top1", "value": value, "direction": "higher", "is_fraction": True}]


def point(millis, generation, **kind):
    return {"unix_millis": millis, "generation": generation, **kind}


def step(millis, generation, step, loss, accuracy):
    return point(millis, generation, step={"step": step, "epoch": 0, "loss": loss, "metrics": top1(accuracy)})


def evaluation(millis, generation, step, accuracy, ema=None, extent="full"):
    averaged = {"loss": 2.0, "metrics": top1(ema)} if ema else None
    value = {"step": step, "extent": extent, "loss": 1.5, "metrics": top1(accuracy), "ema": averaged, "texts": []}
    return point(millis, generation, evaluation=value)


def add_points(folder, *points):
    """Adds lines to the metrics of a run folder, which it makes if there is none."""
    folder.mkdir(exist_ok=True)
    (folder / "journal.redb").touch()
    with (folder / "metrics.jsonl").open("a") as metrics:
        metrics.writelines(json.dumps(line) + "\n" for line in points)
