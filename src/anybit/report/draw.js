"use strict";
// Elements, tables, downloads and charts. Text of others goes in as text, never as HTML.
(() => {
  const COLOURS = {
    light: ["#1f6feb", "#d9480f", "#2b8a3e", "#862e9c", "#8a6700", "#495057"],
    dark: ["#6ea8fe", "#ff922b", "#69db7c", "#da77f2", "#ffd43b", "#ced4da"],
  };
  const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];
  const MARKERS = ["circle", "square", "diamond", "triangle-up", "x", "cross"];
  const charts = [];

  const element = (tag, attributes = {}, ...children) => {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
      else if (value !== null && value !== false) made.setAttribute(name, value === true ? "" : value);
    }
    made.append(...children.flat(Infinity).filter((child) => child !== null));
    return made;
  };

  // Plotly reads a little HTML in names and titles.
  const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

  const number = (value, digits = 4) => {
    if (value === null || value === undefined) return "";
    return Number.isInteger(value) ? String(value) : String(Number(value.toPrecision(digits)));
  };
  const bytes = (value) => {
    if (value === null) return "not known";
    return value < 1e6 ? `${(value / 1000).toFixed(1)} kB` : `${(value / 1e6).toFixed(2)} MB`;
  };

  // A cell that starts like a formula must not become one in a spreadsheet.
  const csvCell = (value) => {
    if (typeof value === "number") return String(value);
    const text = value === null || value === undefined ? "" : String(value);
    const safe = /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
    return /[",\n\r]/.test(safe) ? `"${safe.replace(/"/g, '""')}"` : safe;
  };
  const csv = ({ head, rows }) => [head, ...rows].map((row) => row.map(csvCell).join(",")).join("\r\n") + "\r\n";

  const download = (name, table) => {
    const address = URL.createObjectURL(new Blob([csv(table)], { type: "text/csv" }));
    const link = element("a", { href: address, download: `${name}.csv` });
    document.body.append(link);
    link.click();
    link.remove();
    setTimeout(() => URL.revokeObjectURL(address), 1000);
  };

  const tableOf = ({ head, rows }) =>
    element(
      "table",
      {},
      element(
        "thead",
        {},
        element(
          "tr",
          {},
          head.map((text, at) =>
            element(
              "th",
              { scope: "col", class: rows.length && typeof rows[0][at] === "string" ? "text" : null },
              String(text),
            ),
          ),
        ),
      ),
      element(
        "tbody",
        {},
        rows.map((row) =>
          element(
            "tr",
            {},
            row.map((value) =>
              element(
                "td",
                { class: typeof value === "string" ? "text" : null },
                typeof value === "number" ? number(value, 6) : (value ?? ""),
              ),
            ),
          ),
        ),
      ),
    );

  // A wide table scrolls in its own box, also with the keyboard.
  const scroll = (title) => element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": title });

  // The data behind a chart: a table that is made when it is opened, and the same as a file.
  const dataOf = (id, title, table) => {
    const place = scroll(`${title}, the data`);
    const details = element(
      "details",
      {
        id: `${id}-data`,
        ontoggle: () => {
          if (details.open) place.replaceChildren(tableOf(table()));
        },
      },
      element("summary", {}, "Data as a table"),
      element("button", { type: "button", class: "download", onclick: () => download(id, table()) }, "Download CSV"),
      place,
    );
    return details;
  };

  const isDark = () => getComputedStyle(document.documentElement).colorScheme === "dark";
  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const look = (index) => ({
    colour: COLOURS[isDark() ? "dark" : "light"][index % COLOURS.light.length],
    dash: DASHES[index % DASHES.length],
    marker: MARKERS[index % MARKERS.length],
  });

  const axis = (title, more = {}) => ({
    title: { text: title, standoff: 8 },
    gridcolor: style("--line"),
    linecolor: style("--line"),
    zeroline: false,
    automargin: true,
    ...more,
  });
  const layout = (more) => ({
    margin: { l: 50, r: 16, t: 16, b: 44 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: style("--ink"), size: 13, family: "system-ui, sans-serif" },
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 },
    hoverlabel: { font: { family: "system-ui, sans-serif" } },
    ...more,
  });
  // Ticks 1, 2, 5, 10 and so on, for a logarithmic axis of plain numbers.
  const ticks = (values) => {
    const found = [];
    for (let power = -3; power < 12; power += 1) found.push(...[1, 2, 5].map((digit) => digit * 10 ** power));
    const [least, most] = [Math.min(...values) / 2, Math.max(...values) * 2];
    return found.filter((value) => value >= least && value <= most);
  };
  const here = (x) => ({
    type: "line",
    x0: x,
    x1: x,
    y0: 0,
    y1: 1,
    yref: "paper",
    line: { color: style("--focus"), width: 2, dash: "dot" },
  });

  const redraw = (chart) => {
    chart.stale = false;
    const { traces, layout: wanted } = chart.draw();
    Plotly.react(chart.place, traces, layout(wanted), { displayModeBar: false, responsive: true });
    if (chart.details.open) chart.details.dispatchEvent(new Event("toggle"));
  };

  // One chart: a caption, the drawing, its data. `moves` are drawn again when a slider moves.
  const chart = ({ id, title, draw, table, moves = false }) => {
    const place = element("div", {
      class: "chart",
      id,
      role: "img",
      "aria-label": `Chart: ${title}. The data is in the table below it.`,
    });
    const details = dataOf(id, title, table);
    const figure = element("figure", {}, element("figcaption", {}, title), place, details);
    const made = { place, draw, details, moves, seen: false, stale: true };
    charts.push(made);
    watch.observe(figure);
    watched.set(figure, made);
    return figure;
  };

  // A chart out of sight is drawn again when it comes into sight: a slider must not wait for it.
  const watched = new Map();
  const watch = new IntersectionObserver(
    (entries) => {
      for (const entry of entries) {
        const one = watched.get(entry.target);
        one.seen = entry.isIntersecting;
        if (one.seen && one.stale) redraw(one);
      }
    },
    { rootMargin: "200px" },
  );

  const redrawAll = () => charts.forEach(redraw);
  const redrawMoving = () => {
    for (const one of charts.filter((chart_) => chart_.moves)) {
      one.stale = true;
      if (one.seen) redraw(one);
    }
  };

  Object.assign(anybit, {
    element,
    plain,
    number,
    bytes,
    csv,
    download,
    tableOf,
    scroll,
    look,
    axis,
    ticks,
    here,
    style,
    isDark,
    chart,
    redrawAll,
    redrawMoving,
    dataOf,
  });
})();
