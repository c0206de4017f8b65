"use strict";
// Sections about the network: its layers, how it was trained, and what its gradients predict.
(() => {
  const { insights, element, plain, number, bytes, axis, here, style, chart, FLOAT } = anybit;
  const { state, movers, nameOf, section, panels, slug, strokeOf, labelled } = anybit;

  const layers = () => {
    if (!insights.length) return null;
    const tableFor = (insight) => {
      const index = insight.narrow.indexOf(state.weights);
      const boundOf = (layer) => (state.weights === FLOAT ? 0 : (layer.bounds[index] ?? null));
      const widthOf = (budget, layer) => budget.layers.find((entry) => entry.name === layer.name)?.bits ?? null;
      return {
        head: [
          "point",
          "kind",
          "shape",
          "low",
          "high",
          "range from",
          `sensitivity at ${anybit.spoken(state.weights)}`,
          ...insight.budgets.map((b) => `bits, ${b.budget} on average`),
        ],
        rows: insight.layers.map((layer) => [
          layer.name,
          layer.kind,
          layer.shape,
          layer.low ?? "unknown",
          layer.high ?? "unknown",
          layer.source,
          layer.bounds.length ? boundOf(layer) : null,
          ...insight.budgets.map((budget) => widthOf(budget, layer)),
        ]),
      };
    };
    const made = (insight, number_) => {
      const title = `Quantization points${nameOf(insight)}`;
      const place = anybit.scroll(title);
      const fill = () => {
        const content = tableFor(insight);
        const table = anybit.tableOf(content);
        const most = Math.max(...content.rows.map((row) => row[6] ?? 0));
        content.rows.forEach((row, at) => {
          const cell = table.tBodies[0].rows[at].cells[6];
          cell.className = "bar";
          if (row[6] !== null && most > 0) cell.style.setProperty("--share", `${(100 * row[6]) / most}%`);
        });
        place.replaceChildren(table);
      };
      movers.push(fill);
      return element(
        "div",
        {},
        element("h3", {}, title),
        place,
        element(
          "button",
          { type: "button", class: "download", onclick: () => anybit.download(`layers-${number_}`, tableFor(insight)) },
          "Download CSV",
        ),
        insight.budgets.map((b) =>
          element(
            "p",
            { class: "soft" },
            `${b.budget} bits on average: ${number(100 * b.accuracy, 3)} % test accuracy at A${b.activations}, ` +
              `${bytes(b.size)}; validation loss ${number(b.loss)} to ${number(b.measured)}, ` +
              `first-order bound +${number(b.predicted)}.`,
          ),
        ),
      );
    };
    return section(
      "layers",
      "Layers",
      "Sensitivity is half a bin times the l1 norm of the gradient: to first order the most that rounding this " +
        "weight adds to the loss. Widths per layer make the sum of it smallest under a budget; both are from the " +
        "validation split.",
      insights.map(made),
    );
  };

  const TITLES = {
    loss: "Loss",
    penalty: "Penalty, λ times the norms",
    weight_norm: "Norm of the gradient over weights",
    activation_norm: "Norm of the gradient over activations",
  };
  const training = () => {
    const runs = anybit.curves;
    if (!runs.length) return null;
    const found = [...new Set(runs.flatMap((run) => Object.keys(run.curves.values)))];
    const kinds = [
      ...Object.keys(TITLES).filter((kind) => found.includes(kind)),
      ...found.filter((kind) => !(kind in TITLES)),
    ];
    const having = (kind) => runs.filter((run) => run.curves.values[kind]);
    const draw = (kind) => () => ({
      traces: having(kind).map((run) => ({
        type: "scatter",
        mode: "lines",
        name: plain(run.name),
        x: run.curves.epochs,
        y: run.curves.values[kind],
        line: { ...strokeOf(run), width: 1.5 },
        hovertemplate: `epoch %{x:.1f}: %{y:.4g}<extra>${plain(run.name)}</extra>`,
      })),
      layout: { xaxis: axis("epoch"), yaxis: axis("", { type: "log", exponentformat: "power" }), showlegend: true },
    });
    const table = (kind) => () => ({
      head: ["run", "epoch", kind],
      rows: having(kind).flatMap((run) =>
        run.curves.epochs.map((epoch, at) => [run.name, epoch, run.curves.values[kind][at]]),
      ),
    });
    return section(
      "training",
      "Training",
      "Each point is the mean over the steps in between; the scale is logarithmic.",
      panels(
        kinds.map((kind) =>
          chart({ id: `training-${slug(kind)}`, title: TITLES[kind] ?? kind, draw: draw(kind), table: table(kind) }),
        ),
      ),
    );
  };

  const gradients = () => {
    if (!insights.length) return null;
    const norms = chart({
      id: "gradient-norms",
      title: "Norms of the gradient over all weights, one point per test batch",
      draw: () => ({
        traces: insights.map((insight) => ({
          type: "scatter",
          mode: "markers",
          name: plain(insight.name),
          x: insight.l2,
          y: insight.l1,
          marker: { ...labelled(anybit.placeOf(insight)), opacity: 0.75 },
          hovertemplate: `l2 %{x:.3g}, l1 %{y:.3g}<extra>${plain(insight.name)}</extra>`,
        })),
        layout: {
          xaxis: axis("l2 norm", { type: "log", exponentformat: "power" }),
          yaxis: axis("l1 norm", { type: "log", exponentformat: "power" }),
          hovermode: "closest",
          showlegend: true,
        },
      }),
      table: () => ({
        head: ["run", "batch", "l1", "l2"],
        rows: insights.flatMap((insight) => insight.l1.map((l1, at) => [insight.name, at, l1, insight.l2[at]])),
      }),
    });
    const equal = (insight) =>
      insight.grid.filter((cell) => cell.weights === cell.activations && cell.weights !== FLOAT);
    const kl = chart({
      id: "divergence",
      title: "D(float‖quantized), in nats, at equal widths",
      moves: true,
      draw: () => ({
        traces: insights.map((insight) => ({
          type: "scatter",
          mode: "lines+markers",
          name: plain(insight.name),
          x: equal(insight).map((c) => c.weights),
          y: equal(insight).map((c) => (c.kl > 0 ? c.kl : null)),
          line: { ...strokeOf(insight), width: 2 },
          marker: labelled(anybit.placeOf(insight)),
          hovertemplate: `%{x} bits: %{y:.3g}<extra>${plain(insight.name)}</extra>`,
        })),
        layout: {
          xaxis: axis("bits", { dtick: 1 }),
          yaxis: axis("", { type: "log", exponentformat: "power" }),
          showlegend: true,
          shapes: state.weights === state.activations && state.weights !== FLOAT ? [here(state.weights)] : [],
        },
      }),
      table: () => ({
        head: ["run", "weights", "activations", "D(float‖quantized), nats"],
        rows: insights.flatMap((insight) => insight.grid.map((c) => [insight.name, c.weights, c.activations, c.kl])),
      }),
    });
    const { batch } = insights[0];
    return section(
      "gradients",
      "Gradients and what they predict",
      `Batches of ${batch} test examples. A first-order prediction is the gradient times the rounding error of every ` +
        "weight; it is exact where the points are on the line. With the weights in floating point nothing is rounded.",
      panels([norms, kl, ...insights.map(predicted)]),
    );
  };

  const predicted = (insight, index) =>
    chart({
      id: `first-order-${index}`,
      title: `Change of the loss by rounding the weights, in nats${nameOf(insight)}`,
      moves: true,
      draw: () => {
        const entry = anybit.firstOrderAt(insight, state.weights) ?? { predicted: [], measured: [], correlation: 0 };
        const all = [...entry.predicted, ...entry.measured, 0];
        const ends = [Math.min(...all), Math.max(...all)];
        const text = entry.measured.length
          ? `${anybit.spoken(state.weights)}, correlation ${entry.correlation.toFixed(2)}`
          : `${anybit.spoken(state.weights)}: nothing to show`;
        return {
          traces: [
            {
              type: "scatter",
              mode: "lines",
              name: "prediction = measurement",
              x: ends,
              y: ends,
              line: { color: style("--soft"), dash: "dash", width: 1 },
              hoverinfo: "skip",
            },
            {
              type: "scatter",
              mode: "markers",
              name: text,
              x: entry.predicted,
              y: entry.measured,
              marker: { ...labelled(anybit.placeOf(insight)), opacity: 0.8 },
              hovertemplate: "predicted %{x:.3g}, measured %{y:.3g}<extra></extra>",
            },
          ],
          layout: {
            xaxis: axis("first-order prediction"),
            yaxis: axis("measured"),
            hovermode: "closest",
            showlegend: true,
          },
        };
      },
      table: () => ({
        head: ["bits of weights", "batch", "predicted", "measured", "correlation"],
        rows: insight.first_order.flatMap((entry) =>
          entry.predicted.map((value, at) => [entry.bits, at, value, entry.measured[at], entry.correlation]),
        ),
      }),
    });

  anybit.sections.push(layers, training, gradients);
})();
