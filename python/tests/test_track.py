"""Sending metrics to a tracker."""

import json
import os
import sys

import pytest
from baton._track import TrackerUnavailableError, WandbTracker, track
from run_files import add_points, evaluation, point, step


class Service:
    """A tracker that keeps what it gets, over several runs of the follower."""

    newest = None

    def __init__(self):
        self.points, self.opened, self.finished = [], [], []

    def open(self, title, known):
        self.opened.append((title, known))
        self.run_id = "r1"
        return self

    def log(self, kind, step, unix_millis, values):
        self.points.append((step, unix_millis, values))

    def flush(self):
        pass

    def finish(self, succeeded):
        self.finished.append(succeeded)


@pytest.fixture
def followed(tmp_path, no_programs):
    """A run folder whose job has ended: `followed(service)` sends what is new."""
    folder = tmp_path / "cats"
    folder.mkdir()
    (folder / "report.json").write_text(json.dumps({"status": {"outcome": {"kind": "completed"}}, "events": []}))
    return folder, lambda service: track(folder, service.open, "fake", "cats")


def test_a_job_whose_processes_are_lost_has_not_ended_and_is_followed_when_it_is_started_again(
    followed, monkeypatch, capsys
):
    folder, _ = followed
    service = Service()
    add_points(folder, point(1, 1, began_at=0), step(2, 1, 10, 2.0, 0.1))
    before = (folder / "metrics.jsonl").stat().st_mtime - 60
    os.utime(folder / "report.json", (before, before))

    def pause(_seconds):
        if not capsys.readouterr().err.count("gone before its end"):
            assert len(service.points) > 1
        elif len(service.points) == 1:
            add_points(folder, step(3, 2, 20, 1.9, 0.2))
            (folder / "report.json").touch()

    monkeypatch.setattr("baton._track.time.sleep", pause)
    assert track(folder, service.open, "fake", "cats") == 2
    assert service.finished == [True]


def test_a_step_is_sent_once_through_interruptions_of_job_and_tracker(followed):
    folder, send = followed
    service = Service()
    add_points(folder, point(1, 1, began_at=0), step(2, 1, 10, 2.0, 0.1), step(3, 1, 20, 1.9, 0.2))
    assert send(service) == 2
    # Killed after step 20 and resumed from a checkpoint of step 5; then again from 15.
    add_points(folder, point(4, 2, began_at=5), step(5, 2, 10, 2.0, 0.1), step(6, 2, 20, 1.9, 0.2))
    add_points(folder, step(7, 2, 30, 1.8, 0.3), evaluation(8, 2, 30, 0.5, ema=0.6))
    assert send(service) == 2
    add_points(folder, point(9, 3, began_at=15), step(10, 3, 30, 1.8, 0.3), evaluation(11, 3, 30, 0.5))
    assert send(service) == 0
    assert [(step, millis) for step, millis, _ in service.points] == [(10, 2), (20, 3), (30, 7), (30, 8)]
    assert service.points[0][2] == {"train/epoch": 0, "train/loss": 2.0, "train/top1": 0.1}
    assert service.points[3][2] == {"val/loss": 1.5, "val/top1": 0.5, "val/ema_top1": 0.6}
    assert service.opened == [("cats", None), ("cats", "r1"), ("cats", "r1")]
    assert service.finished == [True, True, True]


def test_what_a_service_has_lost_is_sent_again_and_what_it_has_is_not(followed):
    folder, send = followed
    service = Service()
    points = [step(number, 1, number, 1.0, 0.0) for number in range(1, 9)]
    add_points(folder, *points[:6], evaluation(6, 1, 6, 0.5))
    assert send(service) == 7
    service.newest = {"step": 4, "evaluation": 5}
    assert send(service) == 3
    assert [step for step, _, _ in service.points[7:]] == [5, 6, 6]
    # Killed before this was recorded.
    service.newest = {"step": 7, "evaluation": 6}
    add_points(folder, *points[6:])
    assert send(service) == 1
    assert service.points[-1][0] == 8


def test_an_evaluation_that_did_not_follow_its_step_is_sent_later(followed):
    folder, send = followed
    service = Service()
    add_points(folder, step(1, 1, 10, 1.0, 0.0))
    assert send(service) == 1
    service.newest = {"step": 10, "evaluation": 0}
    add_points(folder, evaluation(2, 1, 10, 0.5))
    assert send(service) == 1
    assert service.points[-1] == (10, 2, {"val/loss": 1.5, "val/top1": 0.5})


def test_evaluations_on_a_subset_have_curves_of_their_own(followed):
    folder, send = followed
    service = Service()
    add_points(folder, evaluation(1, 1, 10, 0.4, extent="subset"), evaluation(2, 1, 10, 0.5))
    assert send(service) == 2
    assert service.points == [
        (10, 1, {"val_subset/loss": 1.5, "val_subset/top1": 0.4}),
        (10, 2, {"val/loss": 1.5, "val/top1": 0.5}),
    ]
    assert send(service) == 0


class WandbRun:
    """Keeps a run's rows as W&B does: values of one step are in one row, and those of an earlier step are lost."""

    id, offline = "w1", False

    def __init__(self):
        self.rows, self.axes = {}, {}

    def init(self, **_):
        self.resumed, self.starting_step = bool(self.rows), max(self.rows, default=-1) + 1
        self.summary = {name: value for step in sorted(self.rows) for name, value in self.rows[step].items()}
        return self

    def define_metric(self, name, step_metric=None):
        self.axes[name] = step_metric

    def log(self, values, step):
        if step >= max(self.starting_step, *self.rows, 0):
            self.rows.setdefault(step, {}).update(values)

    def finish(self, exit_code):
        pass

    def curve(self, name):
        axis = self.axes[name.partition("/")[0] + "/*"]
        return [(row[axis], row[name]) for _, row in sorted(self.rows.items()) if name in row]


def test_wandb_gets_each_evaluation_also_after_later_steps_and_after_an_interruption(followed, monkeypatch):
    folder, _ = followed
    service = WandbRun()
    monkeypatch.setitem(sys.modules, "wandb", service)

    def send(*points):
        add_points(folder, *points)
        return track(folder, lambda title, known: WandbTracker("cats", title, folder, known), "wandb", "cats")

    steps = [step(number, 1, number, 1.0 / number, 0.0) for number in range(1, 41)]
    assert send(*steps[:10]) == 10
    assert send(evaluation(10, 1, 10, 0.1), evaluation(10, 1, 10, 0.2, extent="subset")) == 2
    # The coordinator was away: the steps come first.
    late = [evaluation(number, 1, number, number / 100) for number in (15, 20, 25)]
    assert send(*steps[10:30], *late) == 23
    assert send(*steps[30:]) == 10
    assert send() == 0
    assert [at for at, _ in service.curve("train/loss")] == [*range(1, 41)]
    assert service.curve("val/top1") == [(10, 0.1), (15, 0.15), (20, 0.2), (25, 0.25)]
    assert service.curve("val_subset/top1") == [(10, 0.2)]


def began(millis, at, job):
    return point(millis, 1, began_at=at, job_id=job)


def test_a_new_job_in_the_folder_is_a_new_run_with_all_its_points(followed):
    folder, send = followed
    first, second = Service(), Service()
    add_points(folder, began(1, 0, "a"), step(2, 1, 10, 2.0, 0.1), step(3, 1, 20, 1.9, 0.2))
    add_points(folder, began(4, 15, "a"), step(5, 2, 20, 1.9, 0.2), step(6, 2, 30, 1.8, 0.3))
    assert send(first) == 3
    # Shorter than the first.
    add_points(folder, began(7, 0, "b"), step(8, 1, 10, 3.0, 0.1))
    assert send(second) == 1
    assert second.opened == [("cats", None)] and second.points[0][2]["train/loss"] == 3.0
    # From a checkpoint of another one.
    add_points(folder, step(9, 1, 20, 2.9, 0.1), began(10, 5, "c"), step(11, 1, 10, 4.0, 0.1))
    third = Service()
    assert send(third) == 1
    assert third.opened == [("cats", None)] and third.points[0][2]["train/loss"] == 4.0


def test_a_new_job_while_the_folder_is_followed_is_a_new_run(followed, monkeypatch):
    folder, send = followed
    service = Service()
    add_points(folder, began(1, 0, "a"), step(2, 1, 10, 2.0, 0.1))
    monkeypatch.setattr("baton._track._has_ended", lambda run: len(service.points) > 1)
    monkeypatch.setattr("time.sleep", lambda _: add_points(folder, began(3, 0, "b"), step(4, 1, 10, 3.0, 0.1)))
    assert send(service) == 2
    assert service.opened == [("cats", None), ("cats", None)] and service.finished == [True, True]
    assert [values["train/loss"] for _, _, values in service.points] == [2.0, 3.0]


def test_points_of_a_new_job_wait_until_its_run_is_opened(followed, monkeypatch):
    folder, _ = followed
    first, second = Service(), Service()
    answers = iter([first, None, second])

    def open_tracker(title, known):
        if (service := next(answers)) is None:
            raise TrackerUnavailableError("it does not answer")
        return service.open(title, known)

    add_points(folder, began(1, 0, "a"), step(2, 1, 10, 2.0, 0.1))
    new = [began(3, 0, "b"), step(4, 1, 10, 3.0, 0.1)]
    monkeypatch.setattr("baton._track._has_ended", lambda run: len(first.points + second.points) > 1)
    monkeypatch.setattr("time.sleep", lambda _: [add_points(folder, *new), new.clear()])
    assert track(folder, open_tracker, "fake", "cats") == 2
    assert [values["train/loss"] for _, _, values in first.points] == [2.0]
    assert [values["train/loss"] for _, _, values in second.points] == [3.0]
    assert (first.finished, second.opened, second.finished) == ([True], [("cats", None)], [True])


def test_another_place_in_the_service_is_refused(followed):
    folder, send = followed
    add_points(folder, step(1, 1, 1, 1.0, 0.0))
    assert send(Service()) == 1
    with pytest.raises(
        ValueError, match=r"^metrics went to cats, not dogs: remove .*/cats/track-fake.json to send all"
    ):
        track(folder, Service().open, "fake", "dogs")


def test_a_file_that_was_thinned_out_and_a_line_that_is_being_written_are_read_right(followed):
    folder, send = followed
    service = Service()
    add_points(folder, *(step(n, 1, n, 1.0, 0.0) for n in range(1, 9)))
    assert send(service) == 8
    thinned = folder / "thinned"
    thinned.write_text(json.dumps({"thinned_to_steps": 2}) + "\n")
    os.replace(thinned, folder / "metrics.jsonl")
    add_points(folder, step(2, 1, 2, 1.0, 0.0), step(10, 1, 10, 1.0, 0.0))
    with (folder / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"unix_millis": 11, "generation": 1, "step": {"st')
    assert send(service) == 1
    assert service.points[-1][0] == 10


def test_values_that_are_no_numbers_are_left_out_and_a_failed_job_is_reported(followed):
    folder, send = followed
    service = Service()
    add_points(folder, step(1, 1, 1, float("nan"), 0.5))
    (folder / "report.json").write_text(json.dumps({"status": {"outcome": {"kind": "failed"}}, "events": []}))
    send(service)
    assert service.points == [(1, 1, {"train/epoch": 0, "train/top1": 0.5})]
    assert service.finished == [False]


def test_a_running_job_is_followed_until_it_has_ended(followed, monkeypatch):
    folder, send = followed
    service = Service()
    add_points(folder, step(1, 1, 1, 1.0, 0.5))
    monkeypatch.setattr("baton._track._has_ended", lambda run: len(service.points) > 1)
    monkeypatch.setattr("time.sleep", lambda seconds: add_points(folder, step(2, 1, 2, 1.0, 0.5)))
    assert send(service) >= 2
