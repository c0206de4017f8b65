"""A second device for tests, on a machine that has none: `second_device()` returns `torch.device("second:0")`.

PyTorch takes its tensors for those of an accelerator. Their memory is ordinary memory, every operator runs on the CPU,
and what a GPU would refuse is refused: operands on two devices. Random operators draw from a generator of the device's
own, which `torch.second.get_rng_state` and `set_rng_state` read and write, and `torch.accelerator` knows the device.

    device = second_device()            # skips the test where there is no compiler
    model, batch = model.to(device), batch.to(device)
    with device_reads() as reads:       # counts what would wait for a GPU: .item(), float(), .tolist(), .cpu(), ...
        ...
    assert len(reads) <= 3

The extension behind it (`second_device.cpp`) is compiled at the first use, in a minute, and kept in PyTorch's cache of
extensions. Gradients are computed in the thread that asks for them, since PyTorch starts threads for devices once, at
the first backward pass of a process; `own_threads=True`, before that, gives the device its own as a GPU has. Fused LSTM
and GRU cells do not run on it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

SOURCE = Path(__file__).with_name("second_device.cpp")


def second_device(*, own_threads: bool = False) -> torch.device:
    """Return the device; the first call of a process compiles and registers it."""
    if shutil.which(os.environ.get("CXX", "c++")) is None or shutil.which("ninja") is None:
        pytest.skip("the second device needs a C++ compiler and ninja")
    _register()
    torch.autograd.set_multithreading_enabled(own_threads)
    return torch.device("second:0")


@functools.cache
def _register() -> None:
    from torch.utils import cpp_extension

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cpp_extension.load(
            "anybit_second_device", [str(SOURCE)], is_python_module=False, extra_cflags=["-O0", "-Wno-deprecated"]
        )
    torch.utils.rename_privateuse1_backend("second")
    torch._register_device_module("second", _module())
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)


def _module() -> types.ModuleType:
    """Return what is to PyTorch's other devices `torch.cuda`."""
    module: Any = types.ModuleType("torch.second")
    module.is_available = module.is_initialized = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module._is_in_bad_fork = lambda: False
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.get_rng_state = lambda device=0: torch.ops.second_device.get_state()
    module.set_rng_state = lambda state, device=0: torch.ops.second_device.set_state(state)
    module.manual_seed_all = module.manual_seed = _seed
    return module  # type: ignore[no-any-return]


def _seed(seed: int) -> None:
    torch.ops.second_device.set_state(torch.Generator().manual_seed(seed).get_state())


class _Reads(TorchDispatchMode):
    """Notes every operator that hands values of a device to the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        source = args[1] if func.overloadpacket is torch.ops.aten.copy_ else args[0] if args else None
        to_cpu = isinstance(out, Tensor) and out.device.type == "cpu"
        hands_over = to_cpu or func is torch.ops.aten._local_scalar_dense.default
        if isinstance(source, Tensor) and source.device.type != "cpu" and hands_over:
            self.found.append(str(func))
        return out


@contextlib.contextmanager
def device_reads() -> Iterator[list[str]]:
    """Give a list that grows by each read of a device's values."""
    with _Reads() as mode:
        yield mode.found
