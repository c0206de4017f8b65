"""Masters that were sealed again by a stranger: refused, or made harmless."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from test_artifact_small import write

from anybit.artifact import protobuf_scan
from anybit.artifact.check import check_axis, check_names
from anybit.artifact.session import load
from anybit.cli import main
from anybit.errors import FileError


def resealed(path: Path, change: Callable[[onnx.GraphProto, dict[str, Any]], None]) -> Path:
    """Change a master and give it a digest that fits."""
    model = onnx.load(path)
    texts = {entry.key: entry.value for entry in model.metadata_props}
    del model.metadata_props[:]
    header = json.loads(texts["anybit"])
    change(model.graph, header)
    data, text = model.SerializeToString(), json.dumps(header)
    seal = protobuf_scan.digest(io.BytesIO(data), protobuf_scan.scan(io.BytesIO(data), len(data)), text)
    path.write_bytes(data + protobuf_scan.entry("anybit", text) + protobuf_scan.entry("anybit.digest", seal))
    return path


def twice(graph: onnx.GraphProto, header: dict[str, Any]) -> None:
    graph.initializer.append(numpy_helper.from_array(np.zeros((4, 1, 3, 3), np.float32), "a.weight"))


def infinite(graph: onnx.GraphProto, header: dict[str, Any]) -> None:
    (bias,) = [tensor for tensor in graph.initializer if tensor.name == "b.bias"]
    bias.raw_data = np.array([1, np.inf, 2], np.float32).tobytes()


def made_again(graph: onnx.GraphProto, header: dict[str, Any]) -> None:
    graph.node.append(onnx.helper.make_node("Relu", ["conv"], ["relu"]))


def text(
    texts: list[bytes], dims: list[int], name: str = "words", **more: Any
) -> Callable[[onnx.GraphProto, dict[str, Any]], None]:
    def put(graph: onnx.GraphProto, header: dict[str, Any]) -> None:
        kept = [tensor for tensor in graph.initializer if tensor.name != name]
        del graph.initializer[:]
        held = onnx.TensorProto(name=name, dims=dims, string_data=texts, data_type=onnx.TensorProto.STRING, **more)
        graph.initializer.extend([*kept, held])

    return put


def _weight(header: dict[str, Any]) -> dict[str, Any]:
    return next(point for point in header["plan"]["points"] if point["kind"] == "weight")


CHANGES: dict[str, tuple[Callable[[onnx.GraphProto, dict[str, Any]], None], str]] = {
    "a weight twice, with other values": (twice, r"'a\.weight' is made twice"),
    "a value made twice": (made_again, "'relu' is made twice"),
    "text that is less than its shape says": (text([b"a"], [2]), "needs 2 texts in string_data, there are 1"),
    "text that is more": (text([b"a"] * 3, [2]), "needs 2 texts in string_data, there are 3"),
    "text in bytes": (text([], [2], raw_data=bytes(16)), "needs 2 texts in string_data, there are 0"),
    "text in another file": (text([], [2], data_location=1), "its data lie in another file"),
    "a book": (text([b"a" * 2**17], [1]), "has a text of 131072 bytes; at most 65536 are expected"),
    "text as a bias": (lambda graph, header: text([b"a"] * 3, [3], "b.bias")(graph, header), "has infinite entries"),
    "an infinite bias": (infinite, r"'b\.bias', a bias of Gemm, has infinite entries"),
    "an axis that is not there": (lambda graph, header: _weight(header).update(axis=7), "must be 0 to 3, got 7"),
    "channels that are not there": (lambda g, header: _weight(header).update(channels=9), "must be 0 to 3, got 9"),
    "pages of text": (lambda graph, header: _weight(header).update(floor="x" * 10**6), "must be a whole number"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_master_sealed_by_a_stranger_is_refused(name: str, tmp_path: Path) -> None:
    change, message = CHANGES[name]
    path = resealed(write(tmp_path / "m.onnx"), change)
    with pytest.raises(FileError, match=message) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert len(str(caught.value)) < 400 + len(str(path))


def test_the_seal_is_the_one_that_saving_makes(tmp_path: Path) -> None:
    path = resealed(write(tmp_path / "m.onnx"), lambda graph, header: None)
    assert load(path).run(np.ones((2, 1, 6, 6), np.float32)).shape == (2, 3)


def test_names_of_classes_reach_the_terminal_without_control_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["\x1b[2J\x1b]0;owned\x07cat\n" + 9000 * "t"] * 3
    path = resealed(write(tmp_path / "m.onnx"), lambda graph, header: header["about"].update(classes=names))
    np.save(tmp_path / "a.npy", np.ones((1, 6, 6), np.float32))
    with pytest.raises(SystemExit) as stop:
        main(["run", str(path), "--input", str(tmp_path / "a.npy"), "--policy", "fixed"])
    out, err = capsys.readouterr()
    assert (stop.value.code or 0, err) == (0, "")
    assert len(out.splitlines()) == 1
    assert len(out) < 300 + len(str(tmp_path))
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", out)


def test_nothing_is_said_about_what_is_not_finite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def huge(graph: onnx.GraphProto, header: dict[str, Any]) -> None:
        (bias,) = [tensor for tensor in graph.initializer if tensor.name == "b.bias"]
        bias.raw_data = np.full(3, 3e38, np.float32).tobytes()
        graph.node[-1].attribute.append(onnx.helper.make_attribute("beta", 10.0))

    path = resealed(write(tmp_path / "m.onnx"), huge)
    np.save(tmp_path / "a.npy", np.ones((1, 6, 6), np.float32))
    with pytest.raises(SystemExit) as stop:
        main(["run", str(path), "--input", str(tmp_path / "a.npy"), "--policy", "fixed", "--bits", "FP"])
    out, err = capsys.readouterr()
    assert (stop.value.code, out) == (2, "")
    assert "at FP the output 'y' is not finite; try a wider width or another input" in err


def test_the_checks_take_plain_values() -> None:
    for axis in (None, 0, 1):
        check_axis(axis, 2, where="m")
    for axis in (-1, 2, 10**9):
        with pytest.raises(FileError, match="must be 0 to 1"):
            check_axis(axis, 2, where="m")
    graph = onnx.GraphProto()
    for name in ("x", "w"):  # old files list weights among the inputs
        graph.input.add(name=name)
    graph.initializer.add(name="w")
    check_names(graph, where="m")
    graph.initializer.add(name="w")
    with pytest.raises(FileError, match="'w' is made twice"):
        check_names(graph, where="m")
