// Draws the pictures in the colours of the page, and opens the page of a trial that is clicked.
"use strict";

// Trials that are listed below a picture; the table has them all.
const MOST_LINKS = 200;
// Shares of the speed of a cell's fastest layout.
const LEAST_SPEEDS = [0.98, 0.95, 0.9, 0.75, 0.5];

// What is shown of a trial under the pointer. Plotly reads markup in it, so it is escaped.
function labels(trials) {
  const places = new Map(trials.rows.map((row, place) => [row[0], place]));
  const [trial, state, rate, sure, , mfu, step, memory, , sweep, layout] = trials.titles.keys();
  return (id) => {
    const row = trials.rows[places.get(String(id))];
    if (row === undefined) return `trial ${id}`;
    const lines = [`<b>trial ${row[trial]}</b>, ${row[state]}`, escapeMarkup(row[layout])];
    if (row[rate] !== "-") lines.push(`${row[rate]} tokens/s/GPU ${row[sure]}, MFU ${row[mfu]}`, `step ${row[step]}, memory ${escapeMarkup(row[memory])}`);
    lines.push(escapeMarkup(row[sweep]));
    return lines.join("<br>");
  };
}

// The trials of a figure's points, each once, in the order of the picture.
function trialsOf(figure) {
  return [...new Set(figure.data.flatMap((trace) => (trace.customdata || []).flat()))].filter((id) => typeof id === "number");
}

// Below a picture: links to the trials of its points, for who has no pointer. They are made when
// somebody opens them.
function listOnDemand(details, figure, trials) {
  const ids = trialsOf(figure);
  const places = new Map(trials.rows.map((row, place) => [row[0], place]));
  const [state, rate, layout] = ["state", "tokens/s/GPU", "layout"].map((title) => trials.titles.indexOf(title));
  const text = (id) => {
    const row = trials.rows[places.get(String(id))];
    if (row === undefined) return "";
    return `, ${row[state]}${row[rate] === "-" ? "" : `, ${row[rate]} tokens/s/GPU`}, ${row[layout]}`;
  };
  details.addEventListener("toggle", () => {
    if (!details.open || details.children.length > 1) return;
    const items = ids.slice(0, MOST_LINKS).map((id) => make("li", {}, make("a", { href: `trial.html#${id}` }, `trial ${id}`), text(id)));
    details.append(make("p", {}, make("a", { href: `trials.html#ids=${ids.join(",")}` }, `All ${ids.length.toLocaleString("en")}, in the table`)), make("ul", {}, ...items));
  });
}

function drawn(figure, label) {
  return withPlainNames(figure.data).map((trace) => {
    const isOfSeveral = trace.customdata && trace.customdata.some(Array.isArray);
    if (!trace.customdata || trace.type === "heatmap" || isOfSeveral) return trace;
    return { ...trace, text: trace.customdata.map(label), hovertemplate: "%{text}<extra></extra>", textposition: "none" };
  });
}

function draw(element, figure, label) {
  const started = performance.now();
  Plotly.react(element, drawn(figure, label), themed(figure.layout), CONFIG).then(() => {
    element.dataset.milliseconds = String(Math.round(performance.now() - started));
    if (element.dataset.drawn) return;
    element.dataset.drawn = "yes";
    if (figure.layout.meta) addFilter(element, figure, (filtered) => draw(element, filtered, label));
    element.on("plotly_click", (event) => {
      const id = event.points[0] && event.points[0].customdata;
      if (typeof id === "number") location.href = `trial.html#${id}`;
      else if (Array.isArray(id)) location.href = id.length > 1 ? `trials.html#ids=${id.join(",")}` : `trial.html#${id[0]}`;
    });
  });
}

// Above the parallel coordinates: a choice for each axis and a range of speed, which leave the
// lines with these values, and lead to their trials.
function addFilter(element, figure, redraw) {
  const axes = Object.entries(figure.layout.meta.axes);
  const selects = axes.map(([name, values]) => make("select", { "aria-label": `Only layouts with this ${name}` }, make("option", { value: "" }, `${name}: all`), ...values.map((value) => make("option", { value }, `${name}: ${value}`))));
  const link = make("a", {}, "");
  const speeds = make("select", { "aria-label": "Only layouts of at least this speed" }, make("option", { value: "" }, "speed: all"), ...LEAST_SPEEDS.map((least) => make("option", { value: least }, `speed: ${100 * least} % and more`)));
  const form = make("form", { class: "filter" }, ...selects, speeds, link);
  form.addEventListener("submit", (event) => event.preventDefault());
  const width = axes.length + 2;  // points of a line: its axes, its speed, and a gap
  const show = () => {
    const chosen = [];
    let total = 0;
    const data = figure.data.map((trace) => {
      const speed = (line) => trace.y[line * width + axes.length];
      const kept = [...trace.meta.ids.keys()].filter((line) => speed(line) >= Number(speeds.value) && selects.every((select, axis) => !select.value || trace.meta.values[line][axis] === select.value));
      chosen.push(...kept.map((line) => trace.meta.ids[line]));
      total += trace.meta.ids.length;
      const part = (values) => kept.flatMap((line) => values.slice(line * width, (line + 1) * width));
      return { ...trace, x: part(trace.x), y: part(trace.y) };
    });
    link.textContent = `${chosen.length.toLocaleString("en")} of ${total.toLocaleString("en")} layouts, in the table`;
    link.href = `trials.html#ids=${chosen.join(",")}`;
    redraw({ ...figure, data });
  };
  form.addEventListener("change", show);
  element.before(form);
  show();
}

sweepReport.when("trials", (trials) => sweepReport.when("figures", (figures) => {
  const label = labels(trials);
  for (const details of document.querySelectorAll("[data-trials-of]")) listOnDemand(details, figures[details.dataset.trialsOf], trials);
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
  // On paper everything is open, and pictures have dark text, also if the page is dark.
  let opened = [];
  addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("details.cell:not([open])")];
    for (const details of opened) details.open = true;
    document.documentElement.classList.add("printing");
    for (const element of document.querySelectorAll("[data-picture]")) draw(element, figures[element.dataset.picture], label);
  });
  addEventListener("afterprint", () => {
    for (const details of opened) details.open = false;
    document.documentElement.classList.remove("printing");
    all();
  });
}));
