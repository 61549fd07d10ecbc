// Keeps the live page up to date: takes the events of the server, and shows tables in another order.
// Everything from the server becomes text, never markup.
"use strict";

const live = document.getElementById("live");
const shown = { version: Number(live.dataset.version), tables: {} };
// Tables that a person has sorted or filtered, by name.
const asked = {};
const ASK_AGAIN_MILLISECONDS = 2000;

function make(tag, className, ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children);
  return element;
}

function row(section, key, [tone, trial, texts]) {
  const numbers = section.dataset.numbers;
  const cells = texts.map((text, place) => {
    const cell = make(place ? "td" : "th", numbers[place] === "1" ? "number" : "");
    if (place) {
      cell.textContent = text;
      return cell;
    }
    cell.scope = "row";
    if (trial === null) {
      cell.textContent = text;
    } else {
      const link = make("a", "", text);
      link.href = `trial/${Number(trial)}`;
      cell.append(link);
    }
    return cell;
  });
  const found = make("tr", `tone-${tone}`, ...cells);
  found.dataset.key = key;
  return found;
}

function rowsOf(section) {
  const body = section.querySelector("tbody");
  return [body, new Map([...body.rows].map((one) => [one.dataset.key, one]))];
}

// Changes a row in place, so that the focus stays on its link.
function fill(old, fresh) {
  old.className = fresh.className;
  [...fresh.cells].forEach((cell, place) => {
    const before = old.cells[place];
    if (before.textContent !== cell.textContent) {
      const [link, other] = [before.querySelector("a"), cell.querySelector("a")];
      if (link && other) {
        link.textContent = other.textContent;
        link.href = other.href;
      } else {
        before.replaceChildren(...cell.childNodes);
      }
    } else if (cell.querySelector("a") && before.querySelector("a")) {
      before.querySelector("a").href = cell.querySelector("a").href;
    }
  });
}

function showTable(section, { order, lines = {}, remark }) {
  const [body, rows] = rowsOf(section);
  for (const [key, values] of Object.entries(lines)) {
    const fresh = row(section, key, values);
    if (rows.has(key)) fill(rows.get(key), fresh);
    else rows.set(key, fresh);
  }
  if (order !== undefined) {
    const kept = new Set(order);
    for (const old of [...body.rows]) if (!kept.has(old.dataset.key)) old.remove();
    // Rows that stay where they are are not moved: that would take the focus from their links.
    order.forEach((key, place) => {
      const wanted = rows.get(key);
      if (wanted !== undefined && body.rows[place] !== wanted) body.insertBefore(wanted, body.rows[place] || null);
    });
    section.querySelector("table").hidden = !order.length;
    section.querySelector(".empty").hidden = order.length > 0;
  }
  if (remark !== undefined) section.querySelector("p.remark").textContent = remark;
}

function showHead(lines) {
  const head = document.getElementById("head");
  const before = head.firstElementChild && head.firstElementChild.textContent;
  head.replaceChildren(...lines.map(([text, tone]) => make("p", `tone-${tone}`, text)));
  if (lines.length && before !== lines[0][0]) say(lines[0][0]);
}

function showTrouble(text) {
  const trouble = document.getElementById("trouble");
  trouble.hidden = text === null;
  trouble.textContent = text === null ? "" : `The store does not answer: ${text}`;
  say(text === null ? "The store answers again." : trouble.textContent);
}

// What a screen reader reads out, and nothing else: it would never end.
function say(text) {
  document.getElementById("said").textContent = text;
}

function sayFailures(known, { order, lines = {} }) {
  const fresh = (order || []).filter((key) => !known.has(key) && lines[key]);
  if (fresh.length) {
    const [, , texts] = lines[fresh[0]];
    say(`Trial ${texts[1]} failed: ${texts[3]}${fresh.length > 1 ? `, and ${fresh.length - 1} more` : ""}`);
  }
}

function take(message) {
  if (message.after !== undefined && message.after !== shown.version) return;
  const isFirst = message.after === undefined;
  shown.version = message.version;
  if (message.head !== undefined) showHead(message.head);
  if (message.trouble !== undefined && (message.trouble !== null || !document.getElementById("trouble").hidden)) showTrouble(message.trouble);
  for (const [name, table] of Object.entries(message.tables || {})) {
    const section = live.querySelector(`[data-table="${CSS.escape(name)}"]`);
    if (name === "failures" && !isFirst) sayFailures(new Set(rowsOf(section)[1].keys()), table);
    if (asked[name]) askSoon(name);
    else showTable(section, table);
  }
  live.dataset.version = String(shown.version);
}

// A table that a person has sorted or filtered is asked for anew when the sweep has changed.
function askSoon(name) {
  const one = asked[name];
  if (one.timer) return;
  one.timer = setTimeout(() => {
    one.timer = 0;
    ask(name);
  }, ASK_AGAIN_MILLISECONDS);
}

async function ask(name) {
  const section = live.querySelector(`[data-table="${CSS.escape(name)}"]`);
  const one = asked[name];
  const number = (one.number = (one.number || 0) + 1);
  const answer = await fetch(`table?${new URLSearchParams({ name, sort: one.sort, matching: one.matching })}`).catch(() => null);
  if (answer === null || !answer.ok) return;
  const table = await answer.json();
  if (one.number === number && asked[name] === one) showTable(section, table);
}

for (const form of live.querySelectorAll("form")) {
  const name = form.closest("[data-table]").dataset.table;
  const [sort, matching] = [form.elements.sort, form.elements.matching];
  const wanted = () => {
    asked[name] = { sort: sort.value, matching: matching.value };
    ask(name);
  };
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    wanted();
  });
  sort.addEventListener("change", wanted);
  let timer = 0;
  matching.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(wanted, 200);
  });
  // A browser may restore what was typed before.
  if (sort.selectedIndex > 0 || matching.value) wanted();
}

let source = null;
function connect() {
  source = new EventSource(`events?after=${shown.version}`);
  source.onmessage = (event) => take(JSON.parse(event.data));
  source.onopen = () => { document.getElementById("cut-off").hidden = true; };
  source.onerror = () => {
    document.getElementById("cut-off").hidden = false;
    // Connect anew, with the version that is shown now.
    source.close();
    setTimeout(connect, 2000);
  };
}
connect();
// A page that nobody sees any more gives its connection back.
addEventListener("pagehide", () => source.close());
addEventListener("pageshow", (event) => { if (event.persisted) connect(); });
