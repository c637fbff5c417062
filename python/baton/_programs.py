"""Finds and runs Baton's programs."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

FOLDER_VARIABLE = "BATON_BIN"
# Baton's exit code for input that it refuses.
_BAD_INPUT = 2


class RefusedError(Exception):
    """A program refused a file; the text is its line."""


class JobError(Exception):
    """A job failed, or a command about one; the text says what and what to do.

    `exit_code` is that of Baton's program: 1, a retry may help; 2, it does not.
    """

    def __init__(self, message: str, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class UnusableError(Exception):
    """A program cannot be run, or is another one of the same name."""


def find(name: str) -> Path | None:
    """Baton's program with this name: in the folder BATON_BIN, beside Python, or on PATH.

    Raises FileNotFoundError if BATON_BIN is set and has no such program: then it is a mistake, and another program
    would be a surprise.
    """
    if folder := os.environ.get(FOLDER_VARIABLE):
        program = Path(folder, name)
        if not _can_run(program):
            raise FileNotFoundError(
                f"{FOLDER_VARIABLE} is {folder}, which has no program {name}: set it to the folder of Baton's programs"
            )
        return program
    # In a virtual environment this is its bin folder, also if that is not on PATH.
    beside = Path(sys.executable).with_name(name)
    if _can_run(beside):
        return beside
    found = shutil.which(name)
    return Path(found) if found else None


def baton() -> Path:
    """The program `baton`. Raises FileNotFoundError if there is none."""
    if found := find("baton"):
        return found
    raise FileNotFoundError(f"no program baton was found: set {FOLDER_VARIABLE} to the folder of Baton's programs")


def call_baton(*arguments: Any) -> list[dict[str, Any]]:
    """The JSON that a command prints: one value, or one per line. Raises JobError with the line of its error."""
    done = run([baton(), *arguments])
    if done.returncode != 0:
        raise job_error(done.returncode, done.stderr)
    values, text = [], done.stdout.lstrip()
    while text:
        value, end = json.JSONDecoder().raw_decode(text)
        values.append(value)
        text = text[end:].lstrip()
    return values


def job_error(exit_code: int, errors: str) -> JobError:
    """The error of a command that has ended with this code and text."""
    lines = errors.splitlines() or [f"baton ended with exit code {exit_code}"]
    begin = max((at for at, line in enumerate(lines) if line.startswith("error: ")), default=len(lines) - 1)
    # An empty line and a hint at --help may follow.
    end = next((at for at, line in enumerate(lines) if at > begin and not line.strip()), len(lines))
    text = " ".join(line.strip() for line in lines[begin:end])
    return JobError(text.removeprefix("error: "), exit_code)


def _can_run(program: Path) -> bool:
    return program.is_file() and os.access(program, os.X_OK)


def inspect(program: Path, file: Path) -> dict[str, Any]:
    """What `baton model inspect --json` says about a file.

    Raises RefusedError if Baton cannot train it, and UnusableError if `program` does not answer as Baton does.
    """
    done = run([program, "model", "inspect", "--json", file])
    line = first_line(done.stderr)
    # An older Baton, without this command, also ends with this code, but does not name the file.
    if done.returncode == _BAD_INPUT and str(file) in line:
        raise RefusedError(line.removeprefix("error: "))
    try:
        found = json.loads(done.stdout)
    except ValueError:
        found = None
    if done.returncode != 0 or not isinstance(found, dict) or "digest" not in found:
        raise UnusableError(f"{program} ended with exit code {done.returncode}: {line or 'it printed nothing'}")
    return found


def run(command: list[Any], environment: dict[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
    """Runs a program to its end, without input. Raises UnusableError if it does not start."""
    arguments = [str(argument) for argument in command]
    try:
        return subprocess.run(
            arguments,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            env={**plain_environment(), **(environment or {})},
            check=False,
        )
    except OSError as error:
        raise UnusableError(f"{arguments[0]} does not start: {error.strerror}") from error


def plain_environment() -> dict[str, str]:
    """The environment of a program whose messages are read here. Jupyter demands colours of all programs."""
    return {name: value for name, value in os.environ.items() if name not in {"CLICOLOR_FORCE", "FORCE_COLOR"}}


def first_line(text: str) -> str:
    """The first line with text, or none."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")
