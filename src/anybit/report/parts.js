"use strict";
// What all sections share: where the sliders are, what moves with them, and a few small makers.
(() => {
  const { insights, element, look, FLOAT } = anybit;
  const state = { weights: FLOAT, activations: FLOAT };
  const movers = [];
  const several = insights.length > 1;
  const nameOf = (insight) => (several ? `: ${insight.name}` : "");
  const section = (id, title, text, ...inner) =>
    element("section", { id }, element("h2", {}, title), text ? element("p", { class: "soft" }, text) : null, inner);
  const panels = (list) => element("div", { class: "panels" }, list);
  const slug = (text) => text.toLowerCase().replace(/[^a-z0-9]+/g, "-");
  const percent = (value) => Number((100 * value).toFixed(4));
  const strokeOf = (run) => {
    const { colour, dash } = look(anybit.placeOf(run));
    return { color: colour, dash };
  };
  const labelled = (index) => {
    const { colour, marker } = look(index);
    return { color: colour, symbol: marker, size: 8 };
  };

  Object.assign(anybit, { state, movers, sections: [], nameOf, section, panels, slug, percent, strokeOf, labelled });
})();
