// The table of all trials: filtered by words and state, sorted by a column. The address has both.
"use strict";

const FIRST = 300;
const TEXT_COLUMNS = new Set(["state", "sweep", "layout"]);

// A text that no spreadsheet takes for a formula, as `sweep export csv` writes it.
function csvCell(text) {
  const isFormula = /^\s*[=+@-]/.test(text) && text.trim() !== "-" && Number.isNaN(Number(text));
  const safe = isFormula ? `'${text}` : text;
  return /[",\n\r]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}

sweepReport.when("trials", (trials) => {
  const head = document.querySelector("#trials thead tr");
  const body = document.querySelector("#trials tbody");
  const [words, state, count, more] = ["words", "state", "count", "more"].map((id) => document.getElementById(id));
  const asked = new URLSearchParams(location.hash.slice(1));
  // Chosen in a picture; null: all.
  const chosen = asked.has("ids") ? new Set(asked.get("ids").split(",")) : null;
  let sorted = { column: 0, down: false };
  let shown = FIRST;
  let matching = [];
  const stateColumn = trials.titles.indexOf("state");

  words.value = asked.get("words") || "";
  for (const name of [...new Set(trials.rows.map((row) => row[stateColumn]))].sort()) state.append(make("option", { value: name }, name));
  state.value = asked.get("state") || "";

  const titles = trials.titles.map((title, column) => {
    const cell = make("th", { scope: "col" }, make("button", { type: "button" }, title));
    if (!TEXT_COLUMNS.has(title)) cell.className = "number";
    cell.firstChild.addEventListener("click", () => {
      sorted = { column, down: sorted.column === column ? !sorted.down : !TEXT_COLUMNS.has(title) };
      show();
    });
    head.append(cell);
    return cell;
  });

  // The sorting value of a cell: a number where the column has numbers, else its text.
  function key(place, column) {
    if (column === 0) return Number(trials.rows[place][0]);
    const number = trials.keys[place][column - 2];
    if (column >= 2 && column < 2 + trials.keys[place].length) return number;
    if (trials.titles[column] === "GPUs") return Number(trials.rows[place][column].replaceAll(",", ""));
    return trials.rows[place][column];
  }

  function show() {
    const wanted = words.value.toLowerCase().split(/\s+/).filter(Boolean);
    const places = [...trials.rows.keys()].filter((place) => {
      const row = trials.rows[place];
      if (chosen && !chosen.has(row[0])) return false;
      if (state.value && row[stateColumn] !== state.value) return false;
      const text = row.join(" ").toLowerCase();
      return wanted.every((word) => text.includes(word));
    });
    const sign = sorted.down ? -1 : 1;
    places.sort((a, b) => {
      const [x, y] = [key(a, sorted.column), key(b, sorted.column)];
      // What has no number comes last in both directions.
      if (x === null || y === null) return (x === null) - (y === null);
      return x < y ? -sign : x > y ? sign : a - b;
    });
    matching = places;
    titles.forEach((cell, column) => {
      if (column === sorted.column) cell.setAttribute("aria-sort", sorted.down ? "descending" : "ascending");
      else cell.removeAttribute("aria-sort");
    });
    body.replaceChildren(...places.slice(0, shown).map((place) => make("tr", {}, ...trials.rows[place].map((text, column) => {
      const cell = make(column === 0 ? "th" : "td", column === 0 ? { scope: "row" } : {});
      if (!TEXT_COLUMNS.has(trials.titles[column])) cell.className = "number";
      cell.append(column === 0 ? make("a", { href: `trial.html#${text}` }, text) : text);
      return cell;
    }))));
    count.textContent = `${places.length.toLocaleString("en")} of ${trials.rows.length.toLocaleString("en")} trials`;
    more.hidden = places.length <= shown;
    more.textContent = `Show all ${places.length.toLocaleString("en")}`;
    const address = new URLSearchParams();
    if (chosen) address.set("ids", [...chosen].join(","));
    if (words.value) address.set("words", words.value);
    if (state.value) address.set("state", state.value);
    history.replaceState(null, "", `#${address}`);
  }

  words.addEventListener("input", show);
  state.addEventListener("change", show);
  more.addEventListener("click", () => { shown = Infinity; show(); });
  document.getElementById("csv").addEventListener("click", () => {
    const lines = [trials.titles, ...matching.map((place) => trials.rows[place])];
    const file = URL.createObjectURL(new Blob([lines.map((line) => line.map(csvCell).join(",") + "\n").join("")], { type: "text/csv" }));
    make("a", { href: file, download: "trials.csv" }).click();
    setTimeout(() => URL.revokeObjectURL(file), 60_000);
  });
  document.querySelector(".filter").addEventListener("submit", (event) => event.preventDefault());
  show();
});
