// The colours of pictures: those of the page, light or dark.
"use strict";

const dark = matchMedia("(prefers-color-scheme: dark)");
const narrow = matchMedia("(max-width: 640px)");

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// Plotly reads markup in every text that it shows.
function escapeMarkup(text) {
  return text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
}

// The traces of a figure with names from sweeps and nodes as text.
function withPlainNames(traces) {
  const plain = (values) => values && values.map((value) => (typeof value === "string" ? escapeMarkup(value) : value));
  return traces.map((trace) => ({ ...trace, x: plain(trace.x), y: plain(trace.y), ...(trace.name && { name: escapeMarkup(trace.name) }) }));
}

function themed(layout) {
  const text = color("--text"), grid = color("--grid");
  const found = structuredClone(layout);
  for (const name of Object.keys(found)) {
    if (!/^[xy]axis\d*$/.test(name)) continue;
    const axis = found[name];
    for (const names of ["categoryarray", "ticktext"]) if (axis[names]) axis[names] = axis[names].map(escapeMarkup);
    axis.gridcolor = grid;
    axis.linecolor = color("--line");
    axis.zerolinecolor = grid;
    axis.automargin = true;
    axis.tickfont = { color: color("--soft") };
    axis.title = { ...axis.title, standoff: 8 };
  }
  for (const label of found.annotations || []) {
    // Labels name places of category axes, whose names are escaped.
    for (const letter of ["x", "y"]) if (typeof label[letter] === "string") label[letter] = escapeMarkup(label[letter]);
  }
  return {
    ...found,
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif", size: 13, color: text },
    margin: { l: 60, r: 20, t: 30, b: 50, ...found.margin },
    hoverlabel: { align: "left", bgcolor: color("--raised"), bordercolor: color("--line"), font: { color: text } },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: color("--soft"), activecolor: text },
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, traceorder: "normal", ...found.legend },
    hovermode: "closest",
    dragmode: narrow.matches ? false : "zoom",
  };
}

const CONFIG = { displaylogo: false, displayModeBar: "hover", responsive: true, modeBarButtonsToRemove: ["lasso2d", "select2d", "autoScale2d"] };
