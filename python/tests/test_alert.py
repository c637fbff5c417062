"""Telling people about events."""

import http.server
import json
import socketserver
import threading

import pytest
from baton._alert import Email, Webhook, alert, newest_sent, place_of


def event(number, kind, message="lost"):
    return {"id": number, "kind": kind, "message": message, "step": 7, "generation": 1, "unix_millis": 5}


@pytest.fixture
def web():
    """A server that answers POST with the codes in `web.codes`, then 200, and keeps what it got."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.server.got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(self.server.codes.pop(0) if self.server.codes else 200)
            self.send_header("Location", "/elsewhere")
            self.end_headers()

        def do_GET(self):
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with serving(http.server.HTTPServer(("127.0.0.1", 0), Handler)) as server:
        server.codes, server.got = [], []
        server.url = f"http://127.0.0.1:{server.server_port}/secret-path"
        yield server


class serving:
    def __init__(self, server):
        self.server = server

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self.server

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()


class Mail(socketserver.StreamRequestHandler):
    """Takes messages as an SMTP server."""

    def handle(self):
        self.wfile.write(b"220 ready\r\n")
        while line := self.rfile.readline():
            word = line[:4].upper()
            if word == b"DATA":
                self.wfile.write(b"354 go on\r\n")
                lines = iter(self.rfile.readline, b".\r\n")
                self.server.got.append(b"".join(lines).decode())
            self.wfile.write(b"221 bye\r\n" if word == b"QUIT" else b"250 ok\r\n")
            if word == b"QUIT":
                return


def test_the_kinds_that_are_asked_for_are_posted_once(web, tmp_path):
    file = tmp_path / "alert.json"
    events = [event(1, "saved"), event(2, "node_leaves"), event(3, "recovered"), event(4, "ended", "completed")]
    assert newest_sent(file, "a") == 0
    assert alert("cats", "a", events, [Webhook(web.url)], file, kinds={"notice", "end"}) == 0
    assert [(got["id"], got["subject"]) for got in web.got] == [(2, "cats: lost"), (4, "cats: completed")]
    assert web.got[0]["name"] == "cats" and web.got[0]["step"] == 7
    assert newest_sent(file, "a") == 4


def test_each_receiver_has_its_own_file_and_a_damaged_one_is_named(tmp_path):
    one, other = Webhook("https://a/secret"), Webhook("https://b/secret")
    names = {place_of([one]), place_of([other]), place_of([one, other])}
    assert len(names) == 3 and place_of([Webhook("https://a/secret")]) == place_of([one])
    assert all("secret" not in name for name in names)
    file = tmp_path / place_of([one])
    file.touch()
    with pytest.raises(ValueError, match="is damaged: remove it, and everything is sent again"):
        newest_sent(file, "a")


def test_another_job_in_the_run_folder_begins_with_its_first_event(tmp_path):
    file = tmp_path / "alert.json"
    alert("cats", "a", [event(57, "ended")], [], file)
    assert (newest_sent(file, "a"), newest_sent(file, "b")) == (57, 0)


def test_slack_gets_a_text(web, tmp_path):
    alert("cats", "a", [event(1, "diverged", "NaN")], [Webhook(web.url, is_slack=True)], tmp_path / "a")
    assert web.got == [{"text": "cats: NaN"}]


def test_a_failure_is_tried_again_and_no_secret_is_printed(web, tmp_path, capsys):
    waits = []
    web.codes = [500, 503]
    send = lambda events: alert("cats", "a", events, [Webhook(web.url)], tmp_path / "a", sleep=waits.append)
    assert send([event(1, "ended")]) == 0
    assert (len(web.got), waits) == (3, [1.0, 2.0])
    web.codes = [404] * 5
    assert send([event(2, "ended")]) == 1
    errors = capsys.readouterr().err
    assert "event 2: try 5 of 5 failed: HTTP 404" in errors and "secret" not in errors


def test_a_redirect_is_a_failure_because_it_would_lose_the_message(web, tmp_path, capsys):
    web.codes = [301, 302]
    assert alert("digits", "a", [event(1, "ended")], [Webhook(web.url)], tmp_path / "sent", sleep=lambda _: None) == 0
    assert [one["id"] for one in web.got] == [1, 1, 1]
    errors = capsys.readouterr().err
    assert "try 1 of 5 failed: HTTP 301" in errors and "elsewhere" not in errors


def test_an_e_mail_has_the_event(tmp_path):
    with serving(socketserver.TCPServer(("127.0.0.1", 0), Mail)) as server:
        server.got = []
        receiver = Email(f"127.0.0.1:{server.server_address[1]}", "a@lab.org", ["b@lab.org", "c@lab.org"], None, None)
        assert alert("cats", "a", [event(1, "budget", "90 % used")], [receiver], tmp_path / "a") == 0
    (mail,) = server.got
    for line in ["Subject: cats: 90 % used", "From: a@lab.org", "To: b@lab.org, c@lab.org", "kind: budget", "step: 7"]:
        assert line in mail


def test_a_server_that_answers_nonsense_ends_nothing_and_prints_no_address(tmp_path, capsys):
    class Nonsense(socketserver.StreamRequestHandler):
        def handle(self):
            self.rfile.readline()
            self.wfile.write(b"no HTTP\r\n\r\n")

    with serving(socketserver.TCPServer(("127.0.0.1", 0), Nonsense)) as server:
        url = f"http://127.0.0.1:{server.server_address[1]}/secret"
        assert alert("cats", "a", [event(1, "ended")], [Webhook(url)], tmp_path / "a", sleep=lambda _: None) == 1
    errors = capsys.readouterr().err
    assert "BadStatusLine" in errors and "secret" not in errors
    for bad in ("not a url", "https://a/secret b", "https://a:x/secret", "https:///secret", "file:///secret"):
        with pytest.raises(ValueError, match="the webhook's file has no URL, in one line"):
            Webhook(bad)


def test_a_message_of_several_lines_is_one_subject(tmp_path):
    with serving(socketserver.TCPServer(("127.0.0.1", 0), Mail)) as server:
        server.got = []
        receiver = Email(f"127.0.0.1:{server.server_address[1]}", "a@lab.org", ["b@lab.org"], None, None)
        assert alert("cats", "a", [event(1, "ended", "a\r\nb\rc")], [receiver], tmp_path / "a") == 0
    assert "Subject: cats: a b c" in server.got[0]


def test_a_server_that_is_not_there_ends_nothing(tmp_path, capsys):
    receiver = Email("127.0.0.1:1", "a@lab.org", ["b@lab.org"], "user", "secret")
    assert alert("cats", "a", [event(1, "ended")], [receiver], tmp_path / "a", sleep=lambda _: None) == 1
    assert "ConnectionRefusedError" in capsys.readouterr().err
