"""The card of a job in a notebook; a small server stands in for the coordinator. notebooks/ has a test with JupyterLab."""

import html
import http.server
import json
import os
import queue
import re
import sys
import threading
import types

import baton
import pytest
from baton import _card

PAGE = "<!doctype html><p>page of %s</p>"


class Coordinator(http.server.ThreadingHTTPServer):
    """Answers with the streams in `streams`, one for each connection, and with the page of `job`."""

    def __init__(self, folder):
        super().__init__(("127.0.0.1", 0), Answers)
        self.job, self.streams, self.asked, self.folder = "digits", queue.Queue(), [], folder
        self.is_other_run = False
        self.write_endpoint()
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def write_endpoint(self):
        # A coordinator that listens on all interfaces.
        endpoint = {"address": f"0.0.0.0:{self.server_port}", "pid": 1, "tls": False, "run_id": "5-77"}
        (self.folder / "coordinator.json").write_text(json.dumps(endpoint))

    def close(self):
        self.shutdown()
        self.server_close()


class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        server = self.server
        server.asked.append((self.path, dict(self.headers)))
        if server.is_other_run:
            return self.answer(200, "application/grpc", "")
        if self.headers["authorization"] == "Bearer wrong":
            return self.answer(401, "application/json", '{"error": "this coordinator does not know that token"}')
        if self.path == "/api/report":
            return self.answer(200, "text/html; charset=utf-8", PAGE % server.job)
        events = server.streams.get()
        if isinstance(events, int):
            return self.answer(events, "application/json", '{"error": "Last-Event-ID is not an id of this stream"}')
        return self.answer(200, "text/event-stream", "".join(events))

    def answer(self, code, kind, text):
        self.send_response(code)
        self.send_header("content-type", kind)
        self.send_header("baton-cursor", "7.100.1")
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


def sent(name, value, cursor=None):
    return f"event: {name}\n" + (f"id: {cursor}\n" if cursor else "") + f"data: {json.dumps(value)}\n\n"


def status(phase, name="digits"):
    return sent("status", {"phase": phase, "name": name})


@pytest.fixture
def coordinator(tmp_path):
    server = Coordinator(tmp_path)
    yield server
    server.close()


class Outputs(list):
    """The contents that each output of a notebook has had, in order."""

    def __init__(self):
        self.changed = threading.Condition()

    def add(self, contents, data):
        with self.changed:
            contents.append(data)
            self.changed.notify_all()

    def until(self, output, text):
        """Waits until an output has a text."""
        with self.changed:
            assert self.changed.wait_for(lambda: any(text in data["text/html"] for data in self[output]), 30), text


@pytest.fixture
def outputs(monkeypatch):
    shown = Outputs()

    def display(data, raw, display_id):
        assert raw and display_id
        contents = [data]
        shown.append(contents)
        return types.SimpleNamespace(update=lambda data, raw: shown.add(contents, data))

    module = types.ModuleType("IPython")
    module.display = types.SimpleNamespace(display=display)
    module.get_ipython = lambda: types.SimpleNamespace(kernel=True)
    monkeypatch.setitem(sys.modules, "IPython", module)
    monkeypatch.setattr(_card, "_cards", {})
    monkeypatch.setattr(_card, "_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(_card, "_NEWS_SECONDS", 0.0)
    return shown


def page_in(data):
    """The page of a card."""
    return html.unescape(re.search(r'srcdoc="([^"]*)"', data["text/html"])[1])


def news_in(output):
    """What the scripts of an output have sent."""
    scripts = [data["text/html"] for data in output if data["text/html"]]
    assert all(script.count("<") == 2 for script in scripts), "a text of the job is markup"
    found = [re.search(r"= \[cards\[\S+\], (.*)\];", script)[1] for script in scripts]
    return [json.loads(news) for news in found]


def test_a_job_is_followed_from_its_report_to_its_end(coordinator, outputs, tmp_path, programs):
    programs("baton", "exit 1")
    coordinator.streams.put(
        [
            status("training"),
            ": keep-alive\n\n",
            sent("point", {"step": {"step": 8}}, "7.200.1"),
            sent("event", {"id": 8, "message": "</script><img>"}, "8.200.1"),
            status("ended"),
        ]
    )
    baton.Job(tmp_path)._ipython_display_()
    _card.settle(tmp_path)

    card, news = outputs
    assert [page_in(data) for data in card] == [PAGE % "digits"] * 2
    assert card[0]["text/plain"].startswith("baton.attach(")
    got = news_in(news)
    assert [it["status"]["phase"] for it in got if it["status"]] == ["training", "ended"]
    assert [point for it in got for point in it["points"]] == [{"step": {"step": 8}}]
    assert [event["message"] for it in got for event in it["events"]] == ["</script><img>"]
    assert news[-1]["text/html"] == "", "the last report has all of it"
    (_, first), (path, headers), _ = coordinator.asked
    assert first["baton-run"] == headers["baton-run"] == "5-77"
    assert (path, headers["last-event-id"]) == ("/api/stream", "7.100.1")


def test_a_lost_coordinator_is_said_and_followed_where_it_comes_back(coordinator, outputs, tmp_path):
    coordinator.streams.put([status("training"), sent("event", {"id": 8}, "8.100.1")])
    (tmp_path / "report.html").write_text(PAGE % "an earlier run")
    os.utime(tmp_path / "report.html", (1, 1))
    _card.show(tmp_path, "digits")
    outputs.until(1, '"id": 8')
    (tmp_path / "coordinator.json").unlink()
    # It may have connected once more.
    coordinator.streams.put([])
    outputs.until(1, "No coordinator runs")
    coordinator.streams = queue.Queue()
    coordinator.streams.put([status("ended")])
    coordinator.write_endpoint()
    _card.settle(tmp_path)

    assert page_in(outputs[0][-1]) == PAGE % "digits"
    cursors = [headers["last-event-id"] for path, headers in coordinator.asked if path == "/api/stream"]
    assert cursors[-1] == "8.100.1"
    assert news_in(outputs[1])[-1]["lost"] is None


def test_news_that_was_received_and_not_sent_is_asked_for_again(coordinator, outputs, tmp_path, monkeypatch):
    monkeypatch.setattr(_card, "_NEWS_SECONDS", 10_000_000.0)
    event = sent("event", {"id": 8}, "8.100.1")
    # The event comes too soon after the status to be sent, and then the stream ends.
    coordinator.streams.put([status("training"), event])
    coordinator.streams.put([event, status("ended")])
    monkeypatch.setattr(_card.time, "monotonic", iter(range(100_000_000, 1_000_000_000)).__next__)
    _card.show(tmp_path, "digits")
    _card.settle(tmp_path)

    cursors = [headers["last-event-id"] for path, headers in coordinator.asked if path == "/api/stream"]
    assert cursors == ["7.100.1", "7.100.1"]
    assert [event["id"] for it in news_in(outputs[1]) for event in it["events"]] == [8]


def test_a_card_of_long_ago_is_drawn_anew(coordinator, outputs, tmp_path, monkeypatch):
    monkeypatch.setattr(_card, "_REDRAW_SECONDS", -1.0)
    coordinator.streams.put([status("training")])
    monkeypatch.setattr(_card, "_SETTLE_SECONDS", 30.0)
    coordinator.streams.put([status("ended")])
    _card.show(tmp_path, "digits")
    _card.settle(tmp_path)

    identities = [re.search(r'id="([^"]*)"', data["text/html"])[1] for data in outputs[0]]
    assert len(identities) == 3, "shown, drawn anew, and at the end"
    scripts = [data["text/html"] for data in outputs[1] if data["text/html"]]
    assert f'delete cards["{identities[0]}"]' in scripts[-1], "the news of the first are dropped"
    assert not any(news["lost"] for news in news_in(outputs[1]))


def test_a_job_that_ended_unseen_is_shown_by_the_report_in_its_folder(coordinator, outputs, tmp_path):
    coordinator.streams.put([status("training")])
    _card.show(tmp_path, "digits")
    outputs.until(1, "training")
    (tmp_path / "report.html").write_text(PAGE % "the end")
    os.utime(tmp_path / "report.html", (1 << 33, 1 << 33))
    (tmp_path / "coordinator.json").unlink()
    coordinator.streams.put([])
    _card.settle(tmp_path)

    assert page_in(outputs[0][-1]) == PAGE % "the end"


def test_another_job_in_the_folder_replaces_the_first(coordinator, outputs, tmp_path):
    coordinator.streams.put(400)
    coordinator.streams.put([status("ended")])
    _card.show(tmp_path, "digits")
    _card.settle(tmp_path)

    identities = [re.search(r'id="([^"]*)"', data["text/html"])[1] for data in outputs[0]]
    assert len(set(identities)) == 3, "news of the one would be drawn in the other"


def test_a_cell_that_runs_again_replaces_its_card(coordinator, outputs, tmp_path):
    _card.show(tmp_path, "digits")
    first = _card._cards[tmp_path.resolve()]
    _card.show(tmp_path, "digits")
    coordinator.streams.put([status("training")])
    coordinator.streams.put([status("ended")])
    coordinator.streams.put([status("ended")])
    _card.settle(tmp_path)
    first.settle()

    assert not news_in(outputs[1])
    assert page_in(outputs[2][-1]) == PAGE % "digits"


@pytest.mark.parametrize(
    ("trouble", "problem"),
    [
        ("folder", "No coordinator runs in "),
        ("run", "The coordinator refuses: it serves another run folder"),
        ("token", "The coordinator refuses: this coordinator does not know that token"),
        ("gone", "The coordinator does not answer: "),
    ],
)
def test_without_a_card_there_is_a_line_that_says_why(
    coordinator, outputs, tmp_path, capsys, monkeypatch, trouble, problem
):
    match trouble:
        case "folder":
            (tmp_path / "coordinator.json").unlink()
        case "run":
            coordinator.is_other_run = True
        case "token":
            (tmp_path / "token").write_text("wrong\n")
            monkeypatch.setenv("BATON_TOKEN_FILE", str(tmp_path / "token"))
        case "gone":
            (tmp_path / "coordinator.json").write_text('{"address": "127.0.0.1:1"}')
    _card.show(tmp_path, "digits: training")

    assert capsys.readouterr().out.startswith(f"digits: training; no card: {problem}")
    assert outputs == []


def test_outside_a_notebook_a_line_is_printed(coordinator, outputs, tmp_path, capsys):
    sys.modules["IPython"].get_ipython = lambda: None
    _card.show(tmp_path, "digits: training")

    assert capsys.readouterr().out == "digits: training\n"
    assert coordinator.asked == []


def test_a_run_is_shown_by_its_report(tmp_path):
    (tmp_path / "journal.redb").touch()
    run = baton.Run(tmp_path)
    assert run._repr_html_() is None
    (tmp_path / "report.html").write_text(PAGE % "digits")
    assert page_in({"text/html": run._repr_html_()}) == PAGE % "digits"
