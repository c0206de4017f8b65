"""Sound in: spoken words from a Debian package, music that is made here."""

from __future__ import annotations

import functools
import wave
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from drawn import Rng
from fetch import fetched
from measures import cosine, overlap, same_side, share_equal, within_tenth
from scipy.signal import get_window, resample_poly
from task import CALIBRATION_SEED, MOST_INPUTS, TEST_SEED, Array, Feed, Run, Task, seeded, simple

CALIBRATION = ("Front_Left", "Rear_Right", "Side_Left")
TEST = ("Front_Center", "Front_Right", "Rear_Center", "Rear_Left", "Side_Right")


@functools.cache
def spoken(name: str, rate: int = 16000) -> Array:
    """Return two spoken words at this many samples a second, as numbers from -1 to 1."""
    path = fetched("alsa-utils") / "usr" / "share" / "sounds" / "alsa" / f"{name}.wav"
    with wave.open(str(path)) as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2").reshape(-1, file.getnchannels())
        from_rate = file.getframerate()
    common = np.gcd(rate, from_rate)
    return resample_poly(samples.mean(1) / 32768, rate // common, from_rate // common).astype(np.float32)


def scene(rng: Rng, names: Sequence[str]) -> Array:
    """Return about five seconds: two calls, as loud and as fast as it happens, in a noisy room."""
    parts = []
    for name in rng.choice(names, 2):
        up = int(rng.integers(85, 116))  # another speed is another voice
        voice = resample_poly(spoken(str(name)), 100, up) * rng.uniform(0.3, 1.2)
        parts += [np.zeros(int(rng.integers(3000, 9000))), voice]
    whole = np.concatenate([*parts, np.zeros(4000)])
    room = rng.normal(0, 10 ** rng.uniform(-4, -2), len(whole))
    return np.clip(whole + room, -1, 1).astype(np.float32)


def scenes() -> tuple[list[Array], list[Array]]:
    return (
        seeded(lambda rng: scene(rng, CALIBRATION), CALIBRATION_SEED, MOST_INPUTS),
        seeded(lambda rng: scene(rng, TEST), TEST_SEED, 8),
    )


# Speech or not


def windows(sound: Array) -> Array:
    """Return windows of 512 samples, each behind the last 64 of the one before."""
    count = len(sound) // 512
    padded = np.concatenate([np.zeros(64, np.float32), sound[: count * 512]])
    return np.stack([padded[i * 512 : i * 512 + 576] for i in range(count)])


def speech_sequence(path: Path) -> Task:
    """All windows of a sound at once."""
    zero = np.zeros((1, 1, 128), np.float32)
    calibration, test = ([{"input": windows(s), "h": zero, "c": zero} for s in side] for side in scenes())
    return simple(calibration, test, lambda out: out["speech_probs"], within_tenth, same_side=same_side)


def speech_steps(path: Path, *, rate: bool) -> Task:
    """One window at a time, the state of one run an input of the next."""
    calibration, test = scenes()
    extra = {"sr": np.array(16000, np.int64)} if rate else {}

    def feeds_and_answers(run: Run, sound: Array) -> tuple[list[Feed], Array]:
        state, feeds, answers = np.zeros((2, 1, 128), np.float32), [], []
        for window in windows(sound):
            feeds.append({"input": window[None], "state": state, **extra})
            out = run(feeds[-1])
            state = out["stateN"]
            answers.append(float(out["output"][0, 0]))
        return feeds, np.array(answers)

    def calibrate(run: Run) -> list[Feed]:
        """One window out of every calibration sound, each further on than the last."""
        chosen = []
        for index, sound in enumerate(calibration):
            feeds, _ = feeds_and_answers(run, sound)
            chosen.append(feeds[(index * len(feeds)) // len(calibration)])
        return chosen

    return Task(calibrate, test, lambda run, s: feeds_and_answers(run, s)[1], within_tenth, {"same_side": same_side})


# Speakers


def mel_filters(rate: int, size: int, count: int) -> Array:
    """Return triangles on the mel scale of Slaney, each with the same area."""

    def hertz(mel: Array) -> Array:
        return np.where(mel < 15, mel * 200 / 3, 1000 * np.exp((mel - 15) * np.log(6.4) / 27))

    top = 15 + 27 * np.log(rate / 2 / 1000) / np.log(6.4)
    edges = hertz(np.linspace(0, top, count + 2))
    bins = np.linspace(0, rate / 2, size // 2 + 1)
    up = (bins - edges[:-2, None]) / np.diff(edges)[:-1, None]
    down = (edges[2:, None] - bins) / np.diff(edges)[1:, None]
    return np.maximum(0, np.minimum(up, down)) * (2 / (edges[2:] - edges[:-2]))[:, None]


def mel_frames(sound: Array) -> Array:
    """Return the power of 40 bands every 10 ms, for a sound at 16 kHz that was made as loud as the encoder wants."""
    loudness = 20 * np.log10(np.sqrt(np.mean(sound**2)))
    sound = sound * 10 ** (max(0.0, -30 - loudness) / 20)
    padded = np.pad(sound, 200)
    frames = np.lib.stride_tricks.sliding_window_view(padded, 400)[::160]
    power = np.abs(np.fft.rfft(frames * get_window("hann", 400))) ** 2
    return (power @ mel_filters(16000, 400, 40).T).astype(np.float32)


def speakers(path: Path) -> Task:
    """160 frames of a voice in, a place among speakers out."""
    calibration, test = ([{"mels": mel_frames(s)[40:200][None]} for s in side] for side in scenes())
    return simple(calibration, test, lambda out: next(iter(out.values()))[0], cosine)


# Music and pitch


def melody(rng: Rng, rate: int = 22050, samples: int = 43844) -> Array:
    """Return two seconds of notes and chords, each a sum of harmonics that dies away."""
    sound = np.zeros(samples)
    start = 0
    while start < samples - 4000:
        length = int(rng.integers(5000, 14000))
        time = np.arange(min(length * 2, samples - start)) / rate
        for key in rng.integers(45, 80, rng.integers(1, 4)):
            pitch = 440 * 2 ** ((key - 69) / 12)
            note = sum(np.sin(2 * np.pi * pitch * k * time) / k**1.3 for k in range(1, 9))
            sound[start : start + len(time)] += note * np.exp(-time * rng.uniform(2, 5)) * np.minimum(1, time * 100)
        start += length
    return (sound / np.abs(sound).max() * rng.uniform(0.3, 0.9)).astype(np.float32)


def notes(path: Path) -> Task:
    def make(rng: Rng) -> Feed:
        return {"serving_default_input_2:0": melody(rng)[None, :, None]}

    def decide(out: dict[str, Array]) -> Array:
        note, onset, _ = out.values()
        return np.concatenate([note > 0.3, onset > 0.5])

    calibration, test = seeded(make, CALIBRATION_SEED, MOST_INPUTS), seeded(make, TEST_SEED, 8)
    return simple(calibration, test, decide, overlap)


def pitch(path: Path) -> Task:
    """Pitch of a voice, frame by frame; equal if both call it silent or both are within half a semitone."""
    low, high = np.array(46.875, np.float32), np.array(2093.75, np.float32)
    calibration, test = ([{"audio": s[None], "fmin": low, "fmax": high} for s in side] for side in scenes())

    def decide(out: dict[str, Array]) -> Array:
        hertz, sure = (v[0].astype(np.float64) for v in out.values())
        return np.where(sure >= 0.5, 12 * np.log2(np.maximum(hertz, 1)), -1000.0)

    def agree(a: Array, b: Array) -> float:
        return share_equal(np.abs(a - b) < 0.5, np.ones(a.shape, bool)) if a.shape == b.shape else 0.0

    return simple(calibration, test, decide, agree)
