"""`python -m baton`."""

import sys

import pytest
from baton.__main__ import main
from run_files import add_points


def refused(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main([*map(str, arguments)])
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert ended.value.code == 2, error
    return error


def test_bad_input_is_one_line(tmp_path, monkeypatch, capsys, no_programs):
    monkeypatch.chdir(tmp_path)
    assert refused(capsys, "alert") == "error: there is no run below runs/: name a run folder"
    assert refused(capsys, "track", tmp_path, "--wandb", "cats").endswith("is no run folder: it has no journal.redb")
    run = tmp_path / "run"
    add_points(run)
    assert refused(capsys, "alert", run) == "error: nobody to tell: give --webhook-file, --slack-file or --email"
    assert refused(capsys, "alert", run, "--email", "a@b.c") == "error: --email needs --smtp HOST[:PORT]"
    empty = tmp_path / "empty-url"
    empty.touch()
    assert refused(capsys, "alert", run, "--slack-file", empty).endswith("empty-url is empty")
    empty.write_bytes(b"\x86\xff")
    assert refused(capsys, "alert", run, "--slack-file", empty).endswith("empty-url is not a text file")
    empty.write_text("not a url")
    assert "has no URL, in one line: it begins with https://" in refused(capsys, "alert", run, "--webhook-file", empty)
    assert (
        refused(capsys, "alert", run, "--email", "a@b.c", "--smtp", "h:x")
        == "error: --smtp h:x: give HOST or HOST:PORT"
    )
    assert "'sunday' is none of budget, divergence" in refused(
        capsys, "alert", run, "--email", "a@b.c", "--smtp", "h", "--on", "sunday"
    )


def test_a_client_that_is_missing_is_named_with_its_command(tmp_path, monkeypatch, capsys, no_programs):
    for package in ("wandb", "mlflow"):
        monkeypatch.setitem(sys.modules, package, None)
    add_points(tmp_path / "run")
    for flag, package in (("--wandb", "wandb"), ("--mlflow", "mlflow-skinny")):
        error = refused(capsys, "track", tmp_path / "run", flag, "x")
        assert error == f"error: {flag.strip('-')} is not installed: pip install {package}"
