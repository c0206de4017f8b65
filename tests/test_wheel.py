"""The wheel: built, installed into fresh environments, and every command of the README run there in an empty folder.

Nothing heavy is installed again. An environment gets links to the installed packages that anybit's own metadata ask
for, and to no others, so that a package that is used but not asked for is missed here.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import urllib.request
import venv
from importlib import metadata
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from packaging.requirements import Requirement
from PIL import Image
from sklearn.datasets import load_digits

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
VERBS = (
    "data", "train", "sweep", "report", "save", "export", "run", "bench", "adopt", "serve", "watch", "search", "demo",
)  # fmt: skip
"""In an order in which each finds what it needs."""


def commands() -> list[list[str]]:
    """Return the commands of the README that have something behind the verb, and `anybit demo`."""
    inline = re.findall(r"`(anybit [^`]+)`", README)
    blocks = [line.partition("#")[0] for part in README.split("```")[1::2] for line in part.splitlines()]
    found = [shlex.split(line)[1:] for line in [*inline, *(b.strip() for b in blocks)] if line.startswith("anybit ")]
    whole = [words for words in found if (words[1:] or words == ["demo"]) and "..." not in words]
    return sorted({tuple(words): words for words in whole}.values(), key=lambda words: VERBS.index(words[0]))


def test_the_readme_has_commands() -> None:
    assert {"demo", "train", "sweep", "save", "run"} <= {words[0] for words in commands()}


# The environments


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    words = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", folder, ROOT]
    subprocess.run([sys.executable, "-m", "pip", *words], check=True, timeout=120)
    (found,) = folder.glob("anybit-*.whl")
    return found


def needed(names: list[str]) -> dict[str, metadata.Distribution]:
    """Return the installed distributions that requirements lead to, by way of each other's metadata."""
    found: dict[str, metadata.Distribution] = {}
    seen: set[str] = set()
    todo = [Requirement(name) for name in names]
    while todo:
        requirement = todo.pop()
        if str(requirement) in seen or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        seen.add(str(requirement))
        found[requirement.name] = metadata.distribution(requirement.name)
        for text in found[requirement.name].requires or ():
            inner = Requirement(text)
            for extra in requirement.extras or {""}:
                if inner.marker is None or inner.marker.evaluate({"extra": extra}):
                    inner.marker = None
                    todo.append(inner)
                    break
    return found


def environment(folder: Path, wheel: Path, *requirements: str) -> Path:
    """Make an environment with the wheel and what its metadata ask for; return its folder of commands."""
    venv.create(folder, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    command = [sys.executable, "-m", "pip", "--python", str(folder), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*command, str(wheel)], check=True, timeout=120)
    for name, distribution in needed([*requirements]).items():
        tops = {path.parts[0] for path in distribution.files or () if path.parts[0] not in ("..", "__pycache__")}
        for top in tops if name != "anybit" else ():
            if not (packages / top).exists():
                (packages / top).symlink_to(Path(str(distribution.locate_file(top))))
    return folder / "bin"


@pytest.fixture(scope="module")
def full(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment(tmp_path_factory.mktemp("full"), wheel, "anybit[demo,policy,search]")


@pytest.fixture(scope="module")
def light(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment(tmp_path_factory.mktemp("light"), wheel, "anybit")


def outside() -> dict[str, str]:
    """Return an environment in which the source tree cannot be seen."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    return {**kept, "OMP_NUM_THREADS": "1", "BROWSER": "true", "COLUMNS": "100"}


def run(binaries: Path, folder: Path, *words: str, code: int = 0) -> str:
    done = subprocess.run(
        [str(binaries / words[0]), *words[1:]], cwd=folder, env=outside(), capture_output=True, text=True, timeout=900
    )
    assert done.returncode == code, f"{shlex.join(words)}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


LOOK = "import anybit, importlib.util as u; print(anybit.__file__, *(n for n in {names} if u.find_spec(n)))"
HEAVY = ("torch", "pytest", "mkdocs", "matplotlib", "cvxpy", "transformers", "lightning")


def test_what_an_environment_holds(full: Path, light: Path, tmp_path: Path) -> None:
    for binaries, wanted in ((full, ["torch"]), (light, [])):
        place, *found = run(binaries, tmp_path, "python", "-c", LOOK.format(names=HEAVY)).split()
        assert Path(place).is_relative_to(binaries.parent)
        assert found == wanted


# What the commands of the README name


def other_model(path: Path) -> None:
    weight = np.random.default_rng(0).normal(size=(4, 1, 3, 3)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("Conv", ["x", "w"], ["c"]), helper.make_node("Relu", ["c"], ["y"])], "other",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 1, 8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)], [numpy_helper.from_array(weight, "w")],
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)


def pictures(folder: Path) -> None:
    folder.mkdir()
    for number, picture in enumerate(load_digits().images[:5]):
        Image.fromarray((picture * 15.9375).astype(np.uint8)).save(folder / f"{number}.png")


OWN = """
import torch
from torch import nn

def make():
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))

def loaders():
    x, y = torch.rand(20, 1, 8, 8), torch.arange(20) % 10
    return [(x, y)], [(x, y)]

if __name__ == "__main__":
    torch.save(make().state_dict(), "best.pt")
"""


@pytest.fixture(scope="module")
def desk(full: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a reader's own files in it, and nothing else."""
    folder = tmp_path_factory.mktemp("desk")
    other_model(folder / "other.onnx")
    pictures(folder / "images")
    recipe = run(full, folder, "python", "-c", "import importlib.resources as i; "
                 "print((i.files('anybit') / 'recipes' / 'digits-base.toml').read_text())")  # fmt: skip
    (folder / "recipe.toml").write_text(recipe)
    for name in ("my_model.py", "my_data.py"):
        (folder / name).write_text(OWN)
    run(full, folder, "python", "my_model.py")
    return folder


SHORTER = {
    "demo": ["--seeds", "1"], "search": ["--values", "0,0.003"], "train": ["--epochs", "2"],
    "sweep": ["--widths", "FP W8A8 W4A4"],
}  # fmt: skip
"""What a command gets beside what the README says, so that it takes seconds."""


def serve(binaries: Path, folder: Path, words: list[str]) -> None:
    """Start a server, wait until it says where it is, and press ctrl-C."""
    process = subprocess.Popen(
        [str(binaries / "anybit"), *words, "--port", "0", "--no-open"], cwd=folder, env=outside(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        with urllib.request.urlopen(process.stdout.readline().strip(), timeout=60) as page:
            assert b"</html>" in page.read()
    finally:
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=60)
    assert process.returncode == 130, rest


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_every_command_of_the_readme_runs_from_the_wheel(full: Path, light: Path, desk: Path) -> None:
    first = [["train", "digits-base"], ["train", "digits-l1"], ["sweep", "runs/digits-l1-0"]]
    for words in [*first, *(words for words in commands() if words not in first)]:
        if words[0] == "serve":
            serve(full, desk, words)
        else:
            run(full, desk, "anybit", *words, *SHORTER.get(words[0], []))
    assert (desk / "runs" / "digits-base-0" / "rows.json").exists()
    assert (desk / "runs" / "demo" / "report.html").exists()
    check_without_torch(light, desk)


def check_without_torch(light: Path, desk: Path) -> None:
    """The file that was saved runs where anybit is installed with nothing else, and what needs more says so."""
    np.save(desk / "x.npy", np.zeros((2, 1, 8, 8), np.float32))
    for line in (
        "run model.onnx --input x.npy --policy fixed --bits W4A4", "export model.onnx out.onnx --bits W4A8",
        "bench model.onnx --rounds 1 --widths 'FP W8A8'", "adopt other.onnx --out adopted.onnx",
        "reconstruct model.onnx --calibrate x.npy --bits W4A4 --out better.onnx", "report runs/digits-base-0",
    ):  # fmt: skip
        run(light, desk, "anybit", *shlex.split(line))
    for line in ("train digits-base", "run model.onnx --input images", "watch model.onnx --policy fixed --times 1"):
        assert "pip install 'anybit[" in run(light, desk, "anybit", *shlex.split(line), code=2)
