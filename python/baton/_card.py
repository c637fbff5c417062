"""Shows a job in a notebook: the dashboard's page in a frame, kept up to date by this Python.

The frame loads nothing: Python reads the job's report and its news from the coordinator, and sends them through the
notebook's own connection. So it works wherever the notebook does, without a port that a browser has to reach.
"""

from __future__ import annotations

import contextlib
import html
import http.client
import ipaddress
import json
import os
import secrets
import ssl
import threading
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

# The coordinator sends something at least every 10 s.
_TIMEOUT_SECONDS = 15.0
_RETRY_SECONDS = 1.0
_NEWS_SECONDS = 1.0
# The saved notebook, and a page that is loaded again, have the report of this time, and not the news since then.
_REDRAW_SECONDS = 600.0
# How long the end of a job may take to appear.
_SETTLE_SECONDS = 10.0
_FRAME_HEIGHT = 640

# In the page around the frame: keeps all news, because a frame that was hidden is loaded anew and asks for them.
_SCRIPT = """
(() => {
  const cards = (window.batonCards ??= {});
  delete cards[OLD];
  const frameOf = () => document.getElementById(ID)?.contentWindow;
  if (!cards[ID]) {
    cards[ID] = { status: null, points: [], events: [], lost: null };
    window.addEventListener("message", ({ source, data }) => {
      if (data === "baton-report" && source === frameOf() && cards[ID]) {
        source.postMessage({ ...cards[ID], isAll: true }, "*");
      }
    });
  }
  const [all, news] = [cards[ID], NEWS];
  frameOf()?.postMessage(news, "*");
  all.status = news.status ?? all.status;
  all.points.push(...news.points);
  all.events.push(...news.events);
  all.lost = news.lost;
})();
"""


class NoCoordinatorError(Exception):
    """The coordinator of a run folder does not answer, or refuses; the text says why."""


class OtherJobError(Exception):
    """The coordinator serves another job than before."""


def show(run_dir: Path, text: str) -> None:
    """Shows the job of a run folder in a notebook, and follows it in the background until it ends.

    The card of a job that has ended is its report. Outside a notebook, or if there is nothing to show, prints `text`.
    """
    from IPython import display, get_ipython

    if not hasattr(get_ipython(), "kernel"):
        print(text)
        return
    card = _Card(run_dir, text, display.display)
    # A cell that runs again replaces its card.
    if earlier := _cards.pop(run_dir.resolve(), None):
        earlier.leave()
    try:
        card.draw(*report(run_dir))
    except NoCoordinatorError as error:
        if page := report_file(run_dir):
            card.draw(page, None)
        else:
            print(f"{text}; no card: {error}")
        return
    _cards[run_dir.resolve()] = card
    card.start()


def settle(run_dir: Path) -> None:
    """Waits until the card of a job that has ended shows its end."""
    if card := _cards.get(run_dir.resolve()):
        card.settle()


# The newest card of each run folder.
_cards: dict[Path, _Card] = {}


def frame(page: str, identity: str = "") -> str:
    """A page in a frame that can reach neither the notebook nor a network."""
    return (
        f'<iframe id="{identity}" title="Baton" sandbox="allow-scripts" srcdoc="{html.escape(page)}" '
        f'style="width: 100%; height: {_FRAME_HEIGHT}px; border: 1px solid #8886; border-radius: 6px"></iframe>'
    )


class _Card:
    """A report in a notebook's output, and a second output, whose script sends it what is new."""

    def __init__(self, run_dir: Path, text: str, display: Any) -> None:
        self._run_dir = run_dir
        self._text = text
        self._display = display
        self._handles: tuple[Any, Any] | None = None
        self._frame_id, self._old_frame_id = "", ""
        self._drawn_at = 0.0
        self._cursor: str | None = None
        self._is_left = threading.Event()
        self._thread = threading.Thread(target=self._follow, name=f"card of {run_dir}", daemon=True)

    def start(self) -> None:
        """Follows the job in the background."""
        self._thread.start()

    def leave(self) -> None:
        """Stops following; the card stays as it is."""
        self._is_left.set()

    def settle(self) -> None:
        self._thread.join(_SETTLE_SECONDS)

    def draw(self, page: str, cursor: str | None) -> None:
        """Shows a report, from which the news at `cursor` go on."""
        self._cursor = cursor
        self._drawn_at = time.monotonic()
        self._old_frame_id = self._frame_id
        self._frame_id = f"baton-{secrets.token_hex(8)}"
        card = {"text/html": frame(page, self._frame_id), "text/plain": self._text}
        news = {"text/html": "", "text/plain": ""}
        if self._handles:
            for handle, data in zip(self._handles, (card, news), strict=True):
                handle.update(data, raw=True)
        else:
            self._handles = tuple(self._display(data, raw=True, display_id=True) for data in (card, news))

    def _follow(self) -> None:
        """Sends news until the job ends or the card is replaced."""
        # When the coordinator last answered.
        answered_at = time.time()
        while not self._is_left.is_set():
            try:
                with contextlib.closing(stream(self._run_dir, self._cursor)) as events:
                    for has_ended in self._send(events):
                        answered_at = time.time()
                        if has_ended:
                            return self._draw_end(answered_at)
                        if time.monotonic() - self._drawn_at > _REDRAW_SECONDS:
                            self.draw(*report(self._run_dir))
                            break
                    else:
                        self._lose("The coordinator has closed the connection")
                continue
            except OtherJobError:
                problem = "Another job runs here"
                with contextlib.suppress(NoCoordinatorError):
                    self.draw(*report(self._run_dir))
            except NoCoordinatorError as error:
                problem = str(error)
                # A job that ends between two statuses.
                if page := report_file(self._run_dir, answered_at):
                    return self.draw(page, None)
            self._lose(problem)

    def _lose(self, problem: str) -> None:
        """Says that the coordinator cannot be followed now, and waits before the next try."""
        if not self._is_left.is_set():
            self._publish(None, {}, f"{problem}; retrying.")
            self._is_left.wait(_RETRY_SECONDS)

    def _draw_end(self, since: float) -> None:
        """Shows the whole report once more, so that a saved notebook has how the job ended."""
        try:
            page, _ = report(self._run_dir)
        except NoCoordinatorError:
            page = report_file(self._run_dir, since) or ""
        if page:
            self.draw(page, None)

    def _send(self, events: Iterator[tuple[str, Any, str | None]]) -> Iterator[bool]:
        """Sends the news of a stream, at most once a second; yields whether the job has ended."""
        status: dict[str, Any] | None = None
        new: dict[str, list[Any]] = {"point": [], "event": []}
        sent_at, after = 0.0, self._cursor
        for name, value, cursor in events:
            if self._is_left.is_set():
                return
            after = cursor or after
            if name == "status":
                status = value
            elif name in new:
                new[name].append(value)
            has_ended = status is not None and status["phase"] == "ended"
            if has_ended or time.monotonic() - sent_at >= _NEWS_SECONDS:
                self._publish(status, new, None)
                # What was received and not sent is received again.
                sent_at, self._cursor = time.monotonic(), after
                status, new = None, {"point": [], "event": []}
            yield has_ended

    def _publish(self, status: dict[str, Any] | None, new: dict[str, list[Any]], lost: str | None) -> None:
        points, events = new.get("point", []), new.get("event", [])
        news = json.dumps({"status": status, "points": points, "events": events, "lost": lost})
        # No text of a job can end the element.
        script = (
            _SCRIPT.replace("OLD", json.dumps(self._old_frame_id))
            .replace("ID", json.dumps(self._frame_id))
            .replace("NEWS", news.replace("<", "\\u003c"))
        )
        assert self._handles
        self._handles[1].update({"text/html": f"<script>{script}</script>", "text/plain": ""}, raw=True)


def report(run_dir: Path) -> tuple[str, str | None]:
    """The report of the job so far, and where its news go on. Raises NoCoordinatorError."""
    with contextlib.closing(_connect(run_dir)) as connection, _answer(connection, run_dir, "/api/report") as answer:
        try:
            return answer.read().decode(), answer.headers["baton-cursor"]
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise NoCoordinatorError(f"The connection to the coordinator is lost: {error}") from error


def stream(run_dir: Path, cursor: str | None) -> Generator[tuple[str, Any, str | None]]:
    """The news of a job after `cursor`: name, value and the cursor after it; an empty name about every 10 s without
    news. Raises NoCoordinatorError, and OtherJobError if the cursor is that of another job."""
    headers = {"last-event-id": cursor} if cursor else {}
    with (
        contextlib.closing(_connect(run_dir)) as connection,
        _answer(connection, run_dir, "/api/stream", headers) as answer,
    ):
        name, value, after = "", "", None
        while line := _read_line(answer):
            field, _, text = line.decode().rstrip("\r\n").partition(": ")
            if field == "event":
                name = text
            elif field == "data":
                value += text
            elif field == "id":
                after = text
            elif field == "":
                yield name, json.loads(value) if value else None, after
                name, value, after = "", "", None


def _read_line(answer: http.client.HTTPResponse) -> bytes:
    try:
        return answer.readline()
    except (OSError, http.client.HTTPException) as error:
        raise NoCoordinatorError(f"The connection to the coordinator is lost: {error}") from error


def _answer(
    connection: http.client.HTTPConnection, run_dir: Path, path: str, headers: dict[str, str] | None = None
) -> http.client.HTTPResponse:
    try:
        connection.request("GET", path, headers={**_run_headers(run_dir), **(headers or {})})
        answer = connection.getresponse()
        if answer.status == http.HTTPStatus.OK and not answer.headers.get_content_type().startswith("application/"):
            return answer
        if answer.status == http.HTTPStatus.BAD_REQUEST and headers:
            raise OtherJobError
        problem = json.loads(answer.read() or b"{}").get("error", "it serves another run folder")
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise NoCoordinatorError(f"The coordinator does not answer: {error}") from error
    raise NoCoordinatorError(f"The coordinator refuses: {problem}")


def _connect(run_dir: Path) -> http.client.HTTPConnection:
    endpoint = _endpoint(run_dir)
    host, _, port = endpoint["address"].rpartition(":")
    host = host.strip("[]")
    if ipaddress.ip_address(host).is_unspecified:
        host = "127.0.0.1"
    if not endpoint.get("tls"):
        return http.client.HTTPConnection(host, int(port), timeout=_TIMEOUT_SECONDS)
    try:
        context = ssl.create_default_context(cafile=os.environ.get("BATON_TLS_CA") or None)
        if certificate := os.environ.get("BATON_TLS_CERT"):
            context.load_cert_chain(certificate, os.environ.get("BATON_TLS_KEY"))
    except OSError as error:
        raise NoCoordinatorError(f"BATON_TLS_CA, BATON_TLS_CERT or BATON_TLS_KEY cannot be used: {error}") from error
    return http.client.HTTPSConnection(host, int(port), timeout=_TIMEOUT_SECONDS, context=context)


def _run_headers(run_dir: Path) -> dict[str, str]:
    """The token, as for the command line, and the run that is meant: another job may have taken a port over."""
    headers = {}
    if run_id := _endpoint(run_dir).get("run_id"):
        headers["baton-run"] = run_id
    token = os.environ.get("BATON_TOKEN")
    if file := os.environ.get("BATON_TOKEN_FILE"):
        token = token or Path(file).read_text(encoding="utf-8")
    if token:
        headers["authorization"] = f"Bearer {token.strip()}"
    return headers


def _endpoint(run_dir: Path) -> dict[str, Any]:
    try:
        endpoint: dict[str, Any] = json.loads((run_dir / "coordinator.json").read_bytes())
        return endpoint
    except (OSError, ValueError) as error:
        raise NoCoordinatorError(f"No coordinator runs in {run_dir}") from error


def report_file(run_dir: Path, since: float = 0) -> str | None:
    """The report in the run folder, if it was written after a Unix time."""
    path = run_dir / "report.html"
    try:
        return path.read_text(encoding="utf-8") if path.stat().st_mtime >= since else None
    except OSError:
        return None
