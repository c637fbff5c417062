"""`python -m baton`."""

import json
import sys

import pytest
from baton import _track
from baton.__main__ import main
from baton._alert import Webhook, place_of
from run_files import add_points, evaluation, step


def refused(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main([*map(str, arguments)])
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert ended.value.code == 2, error
    return error


def test_bad_input_is_one_line(tmp_path, monkeypatch, capsys, no_programs):
    monkeypatch.chdir(tmp_path)
    assert refused(capsys, "alert") == "error: there is no run below runs/: name a run folder"
    assert refused(capsys, "track", tmp_path, "--wandb", "cats").endswith("is no run folder: it has no journal.redb")
    run = tmp_path / "run"
    add_points(run)
    assert refused(capsys, "alert", run) == "error: nobody to tell: give --webhook-file, --slack-file or --email"
    assert refused(capsys, "alert", run, "--email", "a@b.c") == "error: --email needs --smtp HOST[:PORT]"
    empty = tmp_path / "empty-url"
    empty.touch()
    assert refused(capsys, "alert", run, "--slack-file", empty).endswith("empty-url is empty")
    empty.write_bytes(b"\x86\xff")
    assert refused(capsys, "alert", run, "--slack-file", empty).endswith("empty-url is not a text file")
    empty.write_text("not a url")
    assert "has no URL, in one line: it begins with https://" in refused(capsys, "alert", run, "--webhook-file", empty)
    assert (
        refused(capsys, "alert", run, "--email", "a@b.c", "--smtp", "h:x")
        == "error: --smtp h:x: give HOST or HOST:PORT"
    )
    assert "'sunday' is none of budget, divergence" in refused(
        capsys, "alert", run, "--email", "a@b.c", "--smtp", "h", "--on", "sunday"
    )


def test_a_job_that_ended_while_nobody_listened_is_reported_later(tmp_path, monkeypatch, capsys, programs):
    programs("baton", "echo 'error: no coordinator is running' >&2; exit 1")
    run, url = tmp_path / "run", tmp_path / "url"
    add_points(run)
    url.write_text("https://hooks.lab.org/cats")
    assert refused(capsys, "alert", run, "--webhook-file", url) == "error: no coordinator is running"
    events = [{"id": number, "kind": kind} for number, kind in ((86, "saved"), (87, "ended"))]
    (run / "report.json").write_text(json.dumps({"status": {"name": "cats", "job_id": "a"}, "events": events}))
    (run / place_of([Webhook("https://hooks.lab.org/cats")])).write_text('{"job": "a", "after": 86}')
    sent = []
    monkeypatch.setattr("baton.__main__.alert", lambda name, job, events, *_, **__: sent.append((job, events)) or 0)
    assert main(["alert", str(run), "--webhook-file", str(url)]) == 0
    assert sent == [("a", events[1:])]


def test_a_new_job_in_the_folder_is_reported_from_its_first_event_running_or_ended(
    tmp_path, monkeypatch, capsys, programs
):
    run, url, sent = tmp_path / "run", tmp_path / "url", []
    add_points(run)
    url.write_text("https://hooks.lab.org/cats")
    monkeypatch.setattr(Webhook, "send", lambda self, name, event: sent.append((name, event["id"])))
    (run / place_of([Webhook("https://hooks.lab.org/cats")])).write_text('{"job": "a", "after": 57}')
    programs(
        "baton",
        """case "$*" in
        status*) echo '{"name": "cats", "job_id": "b", "phase": "training"}' ;;
        watch*"--after 0 "*) echo '{"id": 4, "kind": "recovered", "message": ""}' ;;
        *) echo "error: $*" >&2; exit 1 ;;
        esac""",
    )
    assert main(["alert", str(run), "--webhook-file", str(url)]) == 0
    programs("baton", "echo 'error: no coordinator is running' >&2; exit 1")
    events = [{"id": number, "kind": "ended", "message": ""} for number in (1, 2)]
    report = {"status": {"name": "cats", "job_id": "c"}, "events": events}
    (run / "report.json").write_text(json.dumps(report))
    assert main(["alert", str(run), "--webhook-file", str(url)]) == 0
    assert sent == [("cats", 4), ("cats", 1), ("cats", 2)]


def test_a_client_that_is_missing_is_named_with_its_command(tmp_path, monkeypatch, capsys, no_programs):
    for package in ("wandb", "mlflow"):
        monkeypatch.setitem(sys.modules, package, None)
    add_points(tmp_path / "run")
    for flag, package in (("--wandb", "wandb"), ("--mlflow", "mlflow-skinny")):
        error = refused(capsys, "track", tmp_path / "run", flag, "x")
        assert error == f"error: {flag.strip('-')} is not installed: pip install {package}"


class UnreliableTracker:
    """Takes what was logged at the calls of `flush` whose numbers are in `answers`."""

    run_id, newest = "unreliable", None

    def __init__(self, answers):
        self.answers, self.calls = answers, 0
        self.waiting, self.taken, self.finished = [], [], False

    def log(self, kind, step, unix_millis, values):
        self.waiting.append(step)

    def flush(self):
        self.calls += 1
        if self.calls not in self.answers:
            raise _track.TrackerUnavailableError("it does not answer")
        self.taken += self.waiting
        self.waiting = []

    def finish(self, succeeded):
        self.finished = True


def test_metrics_wait_for_a_service_that_does_not_answer(tmp_path, monkeypatch, capsys, no_programs):
    monkeypatch.setattr(_track, "_POLL_SECONDS", 0)
    run = tmp_path / "run"
    add_points(run, step(0, 1, 1, 2.5, 0.1), evaluation(1, 1, 1, 0.1))
    (run / "report.json").write_text(json.dumps({"status": {"outcome": None}, "events": []}))

    unreachable = UnreliableTracker(answers=[])
    with pytest.raises(_track.TrackerUnavailableError, match="the same command sends what is left"):
        _track.track(run, lambda title, known: unreachable, "unreliable", "here")
    assert not unreachable.finished
    assert capsys.readouterr().err.count("metrics wait until it answers") == 1

    later = UnreliableTracker(answers=[4])
    sent = _track.track(run, lambda title, known: later, "unreliable", "here")
    assert later.finished and len(later.taken) == sent == 2
    assert "the metrics that waited are sent" in capsys.readouterr().err

    again = UnreliableTracker(answers=[1])
    assert _track.track(run, lambda title, known: again, "unreliable", "here") == 0
    assert again.taken == []
