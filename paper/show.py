"""A measured table as text: mean and spread over seeds, beside the paper's numbers."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anybit.common.files import write_text
from anybit.errors import FileError
from anybit.spec import FLOAT, Bits
from anybit.train.search import TOLERANCE
from paper.rows import PAPER_COST, TableRow, paper_numbers
from paper.tables import Table, read_entries

Entry = Mapping[str, Any]

TITLES = {"table1": "Table 1, CIFAR-10", "table2": "Table 2, ImageNet"}
CAPTION = """Test accuracy in %: the mean over seeds and, of several, (lowest-highest). Quantized as in the paper:
symmetric, nearest rounding, every layer, activation ranges from batch norm; then the same with all data-free helpers
(equalization, bias correction, sum-preserving rounding, clipping). All rows of a network and seed start from
the same checkpoint and are fine-tuned for the same number of epochs. A straight-through row (STE) at widths above its
own keeps its own grid or is quantized again, whichever is better on the validation split. Cost is
the time of an epoch over that of the row without any penalty (which also measures the norms of the gradients).
Processor time does not depend on what else the machine did; wall time does, and machines were shared."""


@dataclass(frozen=True)
class Cell:
    """Accuracy over seeds, 0 to 1."""

    values: tuple[float, ...]

    def __str__(self) -> str:
        if not self.values:
            return ""
        mean = f"{100 * statistics.fmean(self.values):.2f}"
        if len(self.values) == 1:
            return mean
        return f"{mean} ({100 * min(self.values):.1f}-{100 * max(self.values):.1f})"


def spoken(bits: Bits) -> str:
    """Return a pair of widths as the paper writes it.

    >>> spoken(Bits(8, 4)), spoken(Bits(3, 32)), spoken(Bits())
    ('(8,4)', '(3,32)', 'FP')
    """
    return "FP" if bits == Bits(FLOAT, FLOAT) else f"({bits.weights},{bits.activations})"


def accuracy_at(entry: Entry, setting: str, bits: Bits, trained_at: Bits | None = None) -> float | None:
    """Return the test accuracy of one entry at these widths, or `None` if it was not measured.

    A straight-through network at widths above its own can keep its own grid, or be quantized again; the better one of
    the two by validation accuracy is reported. With helpers nothing is measured on the validation split: there the way
    is the one that is better without them.
    """
    measured, without = (entry["settings"].get(name, {}) for name in (setting, setting.removesuffix(", helpers")))
    test = _by_bits(measured.get("test", ()))
    validation = _by_bits(measured.get("validation", without.get("validation", ())))
    if bits not in test:
        return None
    ways = [bits]
    if trained_at in test and bits.weights >= trained_at.weights and bits.activations >= trained_at.activations:
        ways.append(trained_at)
    return test[max(ways, key=lambda way: validation.get(way, 0.0))]


def _by_bits(rows: Iterable[Mapping[str, Any]]) -> dict[Bits, float]:
    return {Bits(row["weights"], row["activations"]): row["accuracy"] for row in rows}


def cell(entries: Iterable[Entry], setting: str, bits: Bits, row: TableRow) -> Cell:
    """Return the accuracies of one row at these widths, over the seeds that were measured."""
    own = sorted((e for e in entries if e["row"] == row.name), key=lambda e: int(e["seed"]))
    found = [accuracy_at(entry, setting, bits, row.trained_at) for entry in own]
    return Cell(tuple(value for value in found if value is not None))


@dataclass(frozen=True)
class Order:
    """The rows that the paper and we have at one pair of widths, best first, and how many pairs stand the same way."""

    bits: Bits
    paper: tuple[str, ...]
    ours: tuple[str, ...]

    @property
    def agreeing(self) -> tuple[int, int]:
        """How many pairs of rows are in the same order in both, and how many pairs there are.

        >>> Order(Bits(4, 4), ("l1", "l2", "none"), ("l2", "l1", "none")).agreeing
        (2, 3)
        """
        pairs = list(itertools.combinations(self.paper, 2))
        return sum(self.ours.index(a) < self.ours.index(b) for a, b in pairs), len(pairs)


def order_at(entries: Sequence[Entry], network: str, bits: Bits, rows: Sequence[TableRow]) -> Order:
    """Return the order of rows at a pair of widths, per tensor, in the paper and here (the mean over seeds)."""
    numbers = paper_numbers(network)
    cells = {row.name: cell(entries, "per-tensor", bits, row).values for row in rows}
    both = {n: (numbers[n][bits], statistics.fmean(v)) for n, v in cells.items() if v and bits in numbers.get(n, {})}
    paper, ours = (tuple(sorted(both, key=lambda name: -both[name][side])) for side in (0, 1))
    return Order(bits, paper, ours)


def cost(entries: Iterable[Entry], row: TableRow, kind: str) -> float | None:
    """Return the time of an epoch over that without any penalty, the mean over seeds that have both.

    `kind` is "wall" or "processor".
    """
    seconds = {(e["row"], e["seed"]): statistics.fmean(e["epoch_seconds"][kind]) for e in entries}
    seeds = [seed for name, seed in seconds if name == row.name and ("none", seed) in seconds]
    return statistics.fmean(seconds[row.name, s] / seconds["none", s] for s in seeds) if seeds else None


def favoured(entries: Sequence[Entry], rows: Sequence[TableRow], *, tolerance: float = TOLERANCE) -> str | None:
    """Return the name of the row that gains most over all widths on the validation split, the mean over runs.

    A gain is over the row without any penalty of the same network and seed. Only rows with one set of weights for every
    width count (no straight-through training for one pair), and only those that lose no more than `tolerance` in
    floating point. The helpers stay out of it: they come after training. With no row beside that without a penalty
    there is no answer.
    """
    scores = {(e["row"], e["network"], e["seed"]): score for e in entries if (score := validated(e)) is not None}
    gains: dict[str, list[tuple[float, float]]] = {}
    for (name, *run), (full, quantized) in scores.items():
        if (start := scores.get(("none", *run))) is not None:
            gains.setdefault(name, []).append((full - start[0], quantized - start[1]))
    means = {name: [statistics.fmean(column) for column in zip(*pairs, strict=True)] for name, pairs in gains.items()}
    if len(means) < 2:
        return None
    allowed = [row.name for row in rows if row.trained_at is None and row.name in means]
    harmless = [name for name in allowed if means[name][0] >= -tolerance]
    return max(harmless, key=lambda name: means[name][1], default=None)


def validated(entry: Entry) -> tuple[float, float] | None:
    """Return validation accuracy in floating point, and the mean over all widths and scales without helpers."""
    plain = [parts for name, parts in entry["settings"].items() if not name.endswith("helpers")]
    measured = [_by_bits(parts.get("validation", ())) for parts in plain]
    quantized = [accuracy for part in measured for bits, accuracy in part.items() if bits != Bits()]
    full = [part[Bits()] for part in measured if Bits() in part]
    return (full[0], statistics.fmean(quantized)) if quantized and full else None


def markdown_table(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown, the first column to the left and the others to the right.

    >>> print(markdown_table(["row", "FP"], [["none", "90"]]))
    | row | FP |
    |:--|--:|
    | none | 90 |
    """
    lines = [head, *body]
    text = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([text[0], "|:--" + "|--:" * (len(head) - 1) + "|", *text[1:]])


def accuracy_rows(
    entries: Sequence[Entry],
    setting: str,
    widths: Sequence[Bits],
    rows: Sequence[TableRow],
    paper: Mapping[str, Mapping[Bits, float]],
) -> tuple[list[str], list[list[str]]]:
    """Return head and body: a column per width, each with the paper's beside it where the paper has any."""
    shown = {bits: any(bits in numbers for numbers in paper.values()) for bits in widths}
    head = ["row"] + [name for bits in widths for name in ([spoken(bits), "paper"] if shown[bits] else [spoken(bits)])]
    body = []
    for row in rows:
        cells = [cell(entries, setting, bits, row) for bits in widths]
        if not any(c.values for c in cells):
            continue
        line = [row.label + _lacking(entries, row)]
        for bits, c in zip(widths, cells, strict=True):
            number = paper.get(row.name, {}).get(bits)
            line += [str(c), "" if number is None else f"{number:.2f}"] if shown[bits] else [str(c)]
        body.append(line)
    return head, body


def _lacking(entries: Sequence[Entry], row: TableRow) -> str:
    """Say which seeds a row has, where others have more: its mean cannot be compared with theirs."""
    seeds = {int(entry["seed"]) for entry in entries}
    own = sorted(int(entry["seed"]) for entry in entries if entry["row"] == row.name)
    return "" if seeds == set(own) else f", seed {', '.join(map(str, own))} only"


def table_text(table: Table) -> str:
    """Return what was measured so far as Markdown."""
    entries = read_entries(table.file)
    if not entries:
        raise FileError(f"{table.file}: nothing measured yet; run this without --show first, or with --results results")
    parts = [f"# {TITLES[table.name]}, {table.scale} size", CAPTION]
    for network in dict.fromkeys(entry["network"] for entry in entries):
        parts += _network_part(table, network, [e for e in entries if e["network"] == network])
    return "\n\n".join(parts) + "\n"


def write_table(table: Table) -> Path:
    """Write the text beside the numbers; return where."""
    path = table.file.with_suffix(".md")
    write_text(path, table_text(table))
    return path


def _network_part(table: Table, network: str, entries: Sequence[Entry]) -> list[str]:
    seeds = sorted({int(entry["seed"]) for entry in entries})
    parts = [f"## {network}, {'seeds' if len(seeds) > 1 else 'seed'} {', '.join(map(str, seeds))}"]
    if (best := favoured(entries, table.rows)) is not None:
        parts.append(
            f"Favoured on the validation split, over all widths measured and without harm in floating point: "
            f"**{table.row(best).label}**."
        )
    paper = paper_numbers(network)
    for name, setting in table.settings.items():
        beside = paper if name == "per-tensor" else {}
        parts += [f"### {name}", markdown_table(*accuracy_rows(entries, name, setting.widths, table.rows, beside))]
    costs = [line for row in table.rows if (line := _cost_line(entries, row, PAPER_COST.get(network)))]
    return [*parts, "### cost", markdown_table(["row", "processor time", "wall time", "paper"], costs)]


def _cost_line(entries: Sequence[Entry], row: TableRow, paper: float | None) -> list[str]:
    values = [cost(entries, row, kind) for kind in ("processor", "wall")]
    cells = [f"{value:.2f}" for value in values if value is not None]
    return [row.label, *cells, f"{paper:.1f}" if paper and row.name == "l1" else ""] if cells else []
