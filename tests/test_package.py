from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

import anybit

SRC = Path(anybit.__file__).parents[1]
HEAVY = ("torch", "sklearn", "plotly", "matplotlib", "onnxruntime")


def python(code: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter."""
    return subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=120)


# The public names


def test_the_public_names_are_sorted_and_resolve() -> None:
    assert anybit.__all__ == sorted(anybit.__all__)
    assert len(set(anybit.__all__)) == len(anybit.__all__)
    for name in anybit.__all__:
        value = getattr(anybit, name)
        assert inspect.getdoc(value), f"{name} has no docstring"
        assert value.__module__.startswith("anybit.")


def test_all_is_what_is_public() -> None:
    lazy = set(anybit._ON_FIRST_USE)
    here = {
        name
        for name, value in vars(anybit).items()
        if not name.startswith("_")
        and not inspect.ismodule(value)
        and getattr(value, "__module__", "").startswith("anybit.")
    }
    hidden = {"MissingDependency"}  # imported to be raised; its place is anybit.errors
    assert set(anybit.__all__) == (here | lazy) - hidden
    assert dir(anybit) == anybit.__all__


def test_what_type_checkers_see_is_what_is_loaded() -> None:
    tree = ast.parse((SRC / "anybit" / "__init__.py").read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == {name: module for name, (module, _) in anybit._ON_FIRST_USE.items()}


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'prepar'.*prepare"):
        _ = anybit.prepar  # type: ignore[attr-defined]


def test_the_version_is_that_of_the_installed_package() -> None:
    assert metadata.version("anybit") == anybit.__version__


# What an import brings along


@pytest.mark.parametrize("module", ["anybit", "anybit.spec", "anybit.errors", "anybit.cli", "anybit.pages.page"])
def test_importing_brings_in_nothing_heavy(module: str) -> None:
    done = python(f"import sys, {module}; print([m for m in {HEAVY} if m in sys.modules])")
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_torch_comes_with_the_first_name_that_needs_it() -> None:
    there = "print('torch' in sys.modules)"
    done = python(f"import sys, anybit; anybit.Bits(4, 4); {there}; anybit.prepare; {there}")
    assert (done.stdout, done.stderr) == ("False\nTrue\n", "")


WITHOUT = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocked())
"""


def test_without_torch_the_light_half_works() -> None:
    done = python(
        WITHOUT.format(names=["torch"]) + "import anybit; print(anybit.Bits.parse('w4a8'), anybit.QuantSpec(4))"
    )
    assert done.stdout == "W4A8 QuantSpec(bits=4, symmetric=True, signed=True, axis=None)\n"


RUNTIME = {"adopt", "allocate", "export", "load", "reconstruct", "report"}
"""Public names that load on first use, but need no PyTorch."""


def test_without_torch_the_runtime_is_there() -> None:
    done = python(
        WITHOUT.format(names=["torch"])
        + "import anybit; print(anybit.load.__name__, anybit.export.__name__, anybit.report.__name__)"
    )
    assert (done.stdout, done.stderr) == ("load export report\n", "")


@pytest.mark.parametrize("name", sorted(set(anybit._ON_FIRST_USE) - RUNTIME))
@pytest.mark.parametrize("block", [WITHOUT.format(names=["torch"]), "import sys; sys.modules['torch'] = None\n"])
def test_without_torch_a_name_that_needs_it_prints_the_install_line(name: str, block: str) -> None:
    code = f"""
import anybit
from anybit.errors import MissingDependency
for _ in range(2):
    try:
        anybit.{name}
    except MissingDependency as error:
        assert isinstance(error, ImportError)
        print(error)
"""
    done = python(block + code)
    line = f"anybit.{name} needs torch, which is not installed; run: pip install 'anybit[torch]'\n"
    assert (done.stdout, done.stderr) == (2 * line, "")


@pytest.mark.parametrize("words", [["train", "x.toml"], ["sweep", "x"], ["demo"]])
def test_without_torch_a_command_prints_the_install_line(words: list[str]) -> None:
    done = python(WITHOUT.format(names=["torch"]) + "from anybit.cli import main; main()", *words)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(f"error: anybit {words[0]} needs torch")
    assert "pip install 'anybit[" in done.stderr


def test_without_torch_a_report_is_written_all_the_same(tmp_path: Path) -> None:
    code = """
from pathlib import Path
from anybit.cli import main
from anybit.pages.rows import RowFile, write_rows
from anybit.spec import Row
rows = tuple(Row("a", 0, b, b, accuracy=0.5, loss=1.0, n=9) for b in (8, 4))
write_rows(Path(sys.argv[1]), RowFile("t", rows, {}))
main(["report", sys.argv[1]])
"""
    done = python(WITHOUT.format(names=["torch"]) + code, str(tmp_path / "rows.json"))
    assert (done.returncode, done.stderr) == (0, "")
    assert "W4A4" in (tmp_path / "report.html").read_text()


def test_a_bug_of_ours_is_not_taken_for_a_missing_package() -> None:
    block = WITHOUT.format(names=["x"]).replace('name.partition(".")[0] in', 'name == "anybit.plan.grid" or name in')
    done = python(block + "import anybit; anybit.prepare")
    assert "MissingDependency" not in done.stderr
    assert "ModuleNotFoundError: No module named 'anybit.plan.grid'" in done.stderr


# The import rules of the design


def module_name(path: Path) -> str:
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted((SRC / "anybit").rglob("*.py"))}


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def nodes(tree: ast.AST, *, at_once: bool) -> Iterator[ast.AST]:
    """Walk a module; `at_once` leaves out what does not run when it is imported."""
    for node in ast.iter_child_nodes(tree):
        if at_once and (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or is_type_checking(node)
        ):
            continue
        yield node
        yield from nodes(node, at_once=at_once)


def imports(name: str, source: str, *, at_once: bool, package: bool) -> set[str]:
    """Return the full names of the modules that a module imports."""
    found = set()
    for node in nodes(ast.parse(source), at_once=at_once):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = name.split(".") if package else name.split(".")[:-1]
                base = ".".join([*parts[: len(parts) - node.level + 1], *([base] if base else [])])
            found |= {base} | {f"{base}.{alias.name}" for alias in node.names if f"{base}.{alias.name}" in MODULES}
    return found


def imports_of(name: str, *, at_once: bool = False) -> set[str]:
    path = MODULES[name]
    return imports(name, path.read_text(), at_once=at_once, package=path.name == "__init__.py")


def inside(name: str, *roots: str) -> bool:
    return any(name == root or name.startswith(f"{root}.") for root in roots)


def reached_by(name: str) -> dict[str, str]:
    """Return every module that importing `name` imports, each with the module that asked for it."""
    found: dict[str, str] = {name: ""}
    todo = [name]
    while todo:
        current = todo.pop()
        parents = {current.rpartition(".")[0]} if "." in current else set()  # a package runs before what is in it
        for other in parents | (imports_of(current, at_once=True) if current in MODULES else set()):
            if other not in found:
                found[other] = current
                todo.append(other)
    return found


def test_the_rule_checker_sees_every_way_to_import() -> None:
    source = """
import torch.nn
from . import files
from ..spec import Bits
from anybit.train import loop
if TYPE_CHECKING:
    import numpy
def later():
    import sklearn
class Now:
    import json
try:
    import plotly
except ImportError:
    pass
"""
    now = imports("anybit.pages.page", source, at_once=True, package=False)
    assert now == {"torch.nn", "anybit.pages", "anybit.spec", "anybit.train", "anybit.train.loop", "json", "plotly"}
    assert imports("anybit.pages.page", source, at_once=False, package=False) == now | {"numpy", "sklearn"}
    assert "anybit.spec" in imports("anybit.pages", "from .. import spec", at_once=True, package=True)
    assert len(MODULES) > 30


ROOMS = (
    "errors", "common", "spec", "policy", "graph", "plan", "artifact", "simulate", "objectives", "models", "data",
    "evaluate", "task", "train", "pages", "serve", "demo", "cli", "__main__",
)  # fmt: skip
"""Every room, in the order in which they know of each other: a room imports only rooms that stand before it."""


def room(name: str) -> str:
    """Return the room that a module is in; the package itself, which everybody may ask for its version, is ""."""
    return [*name.split("."), ""][1]


def test_the_table_has_every_room() -> None:
    assert {room(name) for name in MODULES} == {*ROOMS, ""}


@pytest.mark.parametrize("name", [name for name in MODULES if name != "anybit"])
def test_a_room_imports_only_rooms_that_stand_before_it(name: str) -> None:
    others = {room(other) for other in imports_of(name) if inside(other, "anybit")}
    allowed = {"", *ROOMS[: ROOMS.index(room(name)) + 1]}
    assert {other for other in others if other not in allowed} == set()


@pytest.mark.parametrize("name", MODULES)
def test_nothing_in_the_package_imports_what_is_beside_it(name: str) -> None:
    beside = {path.name for path in SRC.parent.iterdir() if path.is_dir()}
    assert {"paper", "tests", "benchmarks"} <= beside
    assert not any(other.partition(".")[0] in beside for other in imports_of(name))


@pytest.mark.parametrize("name", [name for name in MODULES if inside(name, "anybit.objectives")])
def test_penalties_need_only_torch_spec_and_errors(name: str) -> None:
    allowed = ["torch", "anybit.spec", "anybit.errors", "anybit.objectives"]
    if name == "anybit.objectives.any_width":  # it runs the quantized network itself
        allowed += ["anybit.simulate", "anybit.plan"]
    found = {other for other in imports_of(name) if other.partition(".")[0] not in sys.stdlib_module_names}
    assert {other for other in found if not inside(other, *allowed)} == set()


@pytest.mark.parametrize("name", [name for name in MODULES if inside(name, "anybit.plan", "anybit.graph.view")])
def test_what_decides_needs_only_numpy(name: str) -> None:
    allowed = ["numpy", "anybit.spec", "anybit.errors", "anybit.common.text", "anybit.plan", "anybit.graph"]
    found = {other for other in imports_of(name) if other.partition(".")[0] not in sys.stdlib_module_names}
    assert {other for other in found if not inside(other, *allowed)} == set()


LIGHT = [
    name
    for name in MODULES
    if room(name) in ("errors", "common", "spec", "policy", "graph", "plan", "artifact", "pages", "serve")
    and name != "anybit.graph.from_torch"
]


@pytest.mark.parametrize("name", LIGHT)
def test_what_decides_and_ships_never_imports_torch(name: str) -> None:
    assert not any(inside(other, "torch") for other in imports_of(name))  # not even later, in a function
    reached = reached_by(name)
    torch = {other: by for other, by in reached.items() if inside(other, "torch", "torchvision", "safetensors.torch")}
    assert torch == {}


def test_the_walk_finds_torch_where_it_is() -> None:
    assert "torch" in reached_by("anybit.evaluate.sweep")
    assert "anybit.plan.grid" in reached_by("anybit.evaluate.sweep")


@pytest.mark.parametrize("name", [name for name in MODULES if not inside(name, "anybit.cli", "anybit.__main__")])
def test_nothing_imports_the_command_line(name: str) -> None:
    assert not any(inside(other, "anybit.cli") for other in imports_of(name))


def test_every_room_says_what_it_is_for() -> None:
    for name, path in MODULES.items():
        assert ast.get_docstring(ast.parse(path.read_text())), f"{name} has no docstring"
