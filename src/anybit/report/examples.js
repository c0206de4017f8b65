"use strict";
// The section with examples whose prediction flips.
(() => {
  const { insights, element, FLOAT, name, state, movers, nameOf, section, panels } = anybit;

  const examples = () => {
    const shown = insights.filter((insight) => insight.examples.length);
    if (!shown.length) return null;
    const made = (insight) => {
      const reference = anybit.cellAt(insight, FLOAT, FLOAT);
      const items = insight.examples.map((example) => {
        const text = element("span");
        const image = example.image
          ? element("img", {
              src: example.image,
              alt: `test example ${example.index}, class ${insight.classes[example.label]}`,
            })
          : element("span", {}, `example ${example.index}, class ${insight.classes[example.label]}`);
        return { example, text, item: element("li", {}, image, text) };
      });
      const count = element("p", { "aria-live": "polite", class: "flips" });
      const fill = () => {
        const cell = anybit.cellAt(insight, state.weights, state.activations);
        let flips = 0;
        for (const { example, text, item } of items) {
          const now = cell ? example.predicted[cell.index] : null;
          const flipped = cell !== null && reference !== null && now !== example.predicted[reference.index];
          flips += flipped;
          item.className = flipped ? "flipped" : "";
          text.className = now === example.label ? "right" : "wrong";
          text.textContent =
            cell === null
              ? "not measured"
              : `${now === example.label ? "✓" : "✗"} ${insight.classes[now]} ` +
                `${Math.round(100 * example.confidence[cell.index])}\u00a0%${flipped ? ", flipped" : ""}`;
        }
        count.textContent =
          cell === null
            ? `Not measured at ${name(state.weights, state.activations)}.`
            : `${flips} of ${items.length} predictions differ from floating point at ` +
              `${name(state.weights, state.activations)}.`;
      };
      movers.push(fill);
      const table = () => ({
        head: ["test example", "class", "weights", "activations", "predicted", "probability"],
        rows: insight.examples.flatMap((example) =>
          insight.grid.map((cell, at) => [
            example.index,
            insight.classes[example.label],
            cell.weights,
            cell.activations,
            insight.classes[example.predicted[at]],
            example.confidence[at],
          ]),
        ),
      });
      const index = insights.indexOf(insight);
      return element(
        "div",
        { id: `examples-${index}` },
        element("h3", {}, `Predictions${nameOf(insight)}`),
        count,
        element(
          "ul",
          { class: "pictures" },
          items.map(({ item }) => item),
        ),
        anybit.dataOf(`predictions-${index}`, "Predictions", table),
      );
    };
    return section(
      "examples",
      "Examples that flip",
      "Chosen so that as many widths as possible flip one. The predicted class and its probability at the sliders' " +
        "widths; a dashed frame where it differs from floating point.",
      panels(shown.map(made)),
    );
  };

  anybit.sections.push(examples);
})();
