"use strict";
// Sections about widths: accuracy against each, every pair of them, and size against accuracy.
// Each returns its elements, or nothing where its numbers are missing.
(() => {
  const { data, insights, plain, number, look, axis, here, style, chart, FLOAT, name } = anybit;
  const { state, nameOf, section, panels, slug, percent, labelled } = anybit;

  const accuracy = () => {
    const families = [...new Set(data.accuracy.map((entry) => entry.family))];
    const drawable = families.filter((family) => new Set(curve(family).map((entry) => entry.width)).size > 1);
    if (!drawable.length) return null;
    const draw = (family) => () => ({
      traces: anybit.labels.map((label, index) => {
        const own = curve(family)
          .filter((entry) => entry.label === label)
          .sort((one, other) => one.width - other.width);
        const { colour, dash } = look(index);
        return {
          type: "scatter",
          mode: "lines+markers",
          name: plain(label),
          x: own.map((entry) => entry.width),
          y: own.map((entry) => percent(entry.mean)),
          error_y: {
            type: "data",
            symmetric: false,
            visible: own.some((entry) => entry.seeds > 1),
            array: own.map((entry) => percent(entry.high - entry.mean)),
            arrayminus: own.map((entry) => percent(entry.mean - entry.low)),
          },
          line: { color: colour, dash, width: 2 },
          marker: labelled(index),
          hovertemplate: `%{x} bits: %{y:.1f} %<extra>${plain(label)}</extra>`,
        };
      }),
      layout: {
        xaxis: axis("bits", { dtick: 1 }),
        yaxis: axis("test accuracy, %", { range: [0, 104] }),
        shapes: shapeAt(family),
        showlegend: true,
      },
    });
    const table = (family) => () => ({
      head: ["label", "widths", "accuracy, %", "lowest seed, %", "highest seed, %", "seeds", "loss", "test examples"],
      rows: curve(family).map((e) => [
        e.label,
        name(e.weights, e.activations),
        percent(e.mean),
        percent(e.low),
        percent(e.high),
        e.seeds,
        e.loss,
        e.n,
      ]),
    });
    return section(
      "accuracy",
      "Accuracy against width",
      "Mean over seeds; bars go from the lowest to the highest seed. The dotted line is where the sliders are.",
      panels(
        drawable.map((family) =>
          chart({
            id: `accuracy-${slug(family)}`,
            title: `Width of ${family}`,
            draw: draw(family),
            table: table(family),
            moves: true,
          }),
        ),
      ),
    );
  };
  const curve = (family) => data.accuracy.filter((entry) => entry.family === family && entry.width !== FLOAT);
  const shapeAt = (family) => {
    const found = data.accuracy.find(
      (e) => e.family === family && e.weights === state.weights && e.activations === state.activations,
    );
    return found && found.width !== FLOAT ? [here(found.width)] : [];
  };

  // From dark blue over grey to yellow: in order also for those who see no red or no green.
  const SCALE = [
    [0, [0, 32, 77]],
    [0.5, [124, 123, 120]],
    [1, [255, 233, 69]],
  ];
  const inkOn = (share) => {
    const [low, high] = share < 0.5 ? SCALE.slice(0, 2) : SCALE.slice(1);
    const part = (share - low[0]) / (high[0] - low[0]);
    const [red, green, blue] = low[1].map((value, at) => value + part * (high[1][at] - value));
    return 0.3 * red + 0.59 * green + 0.11 * blue < 118 ? "#ffffff" : "#000000";
  };

  const grid = () => {
    if (!insights.length) return null;
    const draw = (insight) => () => {
      const names = insight.widths.map((width) => (width === FLOAT ? "FP" : String(width)));
      const z = insight.widths.map((w) =>
        insight.widths.map((a) => percent(anybit.cellAt(insight, w, a)?.accuracy ?? NaN)),
      );
      const [x, y] = [insight.widths.indexOf(state.activations), insight.widths.indexOf(state.weights)];
      const box = {
        type: "rect",
        x0: x - 0.5,
        x1: x + 0.5,
        y0: y - 0.5,
        y1: y + 0.5,
        line: { color: style("--bad"), width: 4 },
      };
      return {
        traces: [
          {
            type: "heatmap",
            x: names,
            y: names,
            z,
            zmin: 0,
            zmax: 100,
            colorscale: SCALE.map(([share, rgb]) => [share, `rgb(${rgb.join(",")})`]),
            xgap: 1,
            ygap: 1,
            showscale: false,
            hovertemplate: "weights %{y}, activations %{x}: %{z:.1f} %<extra></extra>",
          },
          {
            type: "scatter",
            mode: "text",
            x: z.flatMap(() => names),
            y: z.flatMap((line, at) => line.map(() => names[at])),
            text: z.flat().map((value) => (Number.isNaN(value) ? "" : value.toFixed(0))),
            textfont: { color: z.flat().map((value) => inkOn(value / 100)) },
            hoverinfo: "skip",
            showlegend: false,
          },
        ],
        layout: {
          xaxis: axis("bits of activations", { type: "category", showgrid: false }),
          yaxis: axis("bits of weights", { type: "category", showgrid: false }),
          shapes: x >= 0 && y >= 0 ? [box] : [],
        },
      };
    };
    const table = (insight) => () => ({
      head: ["weights", "activations", "accuracy, %", "loss", "D(float‖quantized), nats"],
      rows: insight.grid.map((cell) => [cell.weights, cell.activations, percent(cell.accuracy), cell.loss, cell.kl]),
    });
    const n = [...new Set(insights.map((insight) => insight.n))].join(", ");
    return section(
      "grid",
      "Every pair of widths",
      `Test accuracy in %, on the first ${n} test examples. The box is where the sliders are.`,
      panels(
        insights.map((insight, index) =>
          chart({
            id: `grid-${index}`,
            title: `Weights by activations${nameOf(insight)}`,
            draw: draw(insight),
            table: table(insight),
            moves: true,
          }),
        ),
      ),
    );
  };

  const sized = (insight) => [
    ...insight.grid.map((cell) => ({
      what: name(cell.weights, cell.activations),
      size: anybit.sizeAt(insight, cell.weights),
      accuracy: cell.accuracy,
      mixed: false,
    })),
    ...insight.budgets.map((budget) => ({
      what: `${number(budget.average_bits, 3)} bits on average, A${budget.activations}`,
      size: budget.size,
      accuracy: budget.accuracy,
      mixed: true,
    })),
  ];
  anybit.fronts = () => insights.map((insight) => anybit.front(sized(insight)));

  const size = () => {
    if (!insights.length) return null;
    const draw = () => ({
      traces: insights.flatMap((insight) => {
        const index = anybit.placeOf(insight);
        const [points, front, { colour, dash }] = [sized(insight), anybit.front(sized(insight)), look(index)];
        const dots = (list, more) => ({
          type: "scatter",
          mode: "markers",
          x: list.map((p) => p.size / 1000),
          y: list.map((p) => percent(p.accuracy)),
          text: list.map((p) => plain(p.what)),
          hovertemplate: `%{text}: %{x:.1f} kB, %{y:.1f} %<extra>${plain(insight.name)}</extra>`,
          legendgroup: String(index),
          showlegend: false,
          ...more,
        });
        const now = points.filter((p) => p.what === name(state.weights, state.activations));
        return [
          dots(front, {
            mode: "lines",
            line: { color: colour, dash, width: 2, shape: "hv" },
            name: `${plain(insight.name)}, best for its size`,
            showlegend: true,
          }),
          dots(
            points.filter((p) => !p.mixed),
            { marker: { ...labelled(index), size: 6, opacity: 0.7 } },
          ),
          dots(
            points.filter((p) => p.mixed),
            {
              marker: { color: colour, symbol: "star", size: 13 },
              name: `${plain(insight.name)}, widths per layer`,
              showlegend: true,
            },
          ),
          dots(now, { marker: { color: "rgba(0,0,0,0)", size: 18, line: { color: style("--focus"), width: 3 } } }),
        ];
      }),
      layout: {
        xaxis: axis("size, kB", {
          type: "log",
          tickvals: anybit.ticks(insights.flatMap((insight) => insight.sizes.map((size_) => size_ / 1000))),
        }),
        yaxis: axis("test accuracy, %", { range: [0, 104] }),
        hovermode: "closest",
      },
    });
    const table = () => ({
      head: ["run", "widths", "bytes", "accuracy, %", "best for its size"],
      rows: insights.flatMap((insight) => {
        const best = new Set(anybit.front(sized(insight)).map((p) => p.what));
        return sized(insight).map((p) => [
          insight.name,
          p.what,
          p.size,
          percent(p.accuracy),
          best.has(p.what) ? "yes" : "",
        ]);
      }),
    });
    return section(
      "size",
      "Size against accuracy",
      "One point per pair of widths; the line joins those that nothing smaller beats (the Pareto front). " +
        "Stars have widths per layer. The size counts weights at their width and the rest in 32 bits. " +
        "The ring is where the sliders are.",
      chart({ id: "size-accuracy", title: "Size against test accuracy", draw, table, moves: true }),
    );
  };

  anybit.sections.push(accuracy, grid, size);
})();
