"""The examples that ONNX brings of the operators with weights: nobody here made them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def operators() -> ModuleType:
    spec = importlib.util.spec_from_file_location("operators", ROOT / "benchmarks" / "operators.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


KINDS = {
    "test_conv_": 8, "test_basic_conv": 4, "test_convtranspose": 20, "test_gemm": 30, "test_matmul_": 14,
    "test_simple_rnn": 4, "test_lstm": 6, "test_gru": 6, "test_globalmaxpool": 0,
}  # fmt: skip
"""Parts of names, and how many of these cases have a weight and are run by every version of the runtime."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("part", "least"), KINDS.items(), ids=list(KINDS))
def test_what_the_runtime_runs_is_taken_and_stays_what_it_was(
    part: str, least: int, operators: ModuleType, tmp_path: Path
) -> None:
    taken = 0
    for case in operators.cases(part):
        found = operators.tried(case, tmp_path)
        assert found.kind != "broken", f"{case.name}: {found.why}"
        if found.kind == "refused":
            assert "has no weight that could be quantized" in found.why, f"{case.name}: {found.why}"
            assert ", " not in case.name or "globalmaxpool" in part, f"{case.name}: {found.why}"
        assert found.error <= operators.CLOSE, case.name
        taken += found.kind == "taken"
    assert taken >= least
