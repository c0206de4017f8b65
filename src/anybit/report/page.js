"use strict";
// The sliders, the cards beside them, and everything put into place.
(() => {
  const { data, element, state, movers, insights, FLOAT, name, spoken, number, bytes } = anybit;
  const main = document.getElementById("main");
  const choose = anybit.chooser();

  const slider = (id, label, values) => {
    const output = element("output", { for: id });
    const input = element("input", { type: "range", id, min: 0, max: values.length - 1, step: 1 });
    const show = (bits) => {
      input.value = values.indexOf(bits);
      output.textContent = spoken(bits);
      input.setAttribute("aria-valuetext", spoken(bits));
    };
    return {
      input,
      show,
      read: () => values[Number(input.value)],
      field: element("div", {}, element("label", { for: id }, label, " ", output), input),
    };
  };

  const weights = slider("weights", "Weights", anybit.weights);
  const activations = slider("activations", "Activations", anybit.activations);
  const lock = element("input", { type: "checkbox", id: "lock" });
  lock.checked = true;
  const battery = element("input", { type: "range", id: "battery", min: 0, max: 100, step: 1, value: 100 });
  const charge = element("output", { for: "battery" }, "100 %");
  const mains = element("input", { type: "checkbox", id: "mains" });
  const said = element("span", { id: "policy" }, "not asked yet");

  const show = () => {
    weights.show(state.weights);
    activations.show(state.activations);
    document.getElementById("now").textContent = name(state.weights, state.activations);
    movers.forEach((move) => move());
  };
  let waiting = false;
  const move = (w, a) => {
    [state.weights, state.activations] = [w, a];
    show();
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      anybit.redrawMoving();
    });
  };
  anybit.move = move;

  const other = (side, wanted) => (anybit[side].includes(wanted) ? wanted : state[side]);
  weights.input.addEventListener("input", () => {
    const bits = weights.read();
    move(bits, lock.checked ? other("activations", bits) : state.activations);
  });
  activations.input.addEventListener("input", () => {
    const bits = activations.read();
    move(lock.checked ? other("weights", bits) : state.weights, bits);
  });
  const ask = () => {
    const percent = Number(battery.value);
    charge.textContent = `${percent} %`;
    const bits = choose(percent, mains.checked);
    const chosen = name(bits.weights, bits.activations);
    said.textContent = chosen;
    if (!anybit.weights.includes(bits.weights) || !anybit.activations.includes(bits.activations)) {
      said.textContent = `${chosen}, which was not measured here`;
      return;
    }
    lock.checked = bits.weights === bits.activations;
    move(bits.weights, bits.activations);
  };
  battery.addEventListener("input", ask);
  mains.addEventListener("change", ask);

  const rule = () => {
    const { steps, mains: full, margin } = data.policy;
    const words = steps.map((step) => `below ${step.percent} % ${name(step.weights, step.activations)}`);
    return (
      `Policy: ${words.join(", ")}; ${name(full.weights, full.activations)} when full or on mains. ` +
      `It goes back up ${margin} points above a border, so that the width does not flap.`
    );
  };

  const card = (label, index) => {
    const big = element("span", { class: "big", "data-label": label });
    const facts = element("dl");
    const where = element("p", { class: "soft" });
    movers.push(() => {
      const found = anybit.accuracyAt(label, state.weights, state.activations);
      const insight = anybit.insightOf(label);
      big.textContent = found ? `${(100 * found.mean).toFixed(1)} %` : "not measured";
      const pairs = [];
      if (found && found.seeds > 1)
        pairs.push(["lowest to highest seed", `${(100 * found.low).toFixed(1)} to ${(100 * found.high).toFixed(1)} %`]);
      if (found) pairs.push(["loss", number(found.loss)]);
      if (insight) pairs.push(["size", bytes(anybit.sizeAt(insight, state.weights))], ...expected(insight));
      facts.replaceChildren(
        ...pairs.flatMap(([term, value]) => [element("dt", {}, term), element("dd", { "data-fact": term }, value)]),
      );
      const source = { rows: "from the rows", grid: "from the grid of widths" };
      where.textContent = found
        ? `${source[found.source]}, n = ${found.n}${found.seeds > 1 ? `, ${found.seeds} seeds` : ""}`
        : "anybit sweep --widths measures it";
    });
    const swatch = element("span", { class: "swatch", "aria-hidden": "true" }, "● ");
    swatch.dataset.index = index;
    return element("div", { class: "card" }, element("h3", {}, swatch, label), big, facts, where);
  };
  // The gradient's own prediction for rounded weights, and the most that it could be.
  const expected = (insight) => {
    const float = anybit.cellAt(insight, FLOAT, FLOAT);
    const entry = anybit.firstOrderAt(insight, state.weights);
    const bound = anybit.boundAt(insight, state.weights);
    const rounded = state.weights === FLOAT ? 0 : entry ? anybit.mean(entry.predicted) : null;
    const pairs = [];
    if (float && rounded !== null) pairs.push(["loss predicted, weights rounded", number(float.loss + rounded)]);
    if (bound !== null) pairs.push(["first-order bound on its growth", `+${number(bound)}`]);
    return pairs;
  };

  const paint = () =>
    document.querySelectorAll(".swatch").forEach((dot) => {
      dot.style.color = anybit.look(Number(dot.dataset.index)).colour;
    });
  const theme = document.getElementById("theme");
  const themed = () => {
    theme.setAttribute("aria-pressed", String(anybit.isDark()));
    theme.textContent = anybit.isDark() ? "Light colours" : "Dark colours";
    paint();
    anybit.redrawAll();
  };
  theme.addEventListener("click", () => {
    document.documentElement.dataset.theme = anybit.isDark() ? "light" : "dark";
    themed();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", themed);

  const brief = element("span", { id: "brief" });
  movers.push(() => {
    const found = anybit.labels.map((label) => [label, anybit.accuracyAt(label, state.weights, state.activations)]);
    brief.textContent = found
      .map(([label, entry]) => `${label} ${entry ? `${(100 * entry.mean).toFixed(1)} %` : "not measured"}`)
      .join(" · ");
  });
  const controls = element(
    "div",
    { id: "controls", role: "group", "aria-label": "Widths and battery" },
    weights.field,
    activations.field,
    element("div", {}, element("label", { for: "battery" }, "Battery ", charge, " → ", said), battery),
    element("div", {}, element("label", {}, lock, " same width for both"), element("label", {}, mains, " on mains")),
    element("p", { class: "wide", "aria-live": "polite" }, "Now at ", element("strong", { id: "now" }), ": ", brief),
  );
  const missing = data.missing.map((text) => element("p", { class: "missing" }, text));
  main.append(
    anybit.section(
      "one-width",
      "At one width",
      "The sliders move everything below; the battery asks the policy for a width.",
      missing,
    ),
    controls,
    element("div", { class: "cards" }, anybit.labels.map(card)),
    element("p", { class: "soft" }, rule()),
    ...anybit.sections.map((make) => make()).filter((made) => made !== null),
  );

  const first = data.accuracy.find((entry) => entry.weights === 4 && entry.activations === 4) ?? data.accuracy[0];
  [state.weights, state.activations] = insights.length
    ? [4, 4].map((w) => (anybit.weights.includes(w) ? w : FLOAT))
    : [first.weights, first.activations];
  lock.checked = state.weights === state.activations;
  show();
  themed();
  document.documentElement.dataset.ready = "yes";
})();
