"""The live page's server, over real sockets, with a real network behind it."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from stranger_graphs import CASES
from test_artifact_small import MODEL, header_with, small_master
from test_feeding import read_one

from anybit.artifact.adopt import adopt
from anybit.artifact.bench import footprint
from anybit.artifact.feeding import Preprocessing
from anybit.artifact.header import Header
from anybit.artifact.inputs import Input
from anybit.artifact.master import write_master
from anybit.artifact.session import load
from anybit.cli.serve import make_app, this_machine
from anybit.errors import DataError, MissingDependency, SpecError
from anybit.plan.points import Plan, Weight
from anybit.policy import Chooser, Reading, battery
from anybit.serve import server as server_module
from anybit.serve.app import App
from anybit.serve.model import LiveModel, softmax
from anybit.serve.server import HEADERS, LiveServer
from anybit.serve.upload import LARGEST_PICTURE, LARGEST_UPLOAD, read_examples, read_upload
from anybit.spec import Bits

image = pytest.importorskip("PIL.Image")

PIXELS = np.random.default_rng(0).integers(0, 256, (20, 9, 3), np.uint8)
NAMES = ["<b>cat</b>", "dog", "cow"]
ABOUT = {"classes": NAMES, "input": {"mean": [0.5], "std": [0.2]}, "measured": {"W4A8": 0.75, "FP": "much"}}


def encoded(kind: str = "PNG", pixels: Any = PIXELS, **settings: Any) -> bytes:
    file = io.BytesIO()
    image.fromarray(pixels).save(file, kind, **settings)
    return file.getvalue()


PNG = encoded()
COLOUR = [Input("x", np.dtype(np.float32), (0, 3, 6, 6))], Preprocessing().settled((0, 3, 6, 6))


class Reply(NamedTuple):
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Client:
    """Asks a server as the page does, unless told otherwise."""

    def __init__(self, server: LiveServer) -> None:
        self.server = server

    def __call__(
        self,
        path: str,
        body: bytes | None = None,
        *,
        method: str | None = None,
        token: str | None = None,
        **headers: str,
    ) -> Reply:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.server_port, timeout=30)
        method = method or ("GET" if body is None else "POST")
        prefix = f"/{self.server.token if token is None else token}/"
        sent = {key.replace("_", "-"): value for key, value in headers.items()}
        with contextlib.closing(connection):
            connection.request(method, path if path.startswith("/") else prefix + path, body, sent)
            response = connection.getresponse()
            return Reply(response.status, response.headers, response.read())

    def predict(self, data: bytes, weights: object = 4, activations: object = 8) -> Reply:
        return self(f"predict?weights={weights}&activations={activations}", data)

    def raw(self, data: bytes, *, close: bool = False) -> bytes:
        """Send bytes as they are and return what comes back until the server hangs up."""
        with socket.create_connection(("127.0.0.1", self.server.server_port), timeout=30) as connection:
            connection.sendall(data)
            if close:
                connection.shutdown(socket.SHUT_WR)
            parts = []
            with contextlib.suppress(ConnectionResetError):
                while part := connection.recv(2**16):
                    parts.append(part)
            return b"".join(parts)

    def head(self, *lines: str, path: str = "predict?weights=4&activations=8") -> bytes:
        """Return the head of an upload, as bytes to send by hand."""
        first = f"POST /{self.server.token}/{path} HTTP/1.1"
        return "\r\n".join([first, f"Host: {self.server.hosts[0]}", *lines, "", ""]).encode()


@contextlib.contextmanager
def served(app: App, **settings: Any) -> Iterator[Client]:
    with LiveServer(app, **settings) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield Client(server)
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("serve") / "model.onnx"
    write_master(path, MODEL, header_with(about=ABOUT))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("examples")
    for i in range(30):
        image.fromarray(np.full((6, 6), 8 * i, np.uint8)).save(path / f"{i:02}.png")
    (path / "notes.txt").write_text("not a picture")
    np.save(path / "x.npy", np.zeros((1, 6, 6)))
    return path


@pytest.fixture(scope="module")
def app(master: Path, folder: Path) -> App:
    return make_app(master, examples=folder, threads=1)


@pytest.fixture(scope="module")
def ask(app: App) -> Iterator[Client]:
    with served(app) as client:
        yield client


def expected(master: Path, path: Path, bits: Bits) -> Any:
    """Return the probabilities that the session itself gives for a file."""
    session = load(master)
    session.set_bits(weights=bits.weights, activations=bits.activations)
    x = read_one(path, (1, 6, 6), mean=(0.5,), std=(0.2,))
    parts = np.exp(session.run(x)[0].astype(np.float64))
    return parts / parts.sum()


# The page


def test_the_page_and_its_parts(ask: Client, folder: Path) -> None:
    page = ask("")
    assert (page.status, page.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    for name in re.findall(rb'(?:src|href)="([^"]+)"', page.body):
        part = ask(name.decode())
        assert part.status == 200
        assert int(part.headers["Content-Length"]) == len(part.body) > 0
    assert not re.search(rb"<script>|<style|style=|\son[a-z]+=|javascript:|https?:", page.body)
    assert not re.search(rb"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|https?:", ask("page.js").body)
    assert ask("examples/0").body == (folder / "00.png").read_bytes()
    assert ask("examples/0").headers["Content-Type"] == "image/png"


def test_every_answer_has_the_headers_that_keep_it_in(ask: Client) -> None:
    for reply in (
        ask(""),
        ask("page.js"),
        ask("nothing"),
        ask("", token="x"),
        ask.predict(b"x"),
        ask("", method="PUT"),
    ):
        assert {key: reply.headers[key] for key in HEADERS} == HEADERS
        assert not [key for key in reply.headers if key.lower().startswith("access-control")]
        assert reply.headers["Server"] == "anybit"
    assert "default-src 'none'" in HEADERS["Content-Security-Policy"]
    assert "unsafe" not in HEADERS["Content-Security-Policy"]


def test_what_the_page_knows_of_the_model(ask: Client) -> None:
    about = ask("about").json
    assert (about["name"], about["takes"], about["classes"]) == ("model.onnx", "6 x 6 pixels, grey", 3)
    assert about["pictures"]
    assert about["types"][-3:] == ["image/webp", ".npy", ".npz"]
    assert about["widths"] == [2, 3, 4, 5, 6, 7, 8, 32]
    assert about["measured"] == {"W4A8": 0.75}
    assert len(about["examples"]) == 24
    assert about["examples"][:4] == ["00.png", "01.png", "02.png", "03.png"]
    assert about["examples"][-1] == "28.png"
    assert about["steps"][0] == {"percent": 20.0, "bits": "W4A4"}


def test_steps_bring_their_widths_to_the_sliders(master: Path) -> None:
    app = make_app(master, steps="30:W10A16")
    assert app.about()["widths"] == [2, 3, 4, 5, 6, 7, 8, 10, 16, 32]
    assert app.about()["examples"] == []
    assert json.loads(app.choose({"percent": "29", "mains": "0"}).body)["bits"] == "W10A16"


# Predictions


@pytest.mark.parametrize("bits", [Bits(), Bits(8, 8), Bits(4, 8), Bits(2, 3), Bits(32, 5)])
@pytest.mark.parametrize("kind", ["png", "bmp", "jpeg"])
def test_a_prediction_is_what_the_session_gives(
    ask: Client, master: Path, tmp_path: Path, bits: Bits, kind: str
) -> None:
    (tmp_path / f"a.{kind}").write_bytes(encoded(kind.upper()))
    want = expected(master, tmp_path / f"a.{kind}", bits)
    reply = ask.predict(encoded(kind.upper()), bits.weights, bits.activations)
    assert reply.status == 200
    got = reply.json
    assert (got["bits"], got["weights"], got["activations"]) == (str(bits), bits.weights, bits.activations)
    assert [guess["class"] for guess in got["guesses"]] == np.argsort(-want).tolist()
    np.testing.assert_allclose([guess["confidence"] for guess in got["guesses"]], np.sort(want)[::-1], rtol=1e-5)
    assert [guess["label"] for guess in got["guesses"]] == [NAMES[i] for i in np.argsort(-want)]
    assert got["milliseconds"] > 0
    assert 3 <= got["runs"] <= 15


@pytest.mark.parametrize("channels", [1, 3])
def test_the_picture_that_comes_back_is_what_went_in(channels: int, master: Path, tmp_path: Path) -> None:
    """With the normalization undone, and in the network's own size."""
    model = make_app(master).model
    model.how = Preprocessing(mean=(0.3, 0.4, 0.5)[:channels], std=(0.2, 0.3, 0.1)[:channels], scale="-1-1").settled(
        (0, channels, 5, 7)
    )
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, channels), np.uint8)
    normal = model.how.normalize(pixels)[None]
    seen, size = model.seen(normal)
    picture = image.open(io.BytesIO(seen))
    assert (picture.size, picture.mode, size) == ((7, 5), {1: "L", 3: "RGB"}[channels], (5, 7))
    assert np.array_equal(np.asarray(picture).reshape(5, 7, channels), pixels)
    outside = np.asarray(image.open(io.BytesIO(model.seen(99 * np.sign(normal))[0])))
    assert set(outside.ravel().tolist()) <= {0, 255}  # beyond black and white there is nothing to show


@pytest.mark.parametrize("kind", ["WEBP", "GIF"])
def test_other_kinds_of_pictures(ask: Client, kind: str) -> None:
    grey = np.arange(36, dtype=np.uint8).reshape(6, 6) * 7
    settings = {"lossless": True} if kind == "WEBP" else {"save_all": True, "append_images": [image.new("L", (6, 6))]}
    assert (
        ask.predict(encoded(kind, grey, **settings)).json["guesses"]
        == ask.predict(encoded("PNG", grey)).json["guesses"]
    )


def test_every_way_to_store_pixels(ask: Client) -> None:
    for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"):
        file = io.BytesIO()
        image.new(mode, (5, 7)).save(file, "PNG")
        assert ask.predict(file.getvalue()).status == 200


def test_requests_at_the_same_time_do_not_mix_widths(
    ask: Client, master: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.png").write_bytes(PNG)
    pairs = [Bits(w, a) for w in (2, 3, 4, 8, 32) for a in (2, 4, 32)]
    want = {bits: np.sort(expected(master, tmp_path / "a.png", bits))[::-1] for bits in pairs}
    assert len({tuple(np.log(value).round(3)) for value in want.values()}) == len(
        pairs
    )  # each width is told by its answer
    asked = pairs * 16
    monkeypatch.setattr(LiveModel, "timed", lambda self, x: (1.0, 3))  # timing would keep the switches apart
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            replies = list(pool.map(lambda bits: ask.predict(PNG, bits.weights, bits.activations).json, asked))
    finally:
        sys.setswitchinterval(before)
    for bits, reply in zip(asked, replies, strict=True):
        assert reply["bits"] == str(bits)
        np.testing.assert_allclose([guess["confidence"] for guess in reply["guesses"]], want[bits], rtol=1e-4)


def test_a_network_that_ends_in_a_softmax_has_said_its_confidence(tmp_path: Path) -> None:
    model = onnx.ModelProto()
    model.CopyFrom(MODEL)
    model.graph.node[-1].output[0] = "logits"
    model.graph.node.append(helper.make_node("Softmax", ["logits"], ["y"], name="softmax", axis=1))
    write_master(tmp_path / "s.onnx", model, header_with(about=ABOUT))
    write_master(tmp_path / "plain.onnx", MODEL, header_with(about=ABOUT))
    with_softmax, plain = (make_app(tmp_path / name).model.predict(PNG, Bits()) for name in ("s.onnx", "plain.onnx"))
    for a, b in zip(with_softmax["guesses"], plain["guesses"], strict=True):
        assert a["confidence"] == pytest.approx(b["confidence"], rel=1e-5)
    assert sum(guess["confidence"] for guess in plain["guesses"]) == pytest.approx(1)


def test_scores_of_several_steps_are_no_classes_of_the_picture(tmp_path: Path) -> None:
    model = onnx.ModelProto()
    model.CopyFrom(MODEL)
    model.graph.node[-1].output[0] = "logits"
    model.graph.initializer.append(numpy_helper.from_array(np.array([1]), "axis"))
    for kind, *names in (("Unsqueeze", "logits", "axis", "row"), ("Concat", "row", "row", "rows")):
        settings = {"axis": 1} if kind == "Concat" else {}
        model.graph.node.append(helper.make_node(kind, names[:-1], names[-1:], name=kind.lower(), **settings))
    model.graph.node.append(helper.make_node("Softmax", ["rows"], ["y"], name="softmax", axis=2))
    model.graph.output[0].type.tensor_type.ClearField("shape")
    write_master(tmp_path / "s.onnx", model, header_with(about={}))
    app = make_app(tmp_path / "s.onnx")
    assert app.model.predict(PNG, Bits())["outputs"][0].startswith("y: 1 x 2 x 3, ")
    assert app.about()["classes"] == 0


def test_without_names_no_class_is_made_up(tmp_path: Path) -> None:
    app = make_app(small_master(tmp_path))
    found = app.model.predict(PNG, Bits(8, 8))
    assert found["guesses"] == []
    assert app.about()["classes"] == 0
    assert found["outputs"][0].startswith("y: 1 x 3, ")


def saved(array: Any, **more: Any) -> bytes:
    file = io.BytesIO()
    if more:
        np.savez(file, x=array, **more)
    else:
        np.save(file, array)
    return file.getvalue()


def test_arrays_can_be_uploaded(ask: Client, master: Path) -> None:
    x = np.random.default_rng(0).normal(size=(1, 1, 6, 6)).astype(np.float32)
    session = load(master)
    session.set_bits(weights=4, activations=8)
    want = int(session.run(x).argmax())
    for data in (saved(x), saved(x[0].astype(np.float64)), saved(x, other=x)):
        assert ask.predict(data).json["guesses"][0]["class"] == want
    for data, message in ((saved(np.zeros(3)), "does not fit input 'x'"), (b"PK" + bytes(30), "not a whole .npz"),
                          (saved(np.array(["a"])), "does not fit"), (saved(x * np.nan), "NaN")):  # fmt: skip
        reply = ask.predict(data)
        assert reply.status == 400
        assert message in reply.json["error"]
        assert "upload.np" not in reply.json["error"]  # names of the server's own files are nobody's business


def test_text_can_be_uploaded(tmp_path: Path) -> None:
    onnx.save(CASES["text_in_and_out"].build(), tmp_path / "plain.onnx")
    adopt(tmp_path / "plain.onnx", tmp_path / "m.onnx")
    with served(make_app(tmp_path / "m.onnx")) as ask:
        assert ask("about").json["takes"].startswith("input 'words' (any x any, text); input 'x'")
        file = io.BytesIO()
        np.savez(file, words=np.array([["ant", "cat"]]), x=np.ones((1, 6)))
        said = ask.predict(file.getvalue()).json
        assert said["outputs"][0].split(": ")[1] in ("1, 'good'", "1, 'bad [2J'", "1, 'ugly'")
        assert len(said["guesses"]) == 3
        file = io.BytesIO()
        np.savez(file, words=np.array([[1, 2]]), x=np.ones((1, 6)))
        reply = ask.predict(file.getvalue())
        assert reply.status == 400
        assert "text is expected, got int64" in reply.json["error"]


def test_what_a_width_takes(ask: Client, master: Path) -> None:
    got = {
        bits: ask(f"footprint?weights={bits.weights}&activations={bits.activations}") for bits in (Bits(4, 8), Bits())
    }
    size, _ = footprint(master, Bits(4, 8), {"x": np.zeros((1, 1, 6, 6), np.float32)})
    assert got[Bits(4, 8)].json["file_bytes"] == size
    assert got[Bits()].json["file_bytes"] != size
    assert all(reply.json["resident_bytes"] > 0 for reply in got.values())
    assert ask("footprint?weights=4&activations=8").json == got[Bits(4, 8)].json  # measured once


# The policy


def test_the_policy_is_that_of_the_runtime(ask: Client) -> None:
    chooser, now = Chooser(battery(), margin=3), ""
    seen = set()
    for percent in (100, 99, 60, 50, 49, 51, 52.5, 53, 21, 20, 19, 20, 22, 23, 0, 100):
        for mains in (False, True) if percent == 0 else (False,):
            want = chooser.choose(Reading(percent, mains))
            got = ask(f"policy?percent={percent}&mains={int(mains)}{now}").json
            assert got["bits"] == str(want)
            seen.add(got["bits"])
            now = f"&now={got['bits']}"
    assert seen == {"FP", "W8A8", "W4A8", "W4A4"}


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("percent=101&mains=0", "0 to 100"), ("percent=nan&mains=0", "0 to 100"), ("percent=-1&mains=0", "0 to 100"),
        ("mains=0", "0 to 100"), ("percent=5", "mains must be 0 or 1"), ("percent=5&mains=yes", "mains must be"),
        ("percent=5&mains=0&now=four", "looks like W4A8"), ("percent=5&percent=6&mains=0", "twice"),
        ("&".join(f"a{i}=1" for i in range(11)), "at most 10"),
    ],
)  # fmt: skip
def test_the_policy_takes_no_nonsense(ask: Client, query: str, message: str) -> None:
    reply = ask(f"policy?{query}")
    assert reply.status == 400
    assert message in reply.json["error"]


def test_a_machine_without_psutil(monkeypatch: pytest.MonkeyPatch, master: Path) -> None:
    def missing() -> Reading:
        raise MissingDependency("psutil", "policy", "reading battery and memory")

    monkeypatch.setattr("anybit.cli.serve.read_machine", missing)
    assert this_machine() is None
    assert make_app(master).about()["machine"] is None
    monkeypatch.setattr("anybit.cli.serve.read_machine", lambda: Reading(41.5, on_mains=False))
    assert make_app(master).about()["machine"] == {"percent": 41.5, "on_mains": False}


# Who may ask


def test_without_the_token_nothing_is_served(ask: Client) -> None:
    token = ask.server.token
    assert len(token) >= 32
    for wrong in ("x", token[:-1], token + "x", token.swapcase(), "%00"):
        for name in ("", "page.js", "about", "examples/0"):
            reply = ask(name, token=wrong)
            assert (reply.status, "token" in reply.json["error"]) == (403, True)
        assert ask("predict?weights=4&activations=8", PNG, token=wrong).status == 403
    for path in ("/", "/favicon.ico", "//", f"/?{token}", f"/x?token={token}", f"//{token}", f"/page.js/{token}/"):
        assert ask(path).status == 403
    with LiveServer(ask.server.app) as other:
        assert other.token != token


def test_bytes_that_are_no_text_in_the_address(ask: Client) -> None:
    said = ask.raw(b"GET /\xff\xfe\x80/ HTTP/1.1\r\nHost: " + ask.server.hosts[0].encode() + b"\r\n\r\n")
    assert b" 403 " in said.splitlines()[0]


@pytest.mark.parametrize("path", [
    "../../etc/passwd", "..%2f..%2fetc%2fpasswd", "%2e%2e/server.py", "server.py", "__init__.py", "./page.js",
    "examples/", "examples/24", "examples/-1", "examples/00", "examples/../page.js", "page.js/", "page.html", "PAGE.JS",
    "examples/00.png", "//etc/passwd", "file:///etc/passwd", "page.js%00", "predict/../about",
])  # fmt: skip
def test_no_other_path_leads_anywhere(ask: Client, path: str) -> None:
    reply = ask(f"/{ask.server.token}/{path}")
    assert reply.status == 404
    assert b"root:" not in reply.body
    assert ask(f"/{path}").status == 403


def test_a_name_that_someone_else_chose_for_this_address(ask: Client) -> None:
    port = ask.server.server_port
    for host in (f"127.0.0.1:{port}", f"localhost:{port}"):
        assert ask("about", Host=host).status == 200
    for host in (
        "evil.example",
        f"evil.example:{port}",
        "127.0.0.1",
        "localhost",
        f"127.0.0.1:{port + 1}",
        f"[::1]:{port}",
        "",
    ):
        reply = ask("about", Host=host)
        assert (reply.status, "only known as" in reply.json["error"]) == (403, True)
    line = f"GET /{ask.server.token}/about HTTP/1.1\r\n".encode()
    assert b" 403 " in ask.raw(line + b"\r\n").splitlines()[0]
    twice = f"Host: 127.0.0.1:{port}\r\nHost: evil.example\r\n\r\n".encode()
    assert b" 403 " in ask.raw(line + twice).splitlines()[0]


def test_uploads_come_from_the_page_itself(ask: Client) -> None:
    port = ask.server.server_port
    path = "predict?weights=4&activations=8"
    for origin in (f"http://127.0.0.1:{port}", f"http://localhost:{port}"):
        assert ask(path, PNG, Origin=origin).status == 200
    for origin in (
        "null",
        "http://evil.example",
        f"https://127.0.0.1:{port}",
        "http://127.0.0.1",
        f"http://127.0.0.1:{port}.",
    ):
        reply = ask(path, PNG, Origin=origin)
        assert (reply.status, reply.json["error"]) == (403, "only the page itself may upload")


def test_methods(ask: Client) -> None:
    assert ask("predict").status == 405
    assert ask("about", b"").status == 405
    for method in ("PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "HEAD"):
        reply = ask("about", method=method)
        assert reply.status == 501
        assert reply.headers["Allow"] is None
        if method != "HEAD":
            assert "GET and POST" in reply.json["error"]


@pytest.mark.parametrize(
    "junk",
    [b"\r\n\r\n", b"\x16\x03\x01\x02\x00\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET /" + 70000 * b"a"],
)
def test_what_is_no_request_is_refused_and_the_server_lives(ask: Client, junk: bytes) -> None:
    assert b"Traceback" not in ask.raw(junk, close=True)
    assert ask("about").status == 200


# What may be uploaded


def chunk(kind: bytes, data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")


def bomb(side: int) -> bytes:
    """Return a small PNG that claims `side` x `side` pixels."""
    head = side.to_bytes(4, "big") * 2 + b"\x08\x00\x00\x00\x00"
    rows = zlib.compress(bytes(100_000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def claimed(side: int) -> bytes:
    """Return a small WebP that claims `side` x `side` pixels."""
    data = bytearray(encoded("WEBP", lossless=True))
    assert data[12:16] == b"VP8L"
    data[21:25] = (int.from_bytes(data[21:25], "little") >> 28 << 28 | (side - 1) << 14 | (side - 1)).to_bytes(
        4, "little"
    )
    return bytes(data)


BAD = {
    "text": (b"hello", "no picture of a known type"),
    "html": (b"<html><script>alert(1)</script>", "no picture of a known type"),
    "svg": (b'<svg xmlns="http://www.w3.org/2000/svg"/>', "no picture of a known type"),
    "tiff": (encoded("TIFF"), "PNG, JPEG, BMP, WebP or GIF"),
    "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "no picture of a known type"),
    "head of a PNG": (PNG[:20], "no picture of a known type"),
    "half a PNG": (PNG[: len(PNG) // 2], "broken or cut short"),
    "half a JPEG": (encoded("JPEG")[:-100], "broken or cut short"),
    "half a BMP": (encoded("BMP")[:200], "broken or cut short"),
    "PNG with a flipped bit": (PNG[:60] + bytes([PNG[60] ^ 4]) + PNG[61:], "broken or cut short"),
    "large PNG": (bomb(6400), "6400 x 6400 pixels, more than 40,000,000"),
    "PNG that Pillow warns about": (bomb(10_000), "more than 40,000,000"),
    "large WebP": (claimed(6400), "6400 x 6400 pixels, more than 40,000,000"),
    "WebP that Pillow refuses": (claimed(16_383), "40,000,000 pixels"),
    "PNG that Pillow refuses": (bomb(60_000), "40,000,000 pixels"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_upload_gets_a_sentence(ask: Client, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    data, message = BAD[name]
    reply = ask.predict(data)
    assert reply.status == 400
    assert list(reply.json) == ["error"]
    assert message in reply.json["error"]
    assert "0x" not in reply.json["error"]
    assert "Traceback" not in capfd.readouterr().err
    assert ask.predict(PNG).status == 200


def test_random_damage_is_never_a_bug(app: App) -> None:
    rng = np.random.default_rng(0)
    for kind in ("PNG", "JPEG", "BMP", "WEBP", "GIF"):
        whole = encoded(kind)
        for _ in range(60):
            broken = bytearray(whole)
            for where in rng.integers(0, len(whole), 4):
                broken[where] = rng.integers(256)
            with contextlib.suppress(DataError):
                assert read_upload(bytes(broken[: rng.integers(1, len(whole) + 1)]), *COLOUR)["x"].shape == (1, 3, 6, 6)


def test_an_upload_is_read_like_a_file(tmp_path: Path) -> None:
    for name in ("a.png", "a.jpg", "a.webp", "a.bmp"):
        image.fromarray(PIXELS).save(tmp_path / name)
        for shape in ((3, 4, 8), (1, 40, 2)):
            takes, how = Input("x", np.dtype(np.float32), (0, *shape)), Preprocessing(mean=(0.1,), std=(0.5,))
            want = read_one(tmp_path / name, shape, mean=(0.1,), std=(0.5,))
            got = read_upload((tmp_path / name).read_bytes(), [takes], takes.settle(how))
            np.testing.assert_array_equal(got["x"], want)


def test_too_large_is_said_before_it_is_read(ask: Client) -> None:
    reply = ask.predict(bytes(LARGEST_UPLOAD + 1))
    assert (reply.status, "up to 10 MB" in reply.json["error"]) == (413, True)
    said = ask.raw(ask.head(f"Content-Length: {10**15}"), close=True)  # nothing follows, and nothing is waited for
    assert b" 413 " in said.splitlines()[0]
    assert ask.predict(PNG + bytes(LARGEST_UPLOAD - len(PNG))).status == 200  # as large as it may be


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        ([], 411), (["Transfer-Encoding: chunked"], 411), (["Content-Length: 5", "Transfer-Encoding: chunked"], 411),
        (["Content-Length: -1"], 400), (["Content-Length: +5"], 400), (["Content-Length: 1e3"], 400),
        (["Content-Length: 0"], 400), (["Content-Length: "], 400), (["Content-Length: ٣"], 400),
        (["Content-Length: 5", "Content-Length: 6"], 400), (["Content-Length: " + "9" * 30], 400),
    ],
)  # fmt: skip
def test_a_length_that_is_none(ask: Client, lines: list[str], status: int) -> None:
    said = ask.raw(ask.head(*lines) + b"12345", close=True)
    assert f" {status} ".encode() in said.splitlines()[0]
    assert b'{"error": ' in said


def test_a_length_that_is_not_true(ask: Client) -> None:
    said = ask.raw(ask.head(f"Content-Length: {len(PNG) + 9}") + PNG, close=True)
    assert b" 400 " in said.splitlines()[0]
    assert f"{len(PNG)} of {len(PNG) + 9} bytes came".encode() in said
    ask.raw(ask.head(f"Content-Length: {len(PNG) - 99}") + PNG)  # what comes after the upload is nobody's
    assert ask.predict(PNG).status == 200


@pytest.mark.parametrize(
    ("weights", "activations"), [(1, 8), (8, 17), ("", 8), ("x", 8), ("-4", 8), ("4.0", 8), ("99", 8), ("²", 8)]
)
def test_widths_that_are_none(ask: Client, weights: object, activations: object) -> None:
    path = f"weights={weights}&activations={activations}".encode().decode("ascii", "ignore")
    for reply in (ask(f"predict?{path}", PNG), ask(f"footprint?{path}")):
        assert reply.status == 400
        assert "must be" in reply.json["error"]
    assert ask("predict", PNG).status == 400


# Slow and many clients


def trickle(connection: socket.socket) -> None:
    """Never be quiet, and never be done."""
    for _ in range(90):
        connection.sendall(b"X-Header: 1\r\n")
        time.sleep(0.1)


def test_slow_clients_are_cut_off(app: App) -> None:
    with served(app, quiet=0.5, patience=1.5) as ask:
        assert ask.raw(b"GET /") == b""  # half a line, then nothing
        said = ask.raw(ask.head("Content-Length: 100") + b"12")
        assert b" 408 " in said.splitlines()[0]
        with socket.create_connection(("127.0.0.1", ask.server.server_port)) as drip:
            drip.sendall(b"GET / HTTP/1.1\r\n")
            with pytest.raises(OSError, match=r"Broken pipe|reset"):
                trickle(drip)
        assert ask("about").status == 200


def test_idle_clients_do_not_keep_others_out(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MOST_CONNECTIONS", 3)
    with served(app, quiet=3) as ask, contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(socket.create_connection(("127.0.0.1", ask.server.server_port)))
        refused = 0
        while not served_at_all(ask):  # until the idle ones are cut off
            refused += 1
            time.sleep(0.2)
        assert refused > 0


def served_at_all(ask: Client) -> bool:
    try:
        return ask("about").status == 200
    except (ConnectionError, http.client.HTTPException):
        return False


def test_closing_does_not_wait_for_idle_clients(app: App) -> None:
    with contextlib.ExitStack() as stack, served(app, quiet=3600, patience=3600) as ask:
        stack.enter_context(socket.create_connection(("127.0.0.1", ask.server.server_port)))
        assert ask("about").status == 200


def test_a_client_that_goes_away_is_no_bug(ask: Client, capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(5):
        with socket.create_connection(("127.0.0.1", ask.server.server_port)) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
            connection.sendall(ask.head(f"Content-Length: {len(PNG)}") + PNG)
    assert ask.predict(PNG).status == 200
    assert "Traceback" not in capfd.readouterr().err


def test_a_bug_is_an_answer_too_and_goes_to_the_terminal(master: Path, capfd: pytest.CaptureFixture[str]) -> None:
    app = make_app(master)
    app.routes["about"] = "GET", lambda query, body: 1 / 0  # type: ignore[assignment,return-value]
    with served(app) as ask:
        reply = ask("about")
    assert (reply.status, "bug" in reply.json["error"]) == (500, True)
    assert b"ZeroDivision" not in reply.body
    assert "ZeroDivisionError" in capfd.readouterr().err


# What can be served


def linear(path: Path, shape: list[int], output: list[int], scale: float = 1.0) -> Path:
    """Write a master with one linear layer."""
    size, classes = int(np.prod(shape)), int(np.prod(output))
    nodes = [
        helper.make_node("Flatten", ["x"], ["flat"], name="flat", axis=1),
        helper.make_node("Gemm", ["flat", "w"], ["out"], name="gemm"),
        helper.make_node("Reshape", ["out", "shape"], ["y"], name="reshape"),
    ]
    graph = helper.make_graph(
        nodes, "network",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", *shape])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", *output])],
        [numpy_helper.from_array(np.full((size, classes), scale, np.float32), "w"),
         numpy_helper.from_array(np.array([-1, *output]), "shape")],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    write_master(path, model, Header(Plan((Weight("w"),))))
    return path


@pytest.mark.parametrize(("shape", "output"), [([5], [7]), ([2, 4, 4], [7]), ([3, 4, 4], [2, 3])])
def test_networks_without_pictures_or_classes_are_shown(tmp_path: Path, shape: list[int], output: list[int]) -> None:
    app = make_app(linear(tmp_path / "m.onnx", shape, output))
    assert app.about()["classes"] == 0
    assert app.about()["pictures"] == (shape == [3, 4, 4])
    assert ("input 'x' (any x " in app.about()["takes"]) == (shape != [3, 4, 4])
    found = app.model.predict(saved(np.ones((1, *shape))), Bits(8, 8))
    size = " x ".join(map(str, [1, *output]))
    assert found["outputs"][0].startswith(f"y: {size}, from ")
    if shape != [3, 4, 4]:
        assert found["seen"] is None
        with pytest.raises(DataError, match=r"takes no picture but input 'x' .*; upload an \.npy or \.npz file"):
            app.model.predict(PNG, Bits())


def test_a_strangers_file_with_several_inputs_and_a_branch(tmp_path: Path) -> None:
    case = CASES["if_with_layers"]
    onnx.save(case.build(), tmp_path / "plain.onnx")
    adopt(tmp_path / "plain.onnx", tmp_path / "m.onnx", calibration=[case.feed()])
    app = make_app(tmp_path / "m.onnx")
    assert "input 'sr' (one number, int64)" in app.about()["takes"]
    file, feed = io.BytesIO(), case.feed()
    np.savez(file, **feed)
    session = load(tmp_path / "m.onnx")
    session.set_bits(weights=4, activations=8)
    want = session.run(feed)
    found = app.model.predict(file.getvalue(), Bits(4, 8))
    assert found["outputs"][0].endswith(f"from {want.min():.4g} to {want.max():.4g}")
    with pytest.raises(
        DataError, match=r"holds one array, but the network has 2 inputs; upload an \.npz file with x, sr"
    ):
        app.model.predict(saved(feed["x"]), Bits(4, 8))


def test_an_output_that_is_not_finite_is_told(tmp_path: Path) -> None:
    model = make_app(linear(tmp_path / "m.onnx", [3, 4, 4], [7], scale=3e38)).model
    with pytest.raises(DataError, match="not finite"):
        model.predict(encoded(pixels=np.full((4, 4, 3), 255, np.uint8)), Bits())


def test_softmax_of_large_numbers() -> None:
    np.testing.assert_allclose(softmax(np.array([-1e4, 0.0, np.log(3)])), [0, 0.25, 0.75])


def test_example_folders(tmp_path: Path, folder: Path) -> None:
    assert [example.name for example in read_examples(folder / "07.png")] == ["07.png"]
    with pytest.raises(DataError, match="no such file"):
        read_examples(tmp_path / "gone")
    (tmp_path / "x.ppm").write_bytes(b"P6")
    with pytest.raises(DataError, match="no PNG, JPEG"):
        read_examples(tmp_path)
    np.save(tmp_path / "x.npy", np.zeros(3))
    assert [(example.name, example.kind) for example in read_examples(tmp_path)] == [
        ("x.npy", "application/octet-stream")
    ]
    (tmp_path / "b.png").write_bytes(PNG[:60])
    with pytest.raises(DataError, match=r"b\.png: cannot be an example: this file is broken"):
        read_examples(tmp_path)
    (tmp_path / "b.png").write_bytes(PNG + bytes(LARGEST_UPLOAD))
    with pytest.raises(DataError, match="more than 10 MB"):
        read_examples(tmp_path)
    assert LARGEST_PICTURE < image.MAX_IMAGE_PIXELS


def test_a_port_that_is_taken(ask: Client) -> None:
    for port, message in ((ask.server.server_port, "in use"), (70000, "cannot be used")):
        with pytest.raises(SpecError, match=message):
            LiveServer(ask.server.app, port=port)


def test_only_this_machine_can_ask(ask: Client) -> None:
    assert ask.server.socket.getsockname()[0] == "127.0.0.1"
    assert ask.server.url.startswith("http://127.0.0.1:")


# The command

COMMAND = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[1].split():
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocked())
from anybit.cli import main
main(sys.argv[2:])
"""
HEAVY = "torch onnxscript sklearn safetensors psutil"


@pytest.mark.parametrize("opens", [True, False])
def test_the_command_without_torch_until_ctrl_c(master: Path, folder: Path, tmp_path: Path, opens: bool) -> None:
    browser = tmp_path / "browser"
    browser.write_text(f"#!/bin/sh\necho $1 > {tmp_path}/partial\nmv {tmp_path}/partial {tmp_path}/opened\n")
    browser.chmod(0o755)
    words = ["serve", str(master), "--open" if opens else "--no-open", "--examples", str(folder), "--threads", "1"]
    started = subprocess.Popen(
        [sys.executable, "-c", COMMAND, HEAVY, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "COLUMNS": "20", "BROWSER": f"{browser} %s", "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    try:
        assert started.stdout is not None
        url = started.stdout.readline().strip()
        match = re.fullmatch(r"http://127\.0\.0\.1:(\d+)(/[\w-]{32}/)", url)
        assert match is not None, url + started.communicate()[1]
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", int(match[1]), timeout=30)) as connection:
            connection.request("POST", f"{match[2]}predict?weights=4&activations=4", PNG)
            assert json.loads(connection.getresponse().read())["bits"] == "W4A4"
        until = time.monotonic() + (20 if opens else 0.5)
        while not (tmp_path / "opened").exists() and time.monotonic() < until:
            time.sleep(0.05)
        started.send_signal(signal.SIGINT)
        out, err = started.communicate(timeout=20)
    finally:
        started.kill()
        started.wait()
    assert (started.returncode, err) == (130, "interrupted\n")
    assert "Traceback" not in out
    assert (tmp_path / "opened").exists() == opens
    assert not opens or (tmp_path / "opened").read_text() == f"{url}\n"


def test_the_command_without_pillow(master: Path) -> None:
    words = [sys.executable, "-c", COMMAND, "PIL", "serve", str(master), "--no-open"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr == "error: reading pictures needs pillow, which is not installed; run: pip install 'anybit[data]'\n"
    )
