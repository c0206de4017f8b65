from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from anybit.models import build_model
from anybit.task.checkpoint import save_checkpoint

PEERS = Path(__file__).parents[1] / "benchmarks" / "peers"
sys.path.append(str(PEERS))

from environment import TOOLS, CannotRun, Tool, last_words, rows_of  # noqa: E402
from peer_rows import Results, shown  # noqa: E402

SCRIPT = f"""
import sys
sys.path.insert(0, {str(PEERS)!r})
from harness import Made, NotOffered, main

def once(job):
    def quantize(weights, activations):
        if weights == 2:
            raise NotOffered("not with 2 bits")
        if weights == 3:
            return Made(lambda x: x.no_such_thing)
        print("tools print what they like")
        return Made(job.reference, lambda path: path.write_text("no model"))
    return quantize

def broken(job):
    raise RuntimeError("no way")

main({{"plain": once, "broken": broken}}, package="torch")
"""


def asked(tmp_path: Path, *rows: tuple[str, str]) -> dict[str, Any]:
    model = build_model("small-conv", channels=1, classes=10, multiplier=0.25).eval()
    about = {"model": {"name": "small-conv", "channels": 1, "classes": 10, "multiplier": 0.25}}
    save_checkpoint(tmp_path / "model.safetensors", model, about)
    x = torch.rand(80, 1, 8, 8)
    tensors = {"calibration": x[:16].clone(), "x": x, "y": model(x).argmax(1)}
    save_file(tensors, tmp_path / "images.safetensors", {"input_range": "[0, 1]"})
    return {
        "checkpoint": str(tmp_path / "model.safetensors"),
        "images": str(tmp_path / "images.safetensors"),
        "rounds": 1,
        "rows": rows,
    }


def test_every_row_comes_with_its_numbers_or_with_the_tools_own_error(tmp_path: Path) -> None:
    (tmp_path / "tool.py").write_text(SCRIPT)
    tool = Tool("made up", str(tmp_path / "tool.py"), ("plain", "broken"))
    rows = [("plain", "W4A4"), ("plain", "W3A3"), ("plain", "W2A8"), ("broken", "W4A4")]
    good, late, refused, broken = rows_of(tool, asked(tmp_path, *rows))
    assert good["accuracy"] == 1.0
    assert good["n"] == 80
    assert good["seconds"] >= 0
    assert good["slow_down"] > 0
    assert "InvalidProtobuf" in good["export_error"] or "INVALID" in good["export_error"].upper()
    assert "no_such_thing" in late["error"]
    assert refused["error"] == "not with 2 bits"
    assert broken["error"] == "RuntimeError: no way"


def test_a_script_that_ends_early_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    (tmp_path / "tool.py").write_text("import no_such_package\n")
    tool = Tool("made up", str(tmp_path / "tool.py"), ("plain",))
    with pytest.raises(CannotRun, match="no_such_package"):
        list(rows_of(tool, {"rows": []}))
    assert last_words("ERROR: no match\nbye") == "ERROR: no match"


def test_a_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    path = tmp_path / "peers.json"
    tool = Tool("made up", "", ("one", "two"))
    first, second = Results(path), Results(path)
    common = {"network": "net", "tool": "made up", "n": 10}
    first.add({**common, "setting": "one", "bits": "W4A4", "accuracy": 0.5, "seconds": 1.0})
    second.add({**common, "setting": "two", "bits": "W4A4", "error": "no"})  # by another run
    results = Results(path)
    assert [r["setting"] for r in results.rows] == ["one", "two"]
    assert results.missing("net", tool, ["W4A4", "W8A8"], 10, again=False) == [("one", "W8A8"), ("two", "W8A8")]
    assert ("two", "W4A4") in results.missing("net", tool, ["W4A4"], 10, again=True)
    assert len(results.missing("net", tool, ["W4A4"], 99, again=False)) == 2  # on other images all is new
    assert len(results.missing("other", tool, ["W4A4"], 10, again=False)) == 2
    assert shown(results.rows, "net").row_count == 2
    assert json.loads(path.read_text())["machine"]


def test_every_tool_has_a_script_with_the_settings_that_it_is_asked_for() -> None:
    for tool in TOOLS:
        assert (PEERS / tool.script).is_file()
        assert tool.settings
