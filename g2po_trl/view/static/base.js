"use strict";
// The page of a run, an evaluation, or two of them. Data come as text, when they are looked at, and are shown as text.

const $ = (id) => document.getElementById(id);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const signed = (x, digits = 2) => {
  const rounded = Number(x.toFixed(digits));
  return (rounded > 0 ? "+" : rounded < 0 ? "−" : "") + Math.abs(rounded).toFixed(digits);
};
const mean = (values) => (values.length ? values.reduce((sum, x) => sum + x, 0) / values.length : NaN);
const percent = (x) => (Number.isFinite(x) ? (100 * x).toFixed(1) : "–");
const dark = () => document.documentElement.dataset.theme === "dark";
const ENDS = { success: "solved", failure: "failed", truncated: "out of turns", lost: "lost with its worker" };
const UNCOUNTED = ["error", "lost"];
const oneLine = (text, longest = 120) => {
  const line = text.replace(/\s+/g, " ").trim();
  return line.length > longest ? `${line.slice(0, longest - 1)}…` : line;
};
// Of a task: its goal in words, or its row, or its id.
function inWords(row) {
  try {
    return Object.entries(JSON.parse(row)).map(([name, value]) => `${name} ${typeof value === "string" ? value : JSON.stringify(value)}`).join(", ");
  } catch { return row; }  // a secret was masked in it
}
const taskName = (task, row = null) => task.task || (row ? oneLine(inWords(row)) : `Task ${task.id}`);

function make(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "onclick") made.addEventListener("click", value);
    else if (value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

function drawn(tag, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

const unseen = (text) => make("span", { class: "unseen" }, text);  // for screen readers

// A text that is opened by a click; null for none.
const folded = (title, text) => (text === null || text === undefined ? null
  : make("details", {}, make("summary", {}, title), make("pre", {}, text)));

// What is wrong with a step's completion or its action, as text and as a tag.
const faultOf = (step) => (step.ok ? (step.in === false ? "not admissible" : "") : "invalid completion");
const faults = (step) => (faultOf(step) ? [" ", make("span", { class: "tag fault" }, faultOf(step))] : []);

// The completion; where the run recorded the probabilities of its tokens, unlikely ones are shaded.
function completionOf(step, texts) {
  if (!step.t) return folded("completion", texts[step.r]);
  const shaded = step.t.map((token, i) => make("span", { title: `probability ${Math.exp(step.lp[i]).toPrecision(2)}`,
    style: `background:color-mix(in srgb, var(--up) ${Math.round(Math.min(1, -step.lp[i] / 4) * 70)}%, transparent)` }, token));
  return make("details", { class: "tokens" }, make("summary", {}, "completion, unlikely tokens shaded"), make("pre", {}, ...shaded));
}

// -- conversations ----------------------------------------------------------------------------------------------------

const nonempty = (text) => (text === "" ? "(nothing)" : text);

// Images, and texts that say why one is not shown.
const pictures = ({ img = [] }, texts) => img.map((n) => (texts[n].startsWith("data:image/")
  ? make("img", { class: "seen", src: texts[n], alt: "what was seen" }) : make("p", { class: "note" }, texts[n])));

function messageCard({ role, name, c, calls, img }, texts) {
  const called = calls.map(([function_, given]) => make("div", { class: "call" }, make("b", {}, function_),
    texts[given] === "{}" ? null : make("pre", {}, texts[given])));
  return make("div", { class: `message ${role}` }, make("div", { class: "role" }, name ? `${role} ${name}` : role),
    ...pictures({ img }, texts),
    texts[c] === "" && (called.length || img) ? null : make("pre", {}, nonempty(texts[c])), ...called);
}

// What a step or a state was asked: its messages, those that the model had read before folded; or its observation.
function asked(one, texts) {
  if (!one.m) return [...pictures(one, texts), one.img && texts[one.o] === "" ? null : observed(texts[one.o])].filter(Boolean);
  const cards = one.m.map((message) => messageCard(message, texts));
  if (!cards.length) return [make("p", { class: "note" }, "no new message")];
  return [one.old ? make("details", {}, make("summary", {}, `${one.old} earlier message${one.old === 1 ? "" : "s"}, rendered again`),
    ...cards.slice(0, one.old)) : null, ...cards.slice(one.old)].filter(Boolean);
}

// What a step did: the assistant's message, or the action.
const answered = (step, texts) => (step.said ? messageCard(step.said, texts)
  : make("div", { class: "act" }, `→ ${step.a}`));

// The action in full, to be compared.
const deed = (step, texts) => (step.said
  ? JSON.stringify([texts[step.said.c], step.said.calls.map(([name, given]) => [name, texts[given]])]) : step.a);

// What went wrong in an episode, and what is known of its agent.
function troubles({ error, facts }, texts) {
  const notes = [
    facts.agent_error ? `The agent's own error, after its last turn: ${facts.agent_error}` : null,
    facts.program ? `The program ended with ${facts.program}.` : null,
    facts.out_of_turns ? "It called the model, or a tool, after its last turn." : null,
    facts.refused_requests ? `Refused requests, which are no steps: ${facts.refused_requests}.` : null,
    facts.ignored_fields ? `Fields of its requests that have no effect: ${facts.ignored_fields.join(", ")}.` : null,
  ].filter(Boolean);
  return [error ? make("pre", { class: "error" }, error) : null, folded("traceback", facts.traceback),
    ...notes.map((note) => make("p", { class: "note fact" }, note)),
    ...["diff", "verify"].map((name) => (facts[name] === undefined ? null : folded(name, texts[facts[name]]))),
    facts.other === undefined ? null : folded("info", texts[facts.other])].filter(Boolean);
}

// -- data -------------------------------------------------------------------------------------------------------------

async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

async function ask(path) {
  const answer = await fetch(path).catch(() => { throw Object.assign(new Error("the server does not answer"), { offline: true }); });
  if (!answer.ok) throw new Error(`${path}: ${await answer.text()}`);
  return answer.json();
}

// Data of a large run are files beside the page: each calls this.
const arrived = new Map();
function piece(name, packed) { arrived.get(name)(packed); }
function fromFile(name) {
  const script = make("script", { src: `${encodeURIComponent(files.folder)}/${name}` });
  return new Promise((resolve, reject) => {
    arrived.set(name, resolve);
    script.addEventListener("error", () => reject(new Error(`${files.folder}/${name} was not found next to this page`)));
    document.head.append(script);
  }).finally(() => { arrived.delete(name); script.remove(); });
}

const KEPT = 6;
const kept = new Map();
// "iteration" by number, "set" by id, "index" of a run by its place: out of the page, beside it, or from its server.
async function load(kind, name) {
  const id = `${kind}-${name}`;
  if (!kept.has(id)) {
    const here = $(id), file = files && files.of[id];
    const packed = here ? here.textContent : file ? await fromFile(file) : null;
    const data = packed ? await unpack(packed) : await ask(encodeURIComponent(id));
    if (kept.size >= KEPT) kept.delete(kept.keys().next().value);
    kept.set(id, data);
  }
  return kept.get(id);
}

let page, run, files;  // everything, the training run in it, if there is one, and where its data are
