"""Tells people what happens to a job: by a webhook, Slack, or e-mail."""

from __future__ import annotations

import hashlib
import http.client
import json
import smtplib
import ssl
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable
from email.message import EmailMessage
from pathlib import Path
from typing import Any

from baton._files import read_json, write_json

# Events that people want to hear of, by their kind.
KINDS = {
    "node_leaves": "notice",
    "checkpoint_advised": "notice",
    "draining": "notice",
    "recovered": "recovery",
    "diverged": "divergence",
    "budget": "budget",
    "save_failed": "problem",
    "store_unavailable": "problem",
    "gpu_warning": "problem",
    "coordinator_moved": "problem",
    "ended": "end",
}
# Tries of one message, and seconds before the second; each further wait is twice as long.
_TRIES, _FIRST_WAIT = 5, 1.0
_TIMEOUT_SECONDS = 20.0


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Takes a redirect as a failure: following one turns a POST into a GET, without the message."""

    def redirect_request(self, *_: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirect)


class Webhook:
    """Posts a JSON object: an event of the job with its `name` and `subject`; for Slack, its `text` alone."""

    def __init__(self, url: str, *, is_slack: bool = False) -> None:
        if not _is_url(url):
            raise ValueError("the webhook's file has no URL, in one line: it begins with https:// or http://")
        self._url = url
        self._is_slack = is_slack

    def send(self, job: str, event: dict[str, Any]) -> None:
        subject = f"{job}: {event['message']}"
        content = {"text": subject} if self._is_slack else {"name": job, "subject": subject, **event}
        body = json.dumps(content).encode()
        request = urllib.request.Request(self._url, body, {"Content-Type": "application/json"})
        with _OPENER.open(request, timeout=_TIMEOUT_SECONDS):
            pass


def _is_url(text: str) -> bool:
    try:
        parts = urllib.parse.urlsplit(text)
        is_one_line = text.isprintable() and " " not in text
        return is_one_line and parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


class Email:
    """Sends a message by SMTP, with STARTTLS if a user name is given."""

    def __init__(self, server: str, sender: str, to: list[str], user: str | None, password: str | None) -> None:
        host, _, port = server.partition(":")
        if not host or not (port.isdecimal() or not port):
            raise ValueError(f"--smtp {server}: give HOST or HOST:PORT")
        self._server = (host, int(port or (587 if user else 25)))
        self._sender, self._to = sender, to
        self._user, self._password = user, password

    def send(self, job: str, event: dict[str, Any]) -> None:
        message = EmailMessage()
        # A header is one line.
        message["Subject"] = " ".join(f"{job}: {event['message']}".split())[:200]
        message["From"], message["To"] = self._sender, ", ".join(self._to)
        message.set_content("".join(f"{name}: {value}\n" for name, value in event.items()))
        with smtplib.SMTP(*self._server, timeout=_TIMEOUT_SECONDS) as server:
            if self._user is not None:
                server.starttls(context=ssl.create_default_context())
                server.login(self._user, self._password or "")
            server.send_message(message)


def alert(
    name: str,
    job: str,
    events: Iterable[dict[str, Any]],
    receivers: list[Any],
    sent_until: Path,
    *,
    kinds: set[str] | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Sends the events of these kinds (default: all of KINDS) of the job `job`, called `name`, to each receiver; returns
    how many could not be sent.

    The job and the newest id are kept in the file `sent_until`, so that no event is sent twice.
    """
    failed = 0
    for event in events:
        kind = KINDS.get(event["kind"])
        if kind is not None and (kinds is None or kind in kinds):
            failed += sum(not _sent(receiver, name, event, sleep) for receiver in receivers)
        write_json(sent_until, {"job": job, "after": event["id"]})
    return failed


def newest_sent(sent_until: Path, job: str) -> int:
    """The id of the newest event of this job that was sent; 0 if none was. The ids of each job begin at 1."""
    known = read_json(sent_until)
    after: int = known["after"] if known.get("job") == job else 0
    return after


def place_of(receivers: list[Any]) -> str:
    """A name of a file for these receivers, which keeps their addresses secret."""
    return f"alert-{hashlib.sha256(repr([vars(one) for one in receivers]).encode()).hexdigest()[:12]}.json"


def _sent(receiver: Any, name: str, event: dict[str, Any], sleep: Callable[[float], None]) -> bool:
    for number in range(_TRIES):
        try:
            receiver.send(name, event)
            return True
        except (OSError, http.client.HTTPException, smtplib.SMTPException) as error:
            # Neither the address nor what a server answered: both may contain a secret.
            problem = f"HTTP {error.code}" if isinstance(error, urllib.error.HTTPError) else type(error).__name__
            print(f"event {event['id']}: try {number + 1} of {_TRIES} failed: {problem}", file=sys.stderr)
            if number + 1 < _TRIES:
                sleep(_FIRST_WAIT * 2**number)
    return False
