"""Programs from a process that has PyTorch loaded already: importing it takes seconds, forking takes milliseconds.

For tests of what a program does, not of how it starts. A program has its own process, arguments, folder, environment
and streams, as if a shell had started it; its modules were imported before.

subprocess.run([*warm.python(), "script.py", "word"])  # also: -m module
subprocess.run(["bash", "-c", "anybit --version"], env=warm.with_command(os.environ))
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import json
import os
import runpy
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path

LOADED = (
    "anybit.artifact.session", "anybit.cli.main", "anybit.simulate.prepare", "anybit.simulate.to_onnx",
    "anybit.train.loop", "onnxscript", "optuna", "safetensors.torch", "sklearn.datasets", "torch._dynamo",
    "torch.distributed.launcher.api", "torch.onnx._internal.exporter._core",
)  # fmt: skip
"""What most programs would import."""

CLIENT = """
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as wire:
    wire.connect(sys.argv[1])
    request = json.dumps([sys.argv[2:], os.getcwd(), dict(os.environ)]).encode()
    socket.send_fds(wire, [len(request).to_bytes(8, "little")], [0, 1, 2])
    wire.sendall(request)
    answer = wire.recv(1)
sys.exit(answer[0] if answer else 1)
"""


@functools.cache
def _started() -> Path:
    """Start the process that programs come from, once, and return the folder of its socket and its commands."""
    folder = Path(tempfile.mkdtemp(prefix="anybit-warm-"))
    (folder / "client.py").write_text(CLIENT)
    starts = [sys.executable, "-IS", str(folder / "client.py"), str(folder / "socket")]
    (folder / "bin").mkdir()
    for name, words in (("python", []), ("anybit", ["-m", "anybit"])):
        path = folder / "bin" / name if name == "anybit" else folder / name
        path.write_text(f'#!/bin/sh\nexec {shlex.join([*starts, *words])} "$@"\n')
        path.chmod(0o755)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(
        [sys.executable, __file__, str(folder / "socket")], env=environment, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    assert server.stdin is not None
    assert server.stdout is not None

    def end() -> None:
        server.stdin.close()
        server.stdout.close()
        server.wait()

    atexit.register(end)
    assert server.stdout.read(1) == b"."
    return folder


def python() -> list[str]:
    """Return the first words of a command that runs a script, or a module after `-m`, with everything loaded."""
    return [str(_started() / "python")]


def with_command(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which `anybit` is the command line with everything loaded."""
    return {**environment, "PATH": f"{_started() / 'bin'}{os.pathsep}{environment['PATH']}"}


# In the process that programs come from


def serve(address: str) -> None:
    """Fork for everybody who asks, until the standard input ends."""
    for name in LOADED:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(address)
        door.listen(16)
        os.write(1, b".")
        while True:
            ready, _, _ = select.select([door, 0], [], [])
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            if 0 in ready:
                shutil.rmtree(Path(address).parent, ignore_errors=True)
                return
            wire, _ = door.accept()
            if os.fork() == 0:
                door.close()
                _attend(wire)
            wire.close()


def _attend(wire: socket.socket) -> None:
    """Run one program and tell its exit code; it ends with whoever asked for it."""
    head, streams, _, _ = socket.recv_fds(wire, 8, 3)
    text = b""
    while len(text) < int.from_bytes(head, "little"):
        text += wire.recv(1 << 16)
    words, folder, environment = json.loads(text)
    child = os.fork()
    if child == 0:
        wire.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        _run(words, folder, environment)
    watched = os.pidfd_open(child)
    ready, _, _ = select.select([watched, wire], [], [])
    if watched not in ready:
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with contextlib.suppress(OSError):
        wire.sendall(bytes([code % 256 if code >= 0 else 128 - code]))
    os._exit(0)


def _run(words: list[str], folder: str, environment: dict[str, str]) -> None:
    """Be the program that the words name, and end as Python would."""
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, encoding="utf-8", closefd=False)  # noqa: SIM115
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    module = words[0] == "-m"
    name, *rest = words[1:] if module else words
    sys.argv = [name, *rest]
    first = folder if module else str(Path(name).resolve().parent)
    own = str(Path(__file__).parent)
    path = [entry for entry in sys.path if entry != own]
    sys.path[:] = [first, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)), *path]
    code = 0
    try:
        if module:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(name, run_name="__main__")
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code % 256)


if __name__ == "__main__":
    serve(sys.argv[1])
