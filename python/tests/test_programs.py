"""Finding and running Baton's programs."""

import sys

import pytest
from baton import _programs


def executable(path):
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_the_folder_of_the_environment_comes_first_then_pythons_then_path(no_programs, tmp_path, monkeypatch):
    assert _programs.find("baton") is None

    on_path = tmp_path / "on_path"
    on_path.mkdir()
    monkeypatch.setenv("PATH", str(on_path))
    assert _programs.find("baton") is None
    executable(on_path / "baton")
    assert _programs.find("baton") == on_path / "baton"

    executable(no_programs / "baton")
    assert sys.executable.startswith(str(no_programs))
    assert _programs.find("baton") == no_programs / "baton"

    named = tmp_path / "named"
    named.mkdir()
    executable(named / "baton")
    monkeypatch.setenv("BATON_BIN", str(named))
    assert _programs.find("baton") == named / "baton"


def test_a_folder_without_the_program_is_an_error_and_not_passed_over(programs, tmp_path):
    programs("baton", "").chmod(0o644)
    with pytest.raises(FileNotFoundError, match=r"BATON_BIN is .*programs, which has no program baton: set it"):
        _programs.find("baton")


def test_what_inspect_prints_is_returned(programs, tmp_path):
    baton = programs("baton", """echo "{\\"digest\\": \\"$*\\"}" """)
    found = _programs.inspect(baton, tmp_path / "net.pt2")
    assert found == {"digest": f"model inspect --json {tmp_path}/net.pt2"}


def test_messages_are_read_without_the_colours_that_jupyter_demands(programs, monkeypatch):
    monkeypatch.setenv("CLICOLOR_FORCE", "1")
    monkeypatch.setenv("FORCE_COLOR", "1")
    programs("baton", 'echo "{\\"colours\\": \\"$CLICOLOR_FORCE$FORCE_COLOR\\"}"')
    assert _programs.call_baton("status") == [{"colours": ""}]


def test_a_refusal_is_the_programs_line(programs, tmp_path):
    baton = programs("baton", 'echo "error: program $4 takes exactly 3 samples: export it" >&2; exit 2')
    with pytest.raises(_programs.RefusedError) as caught:
        _programs.inspect(baton, tmp_path / "net.pt2")
    assert str(caught.value) == f"program {tmp_path}/net.pt2 takes exactly 3 samples: export it"


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo hello", "ended with exit code 0: it printed nothing"),
        ("echo '[1]'", "ended with exit code 0"),
        ('echo "error: unrecognized subcommand" >&2; exit 2', "ended with exit code 2: error: unrecognized subcommand"),
        ("kill -9 $$", "ended with exit code -9: it printed nothing"),
    ],
)
def test_another_program_of_the_same_name_is_no_refusal(programs, tmp_path, script, message):
    with pytest.raises(_programs.UnusableError, match=message):
        _programs.inspect(programs("baton", script), tmp_path / "net.pt2")


def test_a_program_that_does_not_start_is_named(tmp_path):
    broken = executable(tmp_path / "baton")
    broken.write_bytes(b"\x00\x01\x02\x03")
    with pytest.raises(_programs.UnusableError, match="baton does not start: "):
        _programs.run([broken])


def test_a_program_gets_no_input(programs):
    assert _programs.run([programs("baton", "cat; echo end")]).stdout == "end\n"


@pytest.mark.parametrize(
    ("errors", "text"),
    [
        ("note\nerror: the job has ended\n", "the job has ended"),
        (
            "error: invalid value '0' for '--steps <N>'\n\nFor more information, try '--help'.\n",
            "invalid value '0' for '--steps <N>'",
        ),
        ("error: these are missing:\n  --out <FILE>\n\nUsage: baton\n", "these are missing: --out <FILE>"),
        ("Killed\n", "Killed"),
        ("", "baton ended with exit code 2"),
    ],
)
def test_the_error_of_a_command_is_all_that_it_says_and_no_hint_at_its_help(errors, text):
    error = _programs.job_error(2, errors)
    assert (str(error), error.exit_code) == (text, 2)
