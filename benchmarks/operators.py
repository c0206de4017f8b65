"""Every operator that ONNX has an example of, adopted: is it taken, and does it stay what it was?

    python benchmarks/operators.py [part of a name]

ONNX brings an example of each of its operators in every form. Each is tried as it is, and then with all inputs but one
made constant, so that weights, tables and settings are stored in all places where a file can have them. What ONNX
Runtime does not run is left out. Of what is taken, the outputs at 16 bits are compared with those of the runtime.
Writes results/operators.json.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import onnx
from onnx import numpy_helper

import anybit
from anybit.artifact.runtime import onnxruntime
from anybit.artifact.values import parts_of
from anybit.common.files import write_json
from anybit.common.provenance import origin
from anybit.errors import AnybitError

Array = npt.NDArray[Any]
OUT = Path(__file__).resolve().parents[1] / "results/operators.json"
IR = 10
"""The newest form of files that every runtime here reads; the examples have the newest of all."""
FLOATS = (np.float16, np.float32, np.float64)
CLOSE = 0.01


class Case(NamedTuple):
    """One file and one input for it."""

    name: str
    model: onnx.ModelProto
    feed: dict[str, Any]


class Found(NamedTuple):
    """What became of a case: not run, refused, taken, or broken; why, or by how much outputs are off at 16 bits."""

    kind: str
    why: str = ""
    error: float = 0.0


def cases(part: str = "") -> Iterator[Case]:
    """Give every example whose name has this part: as it is, and with one input left."""
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        examples = collect_testcases()
    for example in examples:
        if part in example.name and example.model is not None and example.data_sets:
            inputs = example.data_sets[0][0]
            names = [value.name for value in example.model.graph.input]
            if len(inputs) == len(names):
                feed = dict(zip(names, inputs, strict=True))
                yield Case(example.name, example.model, feed)
                yield from _with_one_left(Case(example.name, example.model, feed))


def _with_one_left(case: Case) -> Iterator[Case]:
    """Give the case with all inputs but one stored in the file, for each that holds floating-point numbers."""
    arrays = {name: np.asarray(x) for name, x in case.feed.items() if isinstance(x, np.ndarray | np.generic)}
    if len(arrays) < len(case.feed) or len(arrays) < 2 or any(x.dtype.kind in "OUS" for x in arrays.values()):
        return
    for name in [name for name, x in arrays.items() if x.dtype in FLOATS]:
        model = copy.deepcopy(case.model)
        with contextlib.suppress(Exception):  # ONNX cannot write down every type of numpy
            stored = [numpy_helper.from_array(x, other) for other, x in arrays.items() if other != name]
            model.graph.initializer.extend(stored)
            left = [value for value in model.graph.input if value.name == name]
            del model.graph.input[:]
            model.graph.input.extend(left)
            yield Case(f"{case.name}, {name} left", model, {name: case.feed[name]})


def tried(case: Case, folder: Path) -> Found:
    """Adopt one case and compare its outputs at 16 bits."""
    plain, out = folder / "plain.onnx", folder / "out.onnx"
    case.model.ir_version = min(case.model.ir_version, IR)
    options = onnxruntime().SessionOptions()
    options.log_severity_level = 4
    try:
        onnx.save(case.model, plain)
        engine = onnxruntime().InferenceSession(str(plain), options, providers=["CPUExecutionProvider"])
        wanted = engine.run(None, case.feed)
    except Exception as error:
        return Found("not run", str(error).partition("\n")[0][:200])
    try:
        anybit.adopt(plain, out, calibration=[case.feed])
        session = anybit.load(out, threads=1)
        session.set_bits(weights=16, activations=16)
        found = session.run(case.feed)
    except AnybitError as error:
        return Found("refused", str(error).replace(str(plain), "the file"))
    except Exception as error:
        return Found("broken", repr(error)[:300])
    outputs = found if isinstance(found, dict) and len(engine.get_outputs()) > 1 else {"": found}
    values, wanted = (_arrays(some) for some in (list(outputs.values()), wanted))
    if len(values) != len(wanted):
        return Found("broken", f"{len(values)} outputs, not {len(wanted)}")
    errors = [_distance(a, b) for a, b in zip(wanted, values, strict=True)]
    return Found("taken", error=max(errors, default=0.0))


def _arrays(outputs: list[Any]) -> list[Array]:
    """Return the arrays that outputs are made of."""
    return [np.asarray(x) for i, value in enumerate(outputs) for x in parts_of(str(i), value).values()]


def _distance(wanted: Array, found: Array) -> float:
    """Return how far apart two outputs are, relative to the size of the first; infinity and giants count as one."""
    if wanted.shape != found.shape:
        return float("inf")
    if wanted.dtype.kind not in "fiub" or not wanted.size:
        return 0.0
    a, b = (np.nan_to_num(x.astype(np.float64), posinf=1e38, neginf=-1e38).clip(-1e38, 1e38) for x in (wanted, found))
    return float(np.linalg.norm(a - b) / max(float(np.linalg.norm(a)), 1e-6))


def main() -> None:
    """Try all of them and count."""
    part = sys.argv[1] if len(sys.argv) > 1 else ""
    counts: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    odd: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case in cases(part):
            found = tried(case, Path(folder))
            counts[found.kind] += 1
            if found.kind == "refused":
                why = found.why.partition(";")[0]
                refused[why] += 1
                if "no weight" not in why and "quantized already" not in why:
                    odd[case.name] = found.why[:200]
            if found.kind == "broken" or found.error > CLOSE:
                odd[case.name] = found.why or f"off by {found.error:.3g} at 16 bits"
                print(case.name, odd[case.name], flush=True)
    print(dict(counts))
    if not part:
        reasons = {why[:120]: count for why, count in refused.most_common()}
        write_json(OUT, {"about": __doc__, "counts": counts, "refused": reasons, "odd": odd, "origin": origin()})


if __name__ == "__main__":
    main()
