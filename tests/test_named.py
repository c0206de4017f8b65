from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from anybit.common.named import by_name, is_code
from anybit.data import load_dataset
from anybit.errors import DataError, SpecError

CODE = """
from dataclasses import dataclass
from anybit.data import load_dataset

@dataclass
class Kept:
    times: int = 0

kept = Kept()

def load():
    kept.times += 1
    return load_dataset("digits")

def wrong():
    return 5

def broken():
    raise KeyError("images")

def needs(path):
    return path
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_own_data.py").write_text(CODE)
    (tmp_path / "half.py").write_text("def load(:")
    return tmp_path


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("name", ["my_own_data.py:load", "./my_own_data.py:load"])
def test_a_function_in_a_file(name: str) -> None:
    assert is_code(name)
    assert len(load_dataset(name, code=True).test) == 450


def test_a_module_in_the_current_folder_is_found_and_hides_nothing(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend("/nowhere")  # puts the path back afterwards
    (here / "own_module.py").write_text("def load():\n    return 3\n")
    (here / "json.py").write_text("raise RuntimeError('not this one')\n")
    assert by_name("own_module:load")() == 3
    assert by_name("json:loads")("4") == 4


@pytest.mark.usefixtures("here")
def test_a_name_in_a_file_from_somebody_else_starts_no_code() -> None:
    with pytest.raises(DataError, match=r"a file may not start code; say --data my_own_data.py:load"):
        load_dataset("my_own_data.py:load")
    with pytest.raises(DataError, match="may not start code"):
        load_dataset("os:abort")


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gone.py:load", r"gone.py: no such file"),
        ("no_such_module_here:load", r"there is no module 'no_such_module_here' here; start from the folder"),
        ("my_own_data.py:lod", r"my_own_data.py has no 'lod'; did you mean 'load'"),
        ("my_own_data.py:broken", r"broken fails with KeyError: 'images' \(my_own_data.py, line 19\); --debug shows"),
        ("my_own_data.py:needs", r"needs fails with TypeError: .* missing 1 required .* 'path'; --debug shows more"),
        ("half.py:load", r"half.py:load fails with SyntaxError: .*\(half.py, line 1\); --debug shows more"),
    ],
)
def test_code_that_is_not_there_is_one_clear_line(name: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        load_dataset(name, code=True)


@pytest.mark.usefixtures("here")
def test_what_is_no_data_set_is_refused() -> None:
    with pytest.raises(
        DataError, match=r"wrong: must return one loader, or the loaders \(train, test\) or .*; returned"
    ):
        load_dataset("my_own_data.py:wrong", code=True)


def test_a_file_changed_within_a_second_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    path = tmp_path / "quick.py"
    for number in (3, 2):
        path.write_text(f"def make():\n    return {number}\n")
        os.utime(path, (1_000_000, 1_000_000))
        assert by_name(f"{path}:make")() == number
    assert not (tmp_path / "__pycache__").exists()
