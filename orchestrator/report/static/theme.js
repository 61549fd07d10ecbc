// The colours of pictures: those of the page, light or dark.
"use strict";

const dark = matchMedia("(prefers-color-scheme: dark)");
const narrow = matchMedia("(max-width: 640px)");

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function themed(layout) {
  const text = color("--text"), grid = color("--grid");
  const found = structuredClone(layout);
  for (const name of Object.keys(found)) {
    if (!/^[xy]axis\d*$/.test(name)) continue;
    const axis = found[name];
    axis.gridcolor = grid;
    axis.linecolor = color("--line");
    axis.zerolinecolor = grid;
    axis.automargin = true;
    axis.tickfont = { color: color("--soft") };
    axis.title = { ...axis.title, standoff: 8 };
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
