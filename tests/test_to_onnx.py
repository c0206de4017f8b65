from __future__ import annotations

import atexit
import copy
import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from cases import CASES, Case
from onnx import numpy_helper
from torch import Tensor, nn

import anybit
from anybit.artifact.master import open_master
from anybit.artifact.runtime import onnxruntime
from anybit.artifact.session import load
from anybit.errors import NetworkError
from anybit.simulate.modules import Bias as BiasModule
from anybit.simulate.modules import executors
from anybit.simulate.network import QuantizedNetwork
from anybit.simulate.to_onnx import save, translate

FOLDER = Path(tempfile.mkdtemp(prefix="anybit-masters-"))
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)


@functools.cache
def saved(name: str, **options: Any) -> tuple[Case, QuantizedNetwork, Path]:
    """Prepare a network of the shared table with calibrated ranges and save it, once for all tests."""
    case = next(c for c in CASES if c.name == name)
    torch.manual_seed(0)
    data = [(case.inputs(32), None) for _ in range(2)]
    net = anybit.prepare(case.build(), case.inputs(2), calibration=data, **options, preset="paper")
    path = FOLDER / f"{name}-{len(list(FOLDER.iterdir()))}.onnx"
    save(net, path, about={"name": name})
    return case, net, path


def arrays(case: Case, names: tuple[str, ...], n: int, seed: int = 1) -> tuple[Any, dict[str, np.ndarray[Any, Any]]]:
    """Return inputs as PyTorch takes them and as a runtime does."""
    torch.manual_seed(seed)
    inputs = case.inputs(n)
    named = inputs if isinstance(inputs, dict) else dict(zip(names, inputs, strict=True))
    return inputs, {key: value.numpy() for key, value in named.items()}


def by_name(output: Any) -> dict[str, np.ndarray[Any, Any]]:
    output = output if isinstance(output, dict) else {"output": output}
    return {key: value.detach().numpy() for key, value in output.items()}


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_a_master_runs_in_floating_point_in_any_runtime_at_any_batch_size(name: str) -> None:
    case, net, path = saved(name)
    onnx.checker.check_model(str(path), full_check=True)
    session = onnxruntime().InferenceSession(str(path), providers=["CPUExecutionProvider"])
    assert {value.shape[0] for value in session.get_inputs() + session.get_outputs()} == {"batch"}
    net.set_bits(weights=32, activations=32)
    for n in (1, 2, 7):
        inputs, feed = arrays(case, tuple(value.name for value in session.get_inputs()), n)
        with torch.no_grad():
            want = by_name(case.run(net, inputs))
        got = dict(zip((value.name for value in session.get_outputs()), session.run(None, feed), strict=True))
        assert got.keys() == want.keys()
        for key, value in want.items():
            np.testing.assert_allclose(got[key], value, rtol=1e-5, atol=1e-5 * np.abs(value).max())


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_the_header_lists_every_point_with_its_grid(name: str) -> None:
    _, net, path = saved(name)
    master = open_master(path)
    assert master.plan == net.plan
    assert load(path).plan == net.plan
    assert master.weights.keys() == net.weights.keys() == {w.name for w in net.plan.weights}
    for key, weight in net.weights.items():
        np.testing.assert_array_equal(master.weights[key], weight.detach().numpy())
    net.set_bits(weights=4, activations=4)
    stored, held = master.plan.at(net.bits, tensors=master.tensors), net.numbers()
    assert stored.biases == held.biases
    for bias in stored.biases:
        np.testing.assert_array_equal(stored.bias(bias).values, held.bias(bias).values)
    places = {o for node in master.graph.graph.node for o in node.output} | {
        t.name for t in master.graph.graph.initializer
    }
    assert {entry.place for entry in (*net.plan.activations, *net.plan.biases)} <= places
    assert master.header.about["name"] == name
    assert "commit" in master.header.about["origin"]


def test_the_file_says_nothing_about_the_machine_it_was_made_on() -> None:
    data = saved("small-conv")[2].read_bytes()
    assert b"site-packages" not in data
    assert b"stack_trace" not in data
    assert str(Path(__file__).parents[1]).encode() not in data


def test_saving_leaves_the_network_alone(tmp_path: Path) -> None:
    case, net, _ = saved("functional")
    before = copy.deepcopy(net.state_dict())
    inputs, _ = arrays(case, ("x",), 4)
    net.set_bits(weights=4, activations=4)
    with torch.no_grad():
        want = case.run(net, inputs)
        save(net, tmp_path / "again.onnx")
        assert torch.equal(case.run(net, inputs), want)
    assert net.bits == anybit.Bits(4, 4)
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())


class Tied(nn.Module):
    """Two layers with one weight, two with equal weights, an output that is an activation itself."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(6, 6) for _ in range(4))
        self.b.weight = self.a.weight
        with torch.no_grad():
            self.d.weight.copy_(self.c.weight)
            self.d.bias.copy_(self.c.bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.relu(self.b(torch.relu(self.a(x))))
        z = torch.relu(self.d(torch.relu(self.c(y))))
        return self.a(z), z


def test_equal_and_shared_weights_keep_points_of_their_own(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = anybit.prepare(Tied(), torch.randn(2, 6), calibration=[torch.randn(64, 6)], preset="paper")
    save(net, tmp_path / "tied.onnx")
    session = load(tmp_path / "tied.onnx")
    tensors = [w.place for w in session.plan.weights]
    assert len(set(tensors)) == len(tensors) == len(net.weights)
    x = torch.randn(50, 6)
    for bits in ((32, 32), (8, 8), (4, 4), (4, 32)):
        net.set_bits(weights=bits[0], activations=bits[1])
        session.set_bits(weights=bits[0], activations=bits[1])
        got = session.run(x.numpy())
        for want, key in zip(net(x), ("output_0", "output_1"), strict=True):
            np.testing.assert_allclose(got[key], want.detach().numpy(), rtol=1e-4, atol=1e-5)


class Transposed(nn.Module):
    """Grouped and transposed convolutions, padding, a concatenation with one part that is not quantized."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(4, 8, 3, groups=2)
        self.b = nn.ConvTranspose2d(8, 6, 2, stride=2, groups=2)
        self.c = nn.Conv2d(10, 5, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.b(torch.relu(self.a(x))))
        y = torch.cat([y, torch.sin(x.repeat(1, 1, 2, 2)[:, :, :12, :12])], 1)
        return self.c(nn.functional.pad(y, (1, 1, 1, 1))).mean((2, 3))


@pytest.mark.parametrize("per_channel", [False, True])
def test_grouped_and_transposed_convolutions(per_channel: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(40, 4, 8, 8)
    net = anybit.prepare(Transposed(), x[:2], calibration=[x], per_channel=per_channel, preset="paper")
    copied = copy.deepcopy(net)
    save(net, tmp_path / "m.onnx")
    session = load(tmp_path / "m.onnx", threads=1)
    assert len(session.plan.biases) == 3
    for bits in ((32, 32), (8, 8), (4, 4), (3, 8)):
        net.set_bits(weights=bits[0], activations=bits[1])
        copied.set_bits(weights=bits[0], activations=bits[1])
        session.set_bits(weights=bits[0], activations=bits[1])
        want = net(x).detach()
        assert torch.equal(copied(x), want)
        far = np.abs(session.run(x.numpy()) - want.numpy()).max(1) > 1e-4 * float(want.abs().max())
        assert far.mean() <= 0.1  # a code on the border


class Odd(nn.Module):
    """An operator that ONNX does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.special.bessel_j0(self.layer(x))


def test_what_onnx_cannot_express_is_named(tmp_path: Path) -> None:
    net = anybit.prepare(Odd(), torch.randn(2, 4), calibration=[torch.randn(4, 4)], preset="paper")
    with pytest.raises(NetworkError, match="cannot be written as ONNX") as caught:
        save(net, tmp_path / "odd.onnx")
    assert "bessel_j0" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", [torch.float64, torch.float16, torch.bfloat16])
def test_other_number_types_are_saved_in_float32(kind: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 4).to(kind)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).to(kind)
    net = anybit.prepare(model, x[:2], calibration=[x], preset="paper")
    save(net, tmp_path / "m.onnx")
    session = load(tmp_path / "m.onnx")
    assert session.plan == net.plan
    assert {array.dtype for array in session.master.weights.values()} == {np.dtype(np.float32)}
    coarse = {torch.float64: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}[kind]  # of the simulation's own sums
    for bits in (32, 8, 4):
        net.set_bits(weights=bits, activations=bits)
        session.set_bits(weights=bits, activations=bits)
        want = net(x).detach().double().numpy()
        got = session.run(x.float().numpy())
        assert np.mean(np.abs(got - want).max(1) > coarse * np.abs(want).max()) <= (0.0 if bits == 32 else 0.1)


def only_bias(net: QuantizedNetwork) -> BiasModule:
    (module,) = [m for m in executors(net.body).values() if isinstance(m, BiasModule)]
    return module


def test_biases_are_whole_numbers_where_both_factors_are() -> None:
    torch.manual_seed(0)
    x = torch.rand(64, 5)
    for per_channel in (False, True):
        net = anybit.prepare(
            nn.Sequential(nn.Linear(5, 3)), x[:2], calibration=[x], per_channel=per_channel, preset="paper"
        )
        module = only_bias(net)
        exact = module.master.detach()
        for weights, activations in ((32, 8), (8, 32), (9, 8), (8, 9)):
            net.set_bits(weights=weights, activations=activations)
            assert torch.equal(module(), exact)
        net.set_bits(weights=4, activations=4)  # the input stays at 8 bits
        (weight,) = net.weights.values()
        unit = float(x.max()) / 255 * weight.detach().abs().amax(*([1] if per_channel else [])) / 7
        torch.testing.assert_close(module(), (exact / unit).round() * unit)
        assert not torch.equal(module(), exact)


def test_whole_biases_let_gradients_through() -> None:
    torch.manual_seed(0)
    x = torch.rand(64, 5)
    net = anybit.prepare(nn.Sequential(nn.Linear(5, 3)), x[:2], calibration=[x], preset="paper")
    net.set_bits(weights=3, activations=8)
    net(x).sum().backward()
    module = only_bias(net)
    assert module.master.grad is not None
    torch.testing.assert_close(module.master.grad, torch.full((3,), 64.0))


def test_weights_keep_their_names_and_biases_get_theirs() -> None:
    net = saved("small-conv")[1]
    model = translate(net)
    held = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    assert "features.0.weight" in net.weights
    assert net.weights.keys() < held.keys()
    assert len(net.plan.biases) == len(net.weights)
    for bias in net.plan.biases:
        assert bias.name == bias.weight.removesuffix("weight") + "bias"
        assert len(held[bias.name]) == net.weights[bias.weight].shape[0]
