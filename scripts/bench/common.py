"""What the races share: options, messages, and that nothing which they start outlives them."""

import argparse
import contextlib
import os
import shutil
import signal
import sys
from pathlib import Path

import processes

NAME = Path(sys.argv[0]).absolute().parent.name
# Seconds until what is awaited counts as never to come.
PATIENCE = 180


def say(text):
    print(f"{NAME}: {text}", file=sys.stderr, flush=True)


def fail(text):
    sys.exit(f"{NAME}: {text}")


def parser(doc):
    """Of the options that every race has."""
    options = argparse.ArgumentParser(prog=NAME, description=doc.partition("\n")[0])
    options.add_argument("--baton", type=Path, required=True)
    options.add_argument("--work", type=Path, required=True)
    options.add_argument("--rounds", type=int, required=True)
    return options


def read_arguments(options):
    arguments = options.parse_args()
    if not os.access(arguments.baton, os.X_OK):
        options.error(f"--baton: there is no program '{arguments.baton}'; run: make build")
    if arguments.rounds < 1:
        options.error("--rounds must be at least 1")
    arguments.baton, arguments.work = arguments.baton.absolute(), arguments.work.absolute()
    return arguments


@contextlib.contextmanager
def working_in(folder):
    """Makes the folder anew. In the end, whatever brings it about, all processes started in the block are killed; after
    a failure the folder stays, to be looked at."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    processes.adopt_orphans()
    # Whatever asks this process to end counts as Ctrl-C.
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
        say("interrupted; everything it started is ended")
        sys.exit(130)
