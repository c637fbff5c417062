"""A file is replaced as a whole or not at all."""

import os

import pytest
from baton import _export


def test_a_file_appears_at_once_and_nothing_else_is_left(tmp_path):
    path = tmp_path / "net.pt2"
    with _export._replacing(path) as part:
        part.write_text("new")
        # PyTorch writes the name into the archive.
        assert part.name == path.name
        assert not path.exists()
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["net.pt2"]


def test_a_failure_keeps_the_old_file(tmp_path):
    path = tmp_path / "net.pt2"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), _export._replacing(path) as part:
        part.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["net.pt2"]


def test_the_file_has_the_rights_of_any_new_file(tmp_path):
    mask = os.umask(0o027)
    try:
        with _export._replacing(tmp_path / "net.pt2") as part:
            part.write_text("new")
    finally:
        os.umask(mask)
    assert (tmp_path / "net.pt2").stat().st_mode & 0o777 == 0o640


def test_a_refused_file_is_named_by_its_final_path(programs, tmp_path):
    baton = programs(
        "baton", 'echo "error: program $4 was exported in evaluation mode: call model.train()" >&2; exit 2'
    )
    path = tmp_path / "net.pt2"
    with pytest.raises(_export.ExportError) as caught, _export._replacing(path) as part:
        part.write_text("content")
        _export._is_accepted(baton, part, path)
    assert str(caught.value) == f"program {path} was exported in evaluation mode: call model.train()"
    assert not path.exists()


def test_a_file_that_a_strange_program_did_not_check_is_kept_with_a_warning(programs, tmp_path):
    with pytest.warns(UserWarning, match=r"net\.pt2 was not checked: .*baton ended with exit code 3: what\?"):
        accepted = _export._is_accepted(
            programs("baton", "echo 'what?' >&2; exit 3"), tmp_path / "part", tmp_path / "net.pt2"
        )
    assert not accepted
