"""Shared by the benches: options, messages, and the end of all processes that they start."""

import argparse
import contextlib
import os
import shutil
import signal
import sys
from pathlib import Path

import processes

NAME = Path(sys.argv[0]).absolute().parent.name
# Seconds after which waiting for a process fails.
TIMEOUT_SECONDS = 180


def say(text):
    print(f"{NAME}: {text}", file=sys.stderr, flush=True)


def fail(text):
    sys.exit(f"{NAME}: {text}")


def parser(doc):
    """Returns a parser of the options that every bench has."""
    options = argparse.ArgumentParser(prog=NAME, description=doc.partition("\n")[0])
    options.add_argument("--baton", type=Path, required=True)
    options.add_argument("--work", type=Path, required=True)
    options.add_argument("--rounds", type=int, required=True)
    return options


def read_arguments(options):
    arguments = options.parse_args()
    if not os.access(arguments.baton, os.X_OK):
        options.error(f"--baton: no program at '{arguments.baton}'; run: make build")
    if arguments.rounds < 1:
        options.error("--rounds must be at least 1")
    arguments.baton, arguments.work = arguments.baton.absolute(), arguments.work.absolute()
    return arguments


@contextlib.contextmanager
def working_in(folder):
    """Creates the folder empty. When the block ends, for any reason, all processes started in it are killed; after a
    failure the folder is kept for inspection."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    processes.adopt_orphans()
    # Handle other termination signals like Ctrl-C.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    interrupted = False
    try:
        yield
    except KeyboardInterrupt:
        interrupted = True
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        processes.end_all()
    shutil.rmtree(folder)
    if interrupted:
        say("interrupted; all started processes have been ended")
        sys.exit(130)
