// Shows the trial whose number is in the address: trial.html#17.
"use strict";

function facts(pairs) {
  return make("dl", { class: "facts" }, ...pairs.flatMap(([name, text]) => [make("dt", {}, name), make("dd", {}, text)]));
}

function table(titles, rows, numbers) {
  const cell = (tag, text, column) => {
    const found = make(tag, tag === "th" ? { scope: "col" } : {}, text);
    if (numbers.has(column)) found.className = "number";
    return found;
  };
  return make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": titles.filter(Boolean).join(", ") }, make("table", {},
    make("thead", {}, make("tr", {}, ...titles.map((text, column) => cell("th", text, column)))),
    make("tbody", {}, ...rows.map((row) => make("tr", {}, ...row.map((text, column) => cell("td", text, column))))),
  ));
}

function code(text, kind = "") {
  return make("pre", { class: kind, tabindex: "0" }, make("code", {}, text));
}

function picture(one) {
  const element = make("div", { class: "figure", role: "img", "aria-label": `${one.title}. ${one.caption}` });
  element.style.minHeight = `${one.figure.layout.height}px`;
  element.figure = one.figure;
  return make("figure", {}, make("h3", {}, one.title), element, make("figcaption", { class: "caption" }, one.caption));
}

// Few trials have pictures, so plotly.js is loaded when one does.
function drawPictures() {
  const elements = document.querySelectorAll("#trial .figure");
  const draw = () => elements.forEach((element) => Plotly.react(element, withPlainNames(element.figure.data), themed(element.figure.layout), CONFIG));
  if (!elements.length) return;
  if (window.Plotly) draw();
  else addScript("assets/plotly.min.js", draw);
}

dark.addEventListener("change", drawPictures);

function profile(one) {
  const titles = ["part of a step", ...one.ranks.flatMap((rank) => [rank, "share"])];
  return [
    make("h2", {}, one.title),
    ...(one.rows.length ? [table(titles, one.rows, new Set([...titles.keys()].slice(1)))] : []),
    ...one.pictures.map(picture),
    ...one.remarks.map((line) => make("p", { class: "remark" }, line)),
    ...(one.traces.length ? [make("p", {}, "Traces, to open in ui.perfetto.dev:"), code(one.traces.join("\n"))] : []),
  ];
}

function show(trial) {
  document.title = trial.title;
  const link = make("a", { href: `data:text/yaml;charset=utf-8,${encodeURIComponent(trial.file || "")}`, download: `trial-${trial.id}.yaml` }, `trial-${trial.id}.yaml`);
  const parts = [
    make("h1", {}, trial.title),
    facts(trial.facts),
    table(["quantity", "predicted", "measured", "predicted/measured"], trial.compared, new Set([1, 2, 3])),
    ...trial.attempts.flatMap((attempt) => [
      make("h2", {}, attempt.title),
      facts(attempt.facts),
      ...(attempt.log ? [make("p", {}, "Last lines of the rank's log:"), code(attempt.log, "log")] : []),
    ]),
    ...trial.profiles.flatMap(profile),
    make("h2", {}, "Events"),
    table(["at (UTC)", "event", "attempt", "state", "detail"], trial.events, new Set([2])),
    make("h2", {}, "Repeat it"),
    facts(trial.commands.map(([purpose, command]) => [purpose, make("code", {}, command)])),
    ...(trial.program ? [make("p", {}, "Its program, as a script that needs no sweep:"), code(trial.program)] : []),
    ...(trial.file ? [make("p", {}, "A sweep file with this layout alone: ", link), code(trial.file)] : [make("p", {}, "The store does not have the sweep file.")]),
  ];
  document.getElementById("trial").replaceChildren(...parts);
  drawPictures();
  scrollTo(0, 0);
}

function open() {
  const id = location.hash.slice(1);
  sweepReport.when("trials", (trials) => {
    const file = trials.files[id];
    if (file === undefined) {
      document.getElementById("trial").replaceChildren(make("h1", {}, "No such trial"), make("p", {}, `This report has no trial ${id || "without a number"}. `, make("a", { href: "trials.html" }, "All trials")));
      return;
    }
    sweepReport.when(`trials-${file}`, (documents) => show(documents[id]));
    sweepReport.load(`trials-${file}`);
  });
}

addEventListener("hashchange", open);
open();
