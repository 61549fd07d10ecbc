// The calculator: asks the server for the layout that the controls name, and draws its answer.
"use strict";

const SVG = "http://www.w3.org/2000/svg";
const ANNOUNCE_AFTER = 250;  // milliseconds without a change, so that a moved slider is read once
const form = document.getElementById("layout");
const at = (id) => document.getElementById(id);
const controls = [...form.elements].filter((control) => control.name);

const valuesOf = (slider) => slider.dataset.values.split(" ");
const valueOf = (control) => (control.type === "range" ? valuesOf(control)[Number(control.value)] : control.value);

// An empty value follows from the other axes, so it is not sent.
function chosen() {
  const found = new URLSearchParams({ cell: form.dataset.cell });
  for (const control of controls) if (valueOf(control) !== "") found.set(control.name, valueOf(control));
  return found;
}

// Beside each slider its value; a value that follows is known once the server has answered.
function showValues(fields = {}) {
  for (const control of controls) {
    if (control.type !== "range") continue;
    const value = valueOf(control);
    let text = value;
    if (value === "") text = fields[control.name] ? `${fields[control.name]}, follows` : "follows";
    else if (!control.dataset.inFile.split(" ").includes(value)) text += ", not in the sweep file";
    at(`value-${control.name}`).textContent = text;
    control.setAttribute("aria-valuetext", text);
  }
}

function choose(fields) {
  for (const control of controls) {
    const values = control.type === "range" ? valuesOf(control) : [...control.options].map((option) => option.value);
    // Replicas and accumulation have an empty value first.
    const place = values[0] === "" ? 0 : values.indexOf(fields[control.name]);
    if (place < 0) continue;
    if (control.type === "range") control.value = String(place);
    else control.selectedIndex = place;
  }
  ask();
}

function drawing(tag, attributes, text) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text) element.append(drawing("title", {}));
  if (text) element.firstChild.textContent = text;
  return element;
}

// One bar of parts; a thin line for the range of four of five, a thick one for the limit.
function drawBar(name, shown) {
  const longest = Math.max(shown.total, shown.limit || 0, shown.band ? shown.band[1] : 0) * 1.02;
  const percent = (value) => `${(100 * value) / longest}%`;
  let begin = 0;
  const marks = shown.parts.map((part) => {
    const mark = drawing("rect", { class: "part", x: percent(begin), width: percent(part.value), y: 2, height: 30, fill: part.color }, `${part.name}: ${part.text}`);
    begin += part.value;
    return mark;
  });
  if (shown.band) marks.push(drawing("line", { class: "band", x1: percent(shown.band[0]), x2: percent(shown.band[1]), y1: 38, y2: 38 }));
  if (shown.limit) marks.push(drawing("line", { class: "limit", x1: percent(shown.limit), x2: percent(shown.limit), y1: 0, y2: 44 }, shown.limit_text));
  at(name).replaceChildren(...marks);
  at(name).classList.toggle("over", shown.fits === false);
  const told = [shown.band && "The thin line below the bar is the range of 4 of 5 measurements.", shown.limit_text && `The thick line is the ${shown.limit_text}.`];
  at(`${name}-caption`).textContent = told.filter(Boolean).join(" ");
  fillTable(`${name}-table`, shown.parts.map((part) => [part.name, part.text, part.share]), shown.parts.map((part) => part.color));
}

function fillTable(id, rows, colors = []) {
  document.querySelector(`#${id} tbody`).replaceChildren(...rows.map((texts, place) => make("tr", {}, ...texts.map((text, column) => {
    if (column) return make("td", { class: "number" }, text);
    const cell = make("th", { scope: "row" });
    if (colors[place]) {
      const swatch = drawing("svg", { class: "swatch", "aria-hidden": "true" });
      swatch.append(drawing("rect", { width: "100%", height: "100%", fill: colors[place] }));
      cell.append(swatch);
    }
    cell.append(text);
    return cell;
  }))));
}

let speaking;
function say(sentences, isRefused) {
  at("sentences").classList.toggle("refused", isRefused);
  clearTimeout(speaking);
  speaking = setTimeout(() => at("sentences").replaceChildren(...sentences.map((text) => make("p", {}, text))), at("sentences").childElementCount ? ANNOUNCE_AFTER : 0);
}

function show(found) {
  showValues(found.fields);
  at("short").textContent = found.short;
  at("result").dataset.layout = found.layout;
  say(found.sentences, found.refusal !== null);
  at("parts").hidden = found.memory === null;
  if (found.memory) drawBar("memory", found.memory);
  for (const id of ["step", "step-title", "step-caption"]) at(id).toggleAttribute("hidden", !found.step);
  at("step-table").parentElement.hidden = !found.step;
  if (found.step) drawBar("step", found.step);
  fillTable("numbers", found.numbers);
  at("changes").replaceChildren(...found.changes.flatMap((group) => [
    make("h3", {}, group.title),
    ...(group.layouts.length ? [make("ul", {}, ...group.layouts.map((one) => {
      const button = make("button", { type: "button" }, "Take");
      button.setAttribute("aria-label", `Take ${one.text}`);
      button.addEventListener("click", () => { choose(one.fields); controls[0].focus(); });
      return make("li", {}, button, ` ${one.text}`);
    }))] : []),
  ]));
}

// One request at a time: what is chosen meanwhile is asked for when its answer is there.
let asked = null, wanted = null;
async function ask() {
  showValues();
  wanted = chosen().toString();
  if (asked !== null) return;
  while (asked !== wanted) {
    asked = wanted;
    try {
      const answer = await fetch(`calculator/result?${asked}`, { headers: { Accept: "application/json" } });
      if (asked !== wanted) continue;
      if (answer.ok) show(await answer.json());
      else refuse((await answer.text()).trim());
      history.replaceState(null, "", `?${asked}`);
    } catch {
      refuse("The server does not answer.");
    }
  }
  asked = null;
}

function refuse(sentence) {
  at("parts").hidden = true;
  at("changes").replaceChildren();
  say([sentence], true);
}

form.addEventListener("input", ask);
form.addEventListener("submit", (event) => event.preventDefault());
at("cell").addEventListener("change", () => at("cells").requestSubmit());
ask();
