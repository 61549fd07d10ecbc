// Draws the pictures in the colours of the page, and opens the page of a trial that is clicked.
"use strict";

const dark = matchMedia("(prefers-color-scheme: dark)");
const narrow = matchMedia("(max-width: 640px)");
const printing = matchMedia("print");

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

// What is shown of a trial under the pointer. Plotly reads markup in it, so it is escaped.
function labels(trials) {
  const places = new Map(trials.rows.map((row, place) => [row[0], place]));
  const [trial, state, rate, sure, , mfu, step, memory, , sweep, layout] = trials.titles.keys();
  const escape = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  return (id) => {
    const row = trials.rows[places.get(String(id))];
    if (row === undefined) return `trial ${id}`;
    const lines = [`<b>trial ${row[trial]}</b>, ${row[state]}`, escape(row[layout])];
    if (row[rate] !== "-") lines.push(`${row[rate]} tokens/s/GPU ${row[sure]}, MFU ${row[mfu]}`, `step ${row[step]}, memory ${escape(row[memory])}`);
    lines.push(escape(row[sweep]));
    return lines.join("<br>");
  };
}

function drawn(figure, label) {
  return figure.data.map((trace) => {
    if (!trace.customdata || trace.type === "heatmap") return trace;
    return { ...trace, text: trace.customdata.map(label), hovertemplate: "%{text}<extra></extra>", textposition: "none" };
  });
}

function draw(element, figure, label) {
  const started = performance.now();
  const config = { displaylogo: false, displayModeBar: "hover", responsive: true, modeBarButtonsToRemove: ["lasso2d", "select2d", "autoScale2d"] };
  Plotly.react(element, drawn(figure, label), themed(figure.layout), config).then(() => {
    element.dataset.milliseconds = String(Math.round(performance.now() - started));
    if (element.dataset.drawn) return;
    element.dataset.drawn = "yes";
    element.on("plotly_click", (event) => {
      const id = event.points[0] && event.points[0].customdata;
      if (typeof id === "number") location.href = `trial.html#${id}`;
    });
  });
}

sweepReport.when("trials", (trials) => sweepReport.when("figures", (figures) => {
  const label = labels(trials);
  const all = () => {
    for (const element of document.querySelectorAll("[data-picture]")) {
      if (element.dataset.drawn) draw(element, figures[element.dataset.picture], label);
    }
  };
  // A picture is drawn once it is near the window: what nobody looks at costs nothing.
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      seen.unobserve(entry.target);
      draw(entry.target, figures[entry.target.dataset.picture], label);
    }
  }, { rootMargin: "600px" });
  for (const element of document.querySelectorAll("[data-picture]")) seen.observe(element);
  dark.addEventListener("change", all);
  narrow.addEventListener("change", all);
  addEventListener("beforeprint", () => {
    for (const element of document.querySelectorAll("[data-picture]")) draw(element, figures[element.dataset.picture], label);
  });
}));
