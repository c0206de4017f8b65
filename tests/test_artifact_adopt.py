from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from test_artifact_small import MODEL

from anybit.artifact.adopt import adopt
from anybit.artifact.master import open_master
from anybit.artifact.plain import KINDS, read_plain
from anybit.artifact.runtime import onnxruntime
from anybit.artifact.session import load
from anybit.errors import DataError, FileError, SpecError

X = np.random.default_rng(0).normal(size=(64, 1, 6, 6)).astype(np.float32)


def with_norm() -> onnx.ModelProto:
    """The small network with a batch norm behind its convolution, in an older version of the operators."""
    model = copy.deepcopy(MODEL)
    rng = np.random.default_rng(1)
    for name, array in {
        "gamma": rng.uniform(0.5, 1.5, 4), "beta": rng.normal(size=4), "mean": rng.normal(size=4),
        "var": rng.uniform(5, 9, 4),
    }.items():  # fmt: skip
        model.graph.initializer.append(numpy_helper.from_array(array.astype(np.float32), name))
    norm = helper.make_node("BatchNormalization", ["conv", "gamma", "beta", "mean", "var"], ["normed"], epsilon=1e-3)
    relu = next(i for i, node in enumerate(model.graph.node) if node.op_type == "Relu")
    model.graph.node[relu].input[0] = "normed"
    model.graph.node.insert(relu, norm)
    model.opset_import[0].version = 17
    model.ir_version = 8
    return model


def floats(path: Path) -> Any:
    session = onnxruntime().InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": X})[0]


def plain(folder: Path, model: onnx.ModelProto) -> Path:
    onnx.save(model, folder / "plain.onnx")
    return folder / "plain.onnx"


def test_batch_norm_is_folded_and_gives_the_ranges(tmp_path: Path) -> None:
    path = plain(tmp_path, with_norm())
    adopt(path, tmp_path / "m.onnx", input_range=(-4.0, 4.0), sigmas=6.0, about={"who": "me"})
    master = open_master(tmp_path / "m.onnx")
    assert [node.op_type for node in master.graph.graph.node] == [
        "Identity", "Identity", "Conv", "Relu", "Flatten", "Gemm",
    ]  # fmt: skip
    np.testing.assert_allclose(floats(tmp_path / "m.onnx"), floats(path), rtol=1e-4, atol=1e-4)
    held = {t.name: numpy_helper.to_array(t) for t in with_norm().graph.initializer}
    points = {a.name: a for a in master.plan.activations}
    assert {a.kind for a in points.values()} == {"input", "activation"}
    found = points["relu"].range_at(4)
    assert found is not None
    assert found.low == 0.0
    assert found.high == pytest.approx(float((held["beta"] + 6 * np.abs(held["gamma"])).max()))
    assert found.source == "batch norm normed"
    assert master.header.about["adopted_from"] == "plain.onnx"
    assert master.header.about["who"] == "me"
    assert len(master.plan.biases) == 2


def test_calibration_sets_ranges_and_low_widths_come_close(tmp_path: Path) -> None:
    path = plain(tmp_path, with_norm())
    want = floats(path)
    errors = {}
    for per_channel in (False, True):
        inputs = [{"x": X[:30]}, {"x": X[30:]}]
        adopt(path, tmp_path / "m.onnx", calibration=inputs, per_channel=per_channel, sensitive="same")
        session = load(tmp_path / "m.onnx")
        for bits in (8, 6, 4):
            session.set_bits(weights=bits, activations=bits)
            errors[per_channel, bits] = float(np.abs(session.run(X) - want).mean() / np.abs(want).mean())
    assert errors[False, 8] < 0.02 < errors[False, 4] < 0.5
    assert errors[False, 8] < errors[False, 6] < errors[False, 4]
    assert errors[True, 4] < errors[False, 4]
    points = {a.name: a for a in session.plan.activations}
    inputs = next(a for a in points.values() if a.kind == "input").range_at(8)
    assert inputs is not None
    assert (inputs.low, inputs.high) == (pytest.approx(float(X.min())), pytest.approx(float(X.max())))


def test_without_batch_norm_ranges_come_from_made_up_inputs_and_say_so(tmp_path: Path) -> None:
    plan = adopt(plain(tmp_path, MODEL), tmp_path / "m.onnx")
    assert load(tmp_path / "m.onnx").plan == plan
    (relu,) = [a for a in plan.activations if a.kind != "input"]
    assert relu.name == "relu"
    assert all("made-up inputs" in r.source for _, r in relu.ranges)
    assert relu.ranges


def test_a_shared_convolution_keeps_its_batch_norm(tmp_path: Path) -> None:
    model = with_norm()
    model.graph.output.append(helper.make_tensor_value_info("conv", TensorProto.FLOAT, ["batch", 4, 4, 4]))
    path = plain(tmp_path, model)
    adopt(path, tmp_path / "m.onnx", calibration=[{"x": X}])
    kept = open_master(tmp_path / "m.onnx").graph
    assert "BatchNormalization" in [node.op_type for node in kept.graph.node]
    np.testing.assert_allclose(floats(tmp_path / "m.onnx"), floats(path), rtol=1e-4, atol=1e-4)


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    for data, message in ((b"", "is empty"), (b"not onnx at all", "is cut short or no ONNX file")):
        (tmp_path / "bad.onnx").write_bytes(data)
        with pytest.raises(FileError, match=message):
            adopt(tmp_path / "bad.onnx", tmp_path / "m.onnx")
    model = copy.deepcopy(MODEL)
    del model.graph.node[2:]
    model.graph.node[1].CopyFrom(helper.make_node("Relu", ["x_"], ["y"]))
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 1, 6, 6]))
    with pytest.raises(FileError, match=r"has no weight that could be quantized"):
        adopt(plain(tmp_path, model), tmp_path / "m.onnx")
    with pytest.raises(SpecError, match="store"):
        adopt(plain(tmp_path, MODEL), tmp_path / "m.onnx", store="fp8")
    with pytest.raises(DataError, match="saw no data"):
        adopt(plain(tmp_path, MODEL), tmp_path / "m.onnx", calibration=[])
    with pytest.raises(DataError, match="cannot be run"):
        adopt(plain(tmp_path, MODEL), tmp_path / "m.onnx", calibration=[{"x": X[..., :3]}])


def test_a_master_is_not_adopted_again(tmp_path: Path) -> None:
    adopt(plain(tmp_path, with_norm()), tmp_path / "m.onnx", calibration=[{"x": X}])
    for data in (None, [{"x": X}]):
        with pytest.raises(FileError, match=r"m\.onnx: is a master already and runs at any width as it is"):
            adopt(tmp_path / "m.onnx", tmp_path / "again.onnx", calibration=data)
    assert not (tmp_path / "again.onnx").exists()


@pytest.mark.parametrize(("start", "sign", "what"), KINDS)
def test_other_files_are_called_by_their_name(start: int, sign: bytes, what: str, tmp_path: Path) -> None:
    (tmp_path / "bad.onnx").write_bytes(b"\x18\0\0\0"[:start] + sign + bytes(100))
    with pytest.raises(FileError, match=f"bad.onnx: is {what}"):
        adopt(tmp_path / "bad.onnx", tmp_path / "m.onnx")


def test_data_in_other_files_is_read_inside_the_folder_and_nowhere_else(tmp_path: Path) -> None:
    inside = tmp_path / "model"
    inside.mkdir()
    model = copy.deepcopy(MODEL)  # saving in this way changes it
    onnx.save(model, inside / "m.onnx", save_as_external_data=True, location="weights.bin", size_threshold=0)
    assert (inside / "weights.bin").exists()
    adopt(inside / "m.onnx", tmp_path / "out.onnx", calibration=[{"x": X}])
    for name, array in open_master(tmp_path / "out.onnx").weights.items():
        (tensor,) = [t for t in MODEL.graph.initializer if t.name == name]
        np.testing.assert_array_equal(array, numpy_helper.to_array(tensor))
    (inside / "weights.bin").rename(tmp_path / "secret.bin")
    (inside / "link.bin").symlink_to(tmp_path / "secret.bin")
    for location in ("../secret.bin", str(tmp_path / "secret.bin"), "link.bin", "missing.bin"):
        model = onnx.load(inside / "m.onnx", load_external_data=False)
        for tensor in model.graph.initializer:
            for entry in tensor.external_data:
                entry.value = location if entry.key == "location" else entry.value
        (inside / "evil.onnx").write_bytes(model.SerializeToString())
        with pytest.raises(FileError, match="its data lie outside the folder"):
            read_plain(inside / "evil.onnx")


def test_a_subgraph_reads_no_file_outside_either(tmp_path: Path) -> None:
    model = copy.deepcopy(MODEL)
    body = helper.make_graph([], "body", [], [], [numpy_helper.from_array(np.ones(2, np.float32), "t")])
    body.initializer[0].data_location = TensorProto.EXTERNAL
    body.initializer[0].external_data.add(key="location", value="../secret.bin")
    model.graph.node.append(helper.make_node("Loop", ["", ""], ["loop"], body=body))
    (tmp_path / "loop.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(FileError, match="its data lie outside the folder"):
        read_plain(tmp_path / "loop.onnx")
