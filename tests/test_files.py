from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from anybit.common.files import read_json, read_text, replacing, write_json, write_text
from anybit.errors import FileError, RecipeError


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def fail_in_the_middle(path: Path, error: BaseException, text: str | None) -> None:
    with replacing(path) as beside:
        if text is not None:
            beside.write_text(text)
        raise error


def test_a_file_is_replaced_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "down" / "a.txt"
    write_text(path, "old")
    write_text(path, "new λ")
    assert path.read_bytes() == "new λ".encode()
    assert names(path.parent) == ["a.txt"]


def test_until_the_end_the_old_file_is_there(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_text(path, "old")
    with replacing(path) as beside:
        beside.write_text("half")
        assert beside.parent == path.parent  # the rename stays on one file system
        assert beside.name.endswith(".partial")
        assert path.read_text() == "old"
        beside.write_text("whole")
    assert path.read_text() == "whole"


@pytest.mark.parametrize("error", [RuntimeError("no"), KeyboardInterrupt(), SystemExit(3)])
@pytest.mark.parametrize("written", [True, False])
def test_a_body_that_raises_leaves_the_old_file_and_nothing_else(
    error: BaseException, written: bool, tmp_path: Path
) -> None:
    path = tmp_path / "a.txt"
    write_text(path, "old")
    with pytest.raises(type(error)) as caught:
        fail_in_the_middle(path, error, "half" if written else None)
    assert caught.value is error
    assert path.read_text() == "old"
    assert names(tmp_path) == ["a.txt"]


def test_a_body_that_raises_makes_no_file_where_there_was_none(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no"):
        fail_in_the_middle(tmp_path / "a.txt", RuntimeError("no"), "half")
    assert names(tmp_path) == []


def test_a_body_that_writes_nothing_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_text(path, "old")
    with pytest.raises(FileError, match=r"a\.txt: cannot be written"), replacing(path):
        pass
    assert path.read_text() == "old"


def test_targets_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here")
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "file" / "below", tmp_path / "folder", tmp_path / ("x" * 254)):
        with pytest.raises(FileError, match="cannot") as caught:
            write_text(path, "text")
        assert str(path) in str(caught.value) or str(path.parent) in str(caught.value)
    assert (tmp_path / "file").read_text() == "here"
    assert names(tmp_path) == ["file", "folder"]
    assert names(tmp_path / "folder") == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_a_folder_without_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        for path in (tmp_path / "a.txt", tmp_path / "new" / "a.txt"):
            with pytest.raises(FileError, match="Permission denied") as caught:
                write_text(path, "text")
            assert str(tmp_path) in str(caught.value)
    finally:
        tmp_path.chmod(0o700)
    assert names(tmp_path) == []


def test_json_goes_there_and_back(tmp_path: Path) -> None:
    value = {"λ": [1, 2.5, None, True], "nested": {"a": "b\n"}}
    write_json(tmp_path / "a.json", value)
    assert read_json(tmp_path / "a.json", what="a table") == value
    assert "λ" in (tmp_path / "a.json").read_text(encoding="utf-8")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_json_without_a_spelling_is_not_written(value: float, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, 1)
    with pytest.raises(FileError, match="no NaN and no infinity") as caught:
        write_json(path, {"deep": [value]})
    assert str(path) in str(caught.value)
    assert json.loads(path.read_text()) == 1


@pytest.mark.parametrize("read", [read_text, read_json])
def test_what_cannot_be_read_is_named(read, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "noise").write_bytes(bytes(range(128, 256)))
    for name, message in (
        ("missing", "no such file; a list of things is expected here"),
        ("folder", "is a folder; a list of things is expected here"),
        ("noise", "cannot be read as a list of things"),
        ("noise/below", "cannot be read as a list of things"),
    ):
        path = tmp_path / name
        with pytest.raises(RecipeError, match=message) as caught:
            read(path, what="a list of things", error=RecipeError)
        assert str(caught.value).startswith(f"{path}: ")
        assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "broken JSON at line 1"),
        ('{"a": 1,\n "b": ', "broken JSON at line 2"),
        ("{'a': 1}", "broken JSON at line 1"),
        ("[" * 100_000, "cannot be read as rows"),
        ("9" * 5_000, "cannot be read as rows"),
    ],
    ids=["empty", "cut short", "single quotes", "too deep", "too many digits"],
)
def test_broken_json(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(FileError, match=message) as caught:
        read_json(path, what="rows")
    assert str(caught.value).startswith(f"{path}: ")
    assert len(str(caught.value).splitlines()) == 1
