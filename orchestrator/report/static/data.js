// Receives the data of the page from the scripts beside it, and inflates what is compressed.
"use strict";

const sweepReport = {
  values: {},
  waiting: {},

  take(name, value) {
    this.values[name] = value;
    for (const use of this.waiting[name] || []) use(value);
    delete this.waiting[name];
  },

  takeCompressed(name, text) {
    inflate(text).then((value) => this.take(name, value), () => {
      document.body.insertAdjacentText("afterbegin", "This browser is too old to read the report: it cannot inflate data.");
    });
  },

  // Calls `use` with a value, now or once its script is there.
  when(name, use) {
    if (name in this.values) use(this.values[name]);
    else (this.waiting[name] ||= []).push(use);
  },

  // Loads the script of a value, unless it is there.
  load(name) {
    if (!(name in this.values)) addScript(`data/${name}.js`);
  },
};

function addScript(address, then = () => {}) {
  const script = document.createElement("script");
  script.src = address;
  script.addEventListener("load", then);
  document.head.append(script);
}

async function inflate(text) {
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

// An element with attributes and children. Text becomes text, never markup.
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}
