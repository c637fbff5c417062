"""`python -m baton track` and `python -m baton alert`, beside a job; `baton track` and `baton alert` start them."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

from baton._alert import KINDS, Email, Webhook, alert, newest_sent, place_of
from baton._job import attach
from baton._programs import JobError
from baton._run import Run
from baton._track import MlflowTracker, TrackerUnavailableError, WandbTracker, track

_FAILED = 1
_BAD_INPUT = 2
_TRACK_EXAMPLES = """examples:
  baton track --wandb cats                            the newest run below runs/, until it ends
  WANDB_MODE=offline baton track --wandb cats         `wandb sync` sends it later
  baton track runs/cats --mlflow http://mlflow:5000 --experiment cats
  baton track runs/cats --mlflow sqlite:///runs.db --once    what is there now, into a file

Needs `pip install wandb`, or `pip install mlflow-skinny` (a database: `mlflow`). Start it again after an interruption: it continues the same
run, and sends no step twice.
"""
_ALERT_EXAMPLES = """examples:
  baton alert --slack-file slack-url                  the newest run below runs/, until it ends
  baton alert runs/cats --webhook-file url --on notice,end
  baton alert runs/cats --email me@lab.org --smtp mail.lab.org

Files contain a URL or a password, which is never printed. Start it again after an interruption: no event is sent twice.
"""


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        code: int = options.run(options)
        return code
    except KeyboardInterrupt:
        return 130
    except ImportError as error:
        name = str(error.name).partition(".")[0]
        _refuse(f"{name} is not installed: pip install {'mlflow-skinny' if name == 'mlflow' else name}")
    except TrackerUnavailableError as error:
        _refuse(str(error), _FAILED)
    except (JobError, OSError, ValueError) as error:
        _refuse(str(error))
    except Exception as error:
        # Of a client, each of which has a base class of its own.
        if type(error).__module__.partition(".")[0] not in ("wandb", "mlflow"):
            raise
        _refuse(str(error).strip().partition("\n")[0])


def _refuse(problem: str, code: int = _BAD_INPUT) -> NoReturn:
    print(f"error: {problem}", file=sys.stderr)
    sys.exit(code)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="baton", description="Follows a job, for people and for services.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, about: str, examples: str) -> argparse.ArgumentParser:
        formatter = argparse.RawDescriptionHelpFormatter
        added = commands.add_parser(name, help=about, description=about, epilog=examples, formatter_class=formatter)
        added.add_argument("run_dir", nargs="?", type=Path, metavar="RUN_DIR", help="default: the newest below runs/")
        return added

    tracking = command("track", "Send a job's metrics to Weights & Biases or MLflow, until it ends", _TRACK_EXAMPLES)
    service = tracking.add_mutually_exclusive_group(required=True)
    service.add_argument("--wandb", metavar="PROJECT", help="a project of Weights & Biases")
    service.add_argument("--mlflow", metavar="URI", help="a tracking server of MLflow, or a database")
    tracking.add_argument("--experiment", default="baton", metavar="NAME", help="of MLflow (default: %(default)s)")
    tracking.add_argument("--once", action="store_true", help="send what is there, and do not follow the job")
    tracking.set_defaults(run=_track)

    alerting = command("alert", "Tell people what happens to a job, until it ends", _ALERT_EXAMPLES)
    alerting.add_argument("--webhook-file", type=Path, metavar="FILE", help="with a URL that takes JSON by POST")
    alerting.add_argument("--slack-file", type=Path, metavar="FILE", help="with the URL of a Slack webhook")
    alerting.add_argument("--email", action="append", default=[], metavar="ADDRESS", help="may be repeated")
    alerting.add_argument("--smtp", metavar="HOST[:PORT]", help="the server that takes e-mail")
    alerting.add_argument("--smtp-user", metavar="NAME", help="logs in, over STARTTLS")
    alerting.add_argument("--smtp-password-file", type=Path, metavar="FILE", help="password of --smtp-user")
    alerting.add_argument("--from", dest="sender", metavar="ADDRESS", help="(default: the first --email)")
    kinds = ",".join(sorted(set(KINDS.values())))
    alerting.add_argument("--on", metavar="KIND,…", help=f"of {kinds} (default: all)")
    alerting.set_defaults(run=_alert)
    return parser


def _newest(run_dir: Path | None) -> Path:
    if run_dir is not None:
        return run_dir
    runs = sorted(Path("runs").glob("*/journal.redb"), key=lambda journal: journal.stat().st_mtime)
    if not runs:
        raise FileNotFoundError("there is no run below runs/: name a run folder")
    return runs[-1].parent


def _track(options: argparse.Namespace) -> int:
    # An end in order lets W&B's client write what it has.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    run_dir = _newest(options.run_dir)

    def open_tracker(title: str, known: str | None) -> Any:
        if options.wandb:
            return WandbTracker(options.wandb, title, run_dir, known)
        return MlflowTracker(options.mlflow, options.experiment, title, known)

    if options.wandb:
        name, place = "wandb", f"project {options.wandb}"
    else:
        name, place = "mlflow", f"experiment {options.experiment}"
    sent = track(run_dir, open_tracker, name, place, follow=not options.once)
    print(f"{run_dir}: {sent} points sent")
    return 0


def _alert(options: argparse.Namespace) -> int:
    run_dir = _newest(options.run_dir)
    receivers: list[Any] = []
    if options.webhook_file:
        receivers.append(Webhook(_secret(options.webhook_file)))
    if options.slack_file:
        receivers.append(Webhook(_secret(options.slack_file), is_slack=True))
    if options.email:
        if not options.smtp:
            raise ValueError("--email needs --smtp HOST[:PORT]")
        password = _secret(options.smtp_password_file) if options.smtp_password_file else None
        sender = options.sender or options.email[0]
        receivers.append(Email(options.smtp, sender, options.email, options.smtp_user, password))
    if not receivers:
        raise ValueError("nobody to tell: give --webhook-file, --slack-file or --email")
    kinds = set(options.on.split(",")) if options.on else None
    if unknown := (kinds or set()) - set(KINDS.values()):
        raise ValueError(f"--on: {unknown.pop()!r} is none of {', '.join(sorted(set(KINDS.values())))}")
    sent_until = run_dir / place_of(receivers)
    status, events = _events(run_dir, sent_until)
    failed = alert(status["name"], status["job_id"], events, receivers, sent_until, kinds=kinds)
    if failed:
        print(f"error: {failed} message{'s' if failed > 1 else ''} could not be sent", file=sys.stderr)
    return 1 if failed else 0


def _events(run_dir: Path, sent_until: Path) -> tuple[dict[str, Any], Iterable[dict[str, Any]]]:
    """A job's status, and those of its events that were not sent: as they happen, or those of its report if it has ended."""
    try:
        job = attach(run_dir)
        status = job.status()
        return status, job.watch(newest_sent(sent_until, status["job_id"]))
    except JobError:
        with contextlib.suppress(FileNotFoundError):
            run = Run(run_dir)
            status, events = run.status(), run.events()
            after = newest_sent(sent_until, status["job_id"])
            return status, [event for event in events if event["id"] > after]
        raise


def _secret(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8").strip()
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a text file") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; name a file that has the secret in it") from None
    if not text:
        raise ValueError(f"{path} is empty")
    return text


if __name__ == "__main__":
    sys.exit(main())
