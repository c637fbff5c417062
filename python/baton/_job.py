"""Starts, watches and controls jobs."""

from __future__ import annotations

import fcntl
import json
import numbers
import os
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from baton import _card, _programs
from baton._programs import JobError
from baton._run import Run

# What `baton up` prints, in the run folder.
_OUTPUT = "baton-up.jsonl"
_ERRORS = "baton-up.log"
_LOCK = "baton-up.lock"
# Exit codes of `baton up` that are not errors: complete, stopped, a limit is reached, saved and stopped.
_ENDS = (0, 3, 4, 75)
# As `baton up` itself waits for a coordinator.
_START_SECONDS = 120.0
_POLL_SECONDS = 0.25
# How long none may answer while a job of which only the store is known is waited for.
_AWAY_SECONDS = 60.0


def up(
    recipe: str | os.PathLike[str],
    *,
    set: Mapping[str, Any] | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    ranks: int | None = None,
    arguments: tuple[str, ...] = (),
) -> Job:
    """Trains on this machine, as `baton up` does, and returns once the job's coordinator answers.

    The job is a process of its own: it goes on if this Python ends or its kernel is restarted, and `attach` finds it
    again. If the run folder has an unfinished job, it is resumed where it stopped.

        job = baton.up("digits_cpu", set={"train.epochs": 3})
        job.wait()
        job.run.evaluations()

    `recipe` is a file, or the name of a recipe that comes with Baton. `set` changes values of the recipe. `run_dir` is
    `runs/NAME` by default, `ranks` one per GPU, or one. `arguments` are other flags of `baton up`.

    Raises JobError if the job does not start, with the line that says why; also if a job runs in the folder already.
    """
    baton = _programs.baton()
    if set is not None and not isinstance(set, Mapping):
        raise TypeError(f"set is a {type(set).__name__}: give a dictionary, such as {{'train.epochs': 3}}")
    if isinstance(arguments, str):
        raise TypeError(f"arguments is a text: give a list, such as {arguments.split()}")
    changes = [argument for key, value in (set or {}).items() for argument in ("--set", f"{key}={_toml(value)}")]
    if run_dir is None:
        (shown,) = _programs.call_baton("recipe", "show", "--json", os.fspath(recipe), *changes)
        run_dir = Path("runs", shown["name"])
    folder = _folder_of(run_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise JobError(f"run folder {folder} cannot be made: {error.strerror}; give another run_dir") from None
    deadline = time.monotonic() + _START_SECONDS
    # A job that has just ended leaves soon. After a `baton up` was killed, its ranks save first.
    while (status := _status(folder)) or _is_locked(folder):
        if status and status["phase"] != "ended":
            raise JobError(f"a job runs in {folder} already: baton.attach({os.fspath(folder)!r}) returns it")
        if time.monotonic() > deadline:
            raise JobError(f"processes of an earlier job in {folder} do not end: `fuser {folder}/{_LOCK}` lists them")
        time.sleep(_POLL_SECONDS)
    command = [baton, "up", os.fspath(recipe), *changes, "--json", "--run-dir", folder]
    if not any(argument.partition("=")[0] == "--listen" for argument in arguments):
        command += ["--listen", "127.0.0.1:0"]
    command += [f"--ranks={ranks}"] if ranks is not None else []
    with (folder / _OUTPUT).open("wb") as output, (folder / _ERRORS).open("wb") as errors:
        # Its own session: an interrupted kernel sends SIGINT to all processes of its own.
        process = subprocess.Popen(
            [*map(str, command), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            env=_programs.plain_environment(),
            start_new_session=True,
        )
    job = Job(folder, process)
    deadline = time.monotonic() + _START_SECONDS
    while not _status(folder):
        if (code := process.poll()) is not None:
            if code in _ENDS:
                break
            raise job._error(f"baton up ended with exit code {code}")
        if time.monotonic() > deadline:
            raise JobError(f"the coordinator in {folder} does not answer: see {folder / _ERRORS}")
        time.sleep(_POLL_SECONDS)
    return job


def _folder_of(run_dir: str | os.PathLike[str]) -> Path:
    """The run folder. An empty name, as of a variable that is not set, would be the current folder."""
    if not isinstance(run_dir, str | os.PathLike) or not os.fspath(run_dir):
        raise TypeError(f"run_dir is the path of a run folder, not {run_dir!r}")
    return Path(run_dir)


def attach(run_dir: str | os.PathLike[str] | None = None, *, store: str | os.PathLike[str] | None = None) -> Job:
    """The job that runs in a run folder, whoever started it; or the one that saves to a checkpoint store, `s3://BUCKET/PREFIX`
    or a folder, on whichever machine its coordinator is, also after another one has taken over.

    Raises JobError if none runs there.
    """
    if store is not None and run_dir is None:
        job = Job(store=os.fspath(store))
        job.status()
        return job
    if store is not None or run_dir is None:
        raise TypeError("attach takes a run folder, or store=")
    job = Job(_folder_of(run_dir))
    if job.status()["phase"] != "ended" and job._last_line():
        # The file is that of an earlier job here, which `up` started; this one was started otherwise.
        job._prints_here = False
    return job


class Job:
    """A job that `up` started or `attach` found.

    Every method that calls the coordinator raises JobError if it refuses or does not answer.
    """

    def __init__(
        self, run_dir: Path | None = None, process: subprocess.Popen[bytes] | None = None, *, store: str | None = None
    ) -> None:
        # The caller may change its folder.
        self._run_dir = run_dir.absolute() if run_dir else None
        self.store = store
        self._process = process
        self._since = time.time()
        # Whether `baton up` prints into the run folder.
        self._prints_here = run_dir is not None and (run_dir / _OUTPUT).exists()

    @property
    def run_dir(self) -> Path:
        """The run folder. Raises JobError if the job was found by its store."""
        if self._run_dir is None:
            raise JobError(f"the job of {self.store} was found by its store: its run folder is on another machine")
        return self._run_dir

    def __repr__(self) -> str:
        return f"baton.attach({os.fspath(self.run_dir)!r})" if self._run_dir else f"baton.attach(store={self.store!r})"

    def _ipython_display_(self) -> None:
        """In a notebook: a live card of the job. Elsewhere in IPython, and by its store: a line."""
        if self._run_dir is None:
            print(self._summary())
        else:
            _card.show(self.run_dir, self._summary())

    def _summary(self) -> str:
        """The job in one line."""
        try:
            status = self.status()
        except JobError:
            return repr(self)
        latest = status["latest"]
        progress = f", step {latest['step']} of {latest['total_steps']}, loss {latest['loss']:.4g}" if latest else ""
        return f"{status['name']} in {self.store or self.run_dir}: {status['phase']}{progress}"

    @property
    def run(self) -> Run:
        """The files of the run: metrics, evaluations, checkpoints; of a bucket the checkpoints."""
        return Run(self.store or self.run_dir)

    def status(self) -> dict[str, Any]:
        """Phase, progress, ranks, machines, cost: what `baton status --json` prints."""
        return self._call("status")[0]

    def watch(self, after: int = 0) -> Iterator[dict[str, Any]]:
        """The events of the job with a greater `id` than `after`, as they happen, until it ends: what
        `baton watch --json` prints."""
        command = [_programs.baton(), "watch", "--json", "--after", str(after), *self._place()]
        with subprocess.Popen(
            [*map(str, command)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=_programs.plain_environment(),
            encoding="utf-8",
        ) as process:
            assert process.stdout and process.stderr
            try:
                for line in process.stdout:
                    yield json.loads(line)
                if process.wait() != 0:
                    raise _programs.job_error(process.returncode, process.stderr.read())
            finally:
                process.kill()

    def pause(self, reason: str = "Python") -> None:
        """Pauses training after the current step; the ranks keep their state."""
        self._call("pause", f"--reason={reason}")

    def resume(self) -> None:
        """Resumes training after `pause`."""
        self._call("resume")

    def checkpoint(self) -> None:
        """Asks for a checkpoint after the current step."""
        self._call("checkpoint", "now")

    def profile(self, steps: int = 5, out: str | os.PathLike[str] = "profile.json") -> dict[str, Any]:
        """Records the next steps of all ranks, 1 to 50, into the file `out`, a trace for https://ui.perfetto.dev.

        Returns once they are made: where the time of each rank's steps went, as `baton profile --json` prints it. An
        older profile in `out` is replaced.
        """
        return self._call("profile", f"--steps={steps}", f"--out={os.fspath(out)}")[0]

    def drain(self, reason: str = "Python") -> None:
        """Saves after the current step and stops; `up` resumes there. `wait` returns once that is done."""
        self._call("drain", f"--reason={reason}")

    def stop(self) -> None:
        """Stops at once, without saving: work since the last checkpoint is lost."""
        self._call("stop")

    def wait(self, timeout: float | None = None) -> dict[str, Any]:
        """Waits until the job has ended, and returns its last status; `reason` says how it ended.

        `timeout` is in seconds. Raises TimeoutError after that time, and JobError if the job failed. An interrupt only
        ends the waiting.
        """
        if timeout is not None and not timeout >= 0:
            raise ValueError(f"timeout is {timeout}: give seconds, or None to wait until the end")
        deadline = None if timeout is None else time.monotonic() + timeout
        if self.store is not None:
            return self._wait_for_any_coordinator(deadline, timeout)
        while True:
            # Whether it is gone comes first: what it has written last is then there.
            is_gone = self._is_gone()
            if self._prints_here and (end := self._last_line()):
                _card.settle(self.run_dir)
                return _outcome(end["status"], end["exit_code"])
            status = None
            if is_gone:
                status = self._reported_status()
            elif not self._prints_here:
                status = self._status_if_any()
            if status is not None and status["phase"] == "ended":
                _card.settle(self.run_dir)
                return _outcome(status)
            if is_gone:
                raise self._error(f"all processes of the job in {self.run_dir} are gone: baton.up resumes it")
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"the job in {self.run_dir} still runs after {timeout} s")
            time.sleep(_POLL_SECONDS)

    def _wait_for_any_coordinator(self, deadline: float | None, timeout: float | None) -> dict[str, Any]:
        """`wait` for a job of which only the store is known."""
        answered_at = time.monotonic()
        while True:
            try:
                status = self.status()
            except JobError:
                # Another one takes over within seconds, if there is one.
                if time.monotonic() > answered_at + _AWAY_SECONDS:
                    raise
            else:
                answered_at = time.monotonic()
                if status["phase"] == "ended":
                    return _outcome(status)
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"the job of {self.store} still runs after {timeout} s")
            time.sleep(_POLL_SECONDS)

    def _last_line(self) -> dict[str, Any] | None:
        """What `baton up` prints last, once it has."""
        try:
            with (self.run_dir / _OUTPUT).open("rb") as output:
                # A status is much shorter.
                output.seek(max(0, output.seek(0, os.SEEK_END) - (1 << 20)))
                lines = output.read().splitlines(keepends=True)
        except FileNotFoundError:
            return None
        if not lines or not lines[-1].endswith(b"\n"):
            return None
        last = json.loads(lines[-1])
        return last if last["type"] == "end" else None

    def _error(self, otherwise: str) -> JobError:
        """Why `baton up` ended, as its last line says, or else this text."""
        code = self._process.returncode if self._process else None
        errors = self.run_dir / _ERRORS
        lines = errors.read_text(encoding="utf-8", errors="replace").splitlines() if errors.exists() else []
        said = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        return JobError(said[-1] if said and self._prints_here else otherwise, code)

    def _is_gone(self) -> bool:
        """Whether no process of the job is left."""
        if self._process is not None and self._process.poll() is None:
            return False
        is_locked = _is_locked(self.run_dir)
        # A coordinator that `baton up` has not started holds no lock.
        return not (is_locked or (is_locked is None and (self.run_dir / "coordinator.json").exists()))

    def _status_if_any(self) -> dict[str, Any] | None:
        try:
            return self.status()
        except JobError:
            return None

    def _reported_status(self) -> dict[str, Any] | None:
        """The status in the report, unless an earlier run has written it."""
        path = self.run_dir / "report.json"
        is_new = path.exists() and path.stat().st_mtime >= self._since
        return self.run.status() if is_new else None

    def _call(self, *command: str) -> list[dict[str, Any]]:
        return _programs.call_baton(*command, "--json", *self._place())

    def _place(self) -> tuple[str, str]:
        return ("--store", self.store) if self.store is not None else ("--run-dir", str(self.run_dir))


def _is_locked(folder: Path) -> bool | None:
    """Whether a process of `baton up` is left in a run folder: all hold its lock. None if there is no lock."""
    try:
        with (folder / _LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except BlockingIOError:
        return True
    except OSError:
        # There is no such file, or its file system has no locks.
        return None


def _status(folder: Path) -> dict[str, Any] | None:
    """The status of the job there, if its coordinator answers."""
    return Job(folder)._status_if_any() if (folder / "coordinator.json").exists() else None


def _outcome(status: dict[str, Any], exit_code: int | None = None) -> dict[str, Any]:
    outcome = status["outcome"] or {}
    if outcome.get("kind") == "failed" or (exit_code is not None and exit_code not in _ENDS):
        raise JobError(outcome.get("reason") or status["reason"], exit_code)
    return status


def _toml(value: Any) -> str:
    """A value as in a recipe."""
    match value:
        case bool() | str():
            return json.dumps(value, ensure_ascii=False)
        case numbers.Integral():
            return repr(int(value))
        case numbers.Real():
            return repr(float(value))
        case Mapping():
            return "{" + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + "}"
        case list() | tuple():
            return "[" + ", ".join(map(_toml, value)) + "]"
        case _:
            raise TypeError(f"{value!r} is no value of a recipe: give a number, text, bool, list or dict")
