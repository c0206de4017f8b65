"""Networks of the shared table in ONNX Runtime: what it fuses, and what it makes of exported files."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from test_artifact_session import at, optimized
from test_to_onnx import arrays, saved

from anybit.artifact.export import NOTE, export
from anybit.artifact.master import open_master
from anybit.artifact.runtime import onnxruntime
from anybit.artifact.session import load
from anybit.errors import DataError, FileError
from anybit.spec import Bits


@pytest.mark.parametrize("name", ["vgg-like", "resnet18", "mobilenetv2", "small-conv"])
@pytest.mark.parametrize("options", [{}, {"per_channel": True}], ids=str)
def test_every_convolution_and_matrix_product_runs_on_integers(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    if options and name != "small-conv":
        pytest.skip("one network with scales per channel is enough")
    master = open_master(saved(name, **options)[2])
    kinds = Counter(node.op_type for node in master.graph.graph.node)
    for bits in (Bits(8, 8), Bits(4, 8), Bits(4, 4), Bits(2, 3)):
        for packed in (False, True):
            model, _ = at(master, bits, packed=packed)
            onnx.checker.check_model(model.proto, full_check=True)
            found = optimized(model, tmp_path)
            assert found["QLinearConv"] == kinds["Conv"] > 0, (bits, found)
            assert found["QGemm"] == kinds["Gemm"] > 0, (bits, found)
            assert not {"Conv", "FusedConv", "Gemm"} & found.keys()


def test_several_inputs_and_outputs_go_by_name() -> None:
    case, _, path = saved("two-inputs")
    session = load(path)
    assert session.inputs == ("picture", "features")
    assert session.outputs == ("mean", "other")
    _, feed = arrays(case, session.inputs, 5)
    assert {key: value.shape for key, value in session.run(feed).items()} == {"mean": (5, 1), "other": (5, 2)}
    with pytest.raises(DataError, match="takes picture, features; got picture"):
        session.run(feed["picture"])


@pytest.mark.parametrize("bits", [(8, 8), (4, 8), (3, 3), (16, 16), (32, 8), (4, 32), (32, 32)], ids=str)
def test_an_export_computes_what_the_session_computes(bits: tuple[int, int], tmp_path: Path) -> None:
    for name in ("small-conv", "transformer"):
        case, _, path = saved(name)
        out = tmp_path / f"{name}.onnx"
        export(path, out, weights=bits[0], activations=bits[1])
        onnx.checker.check_model(str(out), full_check=True)
        model = onnx.load(out)
        assert {entry.domain for entry in model.opset_import} == {""}
        note = json.loads({entry.key: entry.value for entry in model.metadata_props}[NOTE])
        assert note["bits"] == str(Bits(*bits))
        ort = onnxruntime()
        options = ort.SessionOptions()
        for key, value in note["session_options"].items():
            options.add_session_config_entry(key, value)
        plain = ort.InferenceSession(str(out), options, providers=["CPUExecutionProvider"])
        session = load(path)
        session.set_bits(weights=bits[0], activations=bits[1])
        _, feed = arrays(case, session.inputs, 20)
        want = session.run(feed)
        np.testing.assert_allclose(plain.run(None, feed)[0], want, atol=1e-5 * np.abs(want).max())
        with pytest.raises(FileError, match="no master"):
            open_master(out)


def test_four_bits_make_a_small_file(tmp_path: Path) -> None:
    path = saved("vgg-like")[2]
    export(path, tmp_path / "four.onnx", weights=4, activations=8)
    master = open_master(path)
    entries = sum(array.size for array in master.weights.values())
    rest = path.stat().st_size - 4 * entries
    assert (tmp_path / "four.onnx").stat().st_size <= entries / 2 + 2 * rest
