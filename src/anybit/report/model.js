"use strict";
// What the page knows: measured numbers by width, and the battery policy. Nothing in this file touches the document.
const anybit = { data: JSON.parse(document.getElementById("data").textContent) };

(() => {
  const FLOAT = 32;
  const { data } = anybit;

  anybit.FLOAT = FLOAT;
  anybit.name = (w, a) => (w === FLOAT && a === FLOAT ? "FP" : `W${w}A${a}`);
  anybit.spoken = (bits) => (bits === FLOAT ? "floating point" : `${bits} bits`);
  anybit.mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

  const key = (w, a) => `${w},${a}`;
  const insights = data.runs.filter((run) => run.insight).map((run) => ({ ...run.insight, name: run.name }));
  for (const insight of insights) {
    insight.cells = new Map(
      insight.grid.map((cell, index) => [key(cell.weights, cell.activations), { ...cell, index }]),
    );
  }
  anybit.insights = insights;
  anybit.curves = data.runs.filter((run) => run.curves);
  anybit.labels = [...new Set(data.accuracy.map((entry) => entry.label))];
  const measured = new Map(
    data.accuracy.map((entry) => [`${entry.label}\n${key(entry.weights, entry.activations)}`, entry]),
  );

  // Every width that something was measured at, narrowest first.
  const union = (side) => {
    const all = [...data.accuracy.map((entry) => entry[side]), ...insights.flatMap((insight) => insight.widths)];
    return [...new Set(all)].sort((one, other) => one - other);
  };
  anybit.weights = union("weights");
  anybit.activations = union("activations");

  // The rows of a label at a pair of widths, else a cell of the grid of its run, else nothing.
  anybit.accuracyAt = (label, w, a) => {
    const entry = measured.get(`${label}\n${key(w, a)}`);
    if (entry) return { ...entry, source: "rows" };
    const insight = anybit.insightOf(label);
    const cell = insight && insight.cells.get(key(w, a));
    if (!cell) return null;
    return {
      mean: cell.accuracy,
      low: cell.accuracy,
      high: cell.accuracy,
      loss: cell.loss,
      kl: cell.kl,
      seeds: 1,
      n: insight.n,
      source: "grid",
    };
  };
  anybit.insightOf = (label) => insights.find((insight) => (data.groups[insight.name] ?? insight.name) === label);
  // Everything of one label has one colour.
  anybit.placeOf = (run) => Math.max(0, anybit.labels.indexOf(data.groups[run.name] ?? run.name));
  anybit.cellAt = (insight, w, a) => insight.cells.get(key(w, a)) ?? null;

  anybit.sizeAt = (insight, w) => insight.sizes[insight.widths.indexOf(w)] ?? null;
  anybit.firstOrderAt = (insight, w) => insight.first_order.find((entry) => entry.bits === w) ?? null;
  anybit.boundAt = (insight, w) => {
    const index = insight.narrow.indexOf(w);
    if (index < 0) return w === FLOAT ? 0 : null;
    return insight.layers.reduce((sum, layer) => sum + (layer.bounds[index] ?? 0), 0);
  };

  // The points that no other one beats in size and accuracy, smallest first.
  anybit.front = (points) => {
    const sorted = [...points].sort((one, other) => one.size - other.size || other.accuracy - one.accuracy);
    const kept = [];
    for (const point of sorted) {
      if (!kept.length || point.accuracy > kept[kept.length - 1].accuracy) kept.push(point);
    }
    return kept;
  };

  // The same rule as anybit.policy: the lowest step that the charge is below, and back up only well above a border.
  anybit.policy = (percent, mains) => {
    const { steps, mains: full } = data.policy;
    if (mains || percent === null) return full;
    return steps.find((step) => percent < step.percent) ?? full;
  };
  const same = (one, other) => one.weights === other.weights && one.activations === other.activations;
  anybit.chooser = () => {
    let now = null;
    return (percent, mains) => {
      let wanted = anybit.policy(percent, mains);
      if (now && !same(wanted, now)) {
        const lower = percent === null ? null : percent - data.policy.margin;
        if (same(anybit.policy(lower, mains), now)) wanted = now;
      }
      now = wanted;
      return now;
    };
  };
})();
