"""Small graphs of what stands in front of networks for sound: spectra, their logarithms, filters that are computed."""

from __future__ import annotations

import numpy as np
from stranger_builder import Cases, Net

SOUND = Cases()
BANDS, WINDOW, STEP = 33, 64, 32


def samples(net: Net) -> str:
    """Noise that swells and falls nearly silent."""
    loud = 10.0 ** (-4 * np.sin(np.linspace(0, 9, 4096)) ** 2)
    wave = loud * net.rng.normal(0, 0.2, 4096)
    return net.input("x", wave.astype(np.float32)[None], ["batch", "samples"])


def parts(net: Net, x: str) -> tuple[str, str]:
    """The real and the imaginary part of a spectrum over time, by convolution."""
    time, band = np.arange(WINDOW), np.arange(BANDS)[:, None]
    waves = np.exp(-2j * np.pi * band * time / WINDOW) * np.hanning(WINDOW)
    x = net.node("Unsqueeze", x, net.hold(np.array([1])))
    real, imaginary = (
        net.node("Conv", x, net.hold(part.astype(np.float32)[:, None]), strides=[STEP])
        for part in (waves.real, waves.imag)
    )
    return real, imaginary


def logarithm(net: Net, power: str) -> str:
    return str(net.node("Log", net.node("Clip", power, net.hold(np.float32(1e-12)))))


@SOUND.add("a spectrum by convolution, its power by bands, the logarithm of that")
def log_mel(net: Net) -> None:
    two = net.hold(np.float32(2))
    real, imaginary = (net.node("Pow", part, two) for part in parts(net, samples(net)))
    power = net.node("Transpose", net.node("Add", real, imaginary), perm=[0, 2, 1])
    centres, bands = np.linspace(2, BANDS - 2, 12), np.arange(BANDS)[:, None]
    mel = net.hold(np.maximum(1 - np.abs(bands - centres) / 3, 0).astype(np.float32))
    net.output(logarithm(net, net.node("MatMul", power, mel)))


@SOUND.add("the logarithm of a spectrum, and a network behind it")
def log_spectrum(net: Net) -> None:
    real, imaginary = (net.node("Mul", part, part) for part in parts(net, samples(net)))
    y = logarithm(net, net.node("Sqrt", net.node("Add", real, imaginary)))
    y = net.node("Conv", y, net.weight(8, BANDS, 3), net.weight(8), pads=[1, 1])
    net.output(net.node("Conv", net.node("Relu", y), net.weight(4, 8, 1)))


@SOUND.add("a filter that is computed from a few numbers")
def computed_filter(net: Net) -> None:
    time = net.hold(np.arange(-16, 17, dtype=np.float32) / 4)
    angle = net.node("Mul", time, net.hold(np.float32(np.pi)))
    zero = net.node("Equal", angle, net.hold(np.float32(0)))
    wave = net.node("Where", zero, net.hold(np.float32(1)), net.node("Div", net.node("Sin", angle), angle))
    window = net.node("Pow", net.node("Cos", net.node("Div", angle, net.hold(np.float32(8)))), net.hold(np.float32(2)))
    taps = net.node("Reshape", net.node("Mul", wave, window), net.hold(np.array([1, 1, -1])))
    x = net.node("Unsqueeze", samples(net), net.hold(np.array([1])))
    net.output(net.node("Conv", x, taps, pads=[16, 16]))
