// The live page. It talks to the server it came from and to nobody else; every text goes in as text, never as markup.
"use strict";

const REST = 600; // milliseconds without a move before memory is measured: that takes a process of its own
const at = (id) => document.getElementById(id);

let about = null;
let picture = null; // the bytes that are shown and uploaded
let choices = 0; // a picture that comes later than a newer choice is dropped
let asked = 0; // answers to all but the newest question are dropped
let policyNow = null; // what the policy chose last: it needs to know, so that the width does not flap
let policyAsked = 0;
let moving = 0;
let resting = 0;
const tried = new Map(); // with this picture
const sizes = new Map(); // with any

// Talking to the server

async function ask(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch {
    throw new Error("The server does not answer; is anybit serve still running?");
  }
  let answer;
  try {
    answer = await response.json();
  } catch {
    throw new Error(`The server said something unexpected (status ${response.status}).`);
  }
  if (!response.ok) {
    throw new Error(answer.error);
  }
  return answer;
}

function complain(error) {
  at("error").textContent = error.message;
  at("error").hidden = false;
}

function allIsWell() {
  at("error").hidden = true;
}

// Words for numbers

const bytes = (n) => (n < 1e6 ? `${(n / 1e3).toFixed(1)} kB` : `${(n / 1e6).toFixed(2)} MB`);
const percent = (x) => `${(100 * x).toFixed(1)} %`;
const milliseconds = (x) => `${x < 10 ? x.toFixed(3) : x.toFixed(1)} ms`;
const widthSaid = (width) => (width === 32 ? "floating point" : `${width} bits`);
const width = (id) => about.widths[Number(at(id).value)];
const query = (fields) => `?${new URLSearchParams(fields)}`;
const widths = () => ({ weights: width("weights"), activations: width("activations") });

// The widths

function sayWidths() {
  for (const id of ["weights", "activations"]) {
    const said = widthSaid(width(id));
    at(`${id}-said`).textContent = said;
    at(id).setAttribute("aria-valuetext", said);
  }
}

function setWidths(pair) {
  at("weights").value = about.widths.indexOf(pair.weights);
  at("activations").value = about.widths.indexOf(pair.activations);
  sayWidths();
  soon();
}

function soon() {
  asked += 1; // an answer on its way is for widths that the sliders have left
  clearTimeout(moving);
  moving = setTimeout(show, 80);
}

async function show() {
  const mine = ++asked;
  const pair = widths();
  clearTimeout(resting);
  if (sizes.has(named(pair))) {
    showSizes(named(pair));
  } else {
    waiting("memory");
    waiting("size");
    resting = setTimeout(() => measure(mine, pair), REST);
  }
  if (picture === null) {
    at("bits").textContent = named(pair);
    sayAccuracy(named(pair));
    return;
  }
  waiting("answer");
  waiting("latency");
  try {
    const found = await ask(`predict${query(pair)}`, { method: "POST", body: picture });
    if (mine === asked) {
      allIsWell();
      showPrediction(found);
    }
  } catch (error) {
    if (mine === asked) {
      complain(error);
      forget();
    }
  }
}

async function measure(mine, pair) {
  try {
    const found = await ask(`footprint${query(pair)}`);
    sizes.set(found.bits, { memory: bytes(found.resident_bytes), file: bytes(found.file_bytes) });
    if (mine === asked) {
      showSizes(found.bits);
      note(found.bits, {});
    }
  } catch {
    if (mine === asked) {
      fill("memory", "not measured");
      fill("size", "not measured");
    }
  }
}

function showSizes(bits) {
  fill("memory", sizes.get(bits).memory);
  fill("size", sizes.get(bits).file);
}

const named = (pair) => (pair.weights === 32 && pair.activations === 32 ? "FP" : `W${pair.weights}A${pair.activations}`);

function waiting(id) {
  at(id).classList.add("waiting");
  at(id).dataset.bits = "";
}

function fill(id, text) {
  at(id).textContent = text;
  at(id).classList.remove("waiting");
  at(id).dataset.bits = named(widths());
}

function sayAccuracy(bits) {
  const known = Object.hasOwn(about.measured, bits);
  at("accuracy").textContent = known ? percent(about.measured[bits]) : "not in the file";
}

function showPrediction(found) {
  const best = found.guesses[0];
  at("bits").textContent = found.bits;
  if (found.seen !== null) {
    at("seen").src = `data:image/png;base64,${found.seen}`;
    at("seen").parentElement.hidden = false;
    at("seen-said").textContent = `as the network sees it: ${found.size[1]} x ${found.size[0]} pixels`;
  }
  fill("answer", best ? `${best.label}, ${percent(best.confidence)}` : found.outputs.join("; "));
  fill("latency", milliseconds(found.milliseconds));
  at("latency").title = `median of ${found.runs} runs`;
  sayAccuracy(found.bits);
  const rows = found.guesses.map((guess) => {
    const bar = document.createElement("meter");
    bar.value = guess.confidence;
    bar.setAttribute("aria-hidden", "true"); // the number beside it says the same
    return row([guess.label, bar, percent(guess.confidence)]);
  });
  at("guesses").tBodies[0].replaceChildren(...rows);
  at("guesses").hidden = rows.length === 0;
  note(found.bits, { guess: at("answer").textContent, latency: at("latency").textContent });
}

function forget() {
  at("bits").textContent = named(widths());
  fill("answer", "No prediction.");
  fill("latency", "–");
  at("guesses").hidden = true;
}

function row(cells) {
  const made = document.createElement("tr");
  for (const cell of cells) {
    made.insertCell().append(cell);
  }
  return made;
}

function note(bits, news) {
  if (!tried.has(bits) && !Object.hasOwn(news, "guess")) {
    return; // nothing was predicted at this width
  }
  tried.set(bits, { ...tried.get(bits), memory: "", file: "", ...sizes.get(bits), ...news });
  const rows = [...tried].map(([name, t]) => row([name, t.guess, t.latency, t.memory, t.file]));
  at("tried").querySelector("tbody").replaceChildren(...rows);
  at("tried").hidden = false;
}

// The picture

function take(blob, name) {
  if (blob.size > about.limit) {
    complain(new Error(`A file of up to ${about.limit / 1e6} MB is expected; ${name} has ${bytes(blob.size)}.`));
    return;
  }
  picture = blob;
  tried.clear();
  at("tried").hidden = true;
  at("chosen").textContent = name;
  const old = at("preview").src;
  at("preview").src = URL.createObjectURL(blob);
  at("preview").hidden = false;
  at("pictures").hidden = false;
  at("seen").parentElement.hidden = true; // until the network has got it
  at("preview").alt = name;
  if (old) {
    URL.revokeObjectURL(old);
  }
  show();
}

function press(button) {
  for (const other of at("examples").children) {
    other.setAttribute("aria-pressed", String(other === button));
  }
}

async function takeExample(index, button) {
  const mine = ++choices;
  try {
    const response = await fetch(`examples/${index}`);
    if (!response.ok) {
      throw new Error();
    }
    const blob = await response.blob();
    if (mine === choices) {
      press(button);
      take(blob, about.examples[index]);
    }
  } catch {
    complain(new Error("The server does not answer; is anybit serve still running?"));
  }
}

function takeFirst(files) {
  if (files.length > 0) {
    choices += 1;
    press(null);
    take(files[0], files[0].name);
  }
}

function offerExamples() {
  about.examples.forEach((name, index) => {
    const button = document.createElement("button");
    const image = document.createElement("img");
    button.type = "button";
    button.title = name;
    button.setAttribute("aria-pressed", "false");
    image.src = `examples/${index}`;
    image.alt = name;
    button.append(/\.np[yz]$/i.test(name) ? name : image);
    button.addEventListener("click", () => takeExample(index, button));
    at("examples").append(button);
  });
}

function listenForPictures() {
  at("file").accept = about.types.join(",");
  at("file").addEventListener("change", () => takeFirst(at("file").files));
  at("preview").addEventListener("error", () => {
    at("preview").hidden = true;
  });
  for (const kind of ["dragover", "drop"]) {
    document.addEventListener(kind, (event) => event.preventDefault()); // a miss must not replace the page
  }
  document.addEventListener("dragover", () => at("drop").classList.add("over"));
  document.addEventListener("dragleave", () => at("drop").classList.remove("over"));
  document.addEventListener("drop", (event) => {
    at("drop").classList.remove("over");
    takeFirst(event.dataTransfer.files);
  });
  document.addEventListener("paste", (event) => takeFirst(event.clipboardData.files));
}

// The policy

async function askPolicy() {
  const mine = ++policyAsked;
  const charge = at("battery").value;
  const mains = at("mains").checked;
  at("battery-said").textContent = `${charge} %`;
  const fields = { percent: charge, mains: mains ? 1 : 0 };
  if (policyNow !== null) {
    fields.now = policyNow;
  }
  try {
    const found = await ask(`policy${query(fields)}`);
    if (mine !== policyAsked) {
      return;
    }
    policyNow = found.bits;
    at("policy").textContent = found.bits;
    at("policy").dataset.seen = `${charge} ${mains}`;
    if (at("follow").checked) {
      setWidths(found);
    }
  } catch (error) {
    complain(error);
  }
}

function sayPolicy() {
  const steps = about.steps.map((step) => `below ${step.percent} %: ${step.bits}`);
  at("steps").textContent =
    `${steps.join("; ")}; otherwise and on mains: FP. ` +
    `A wider width comes back only ${about.margin} points above a border.`;
  const machine = about.machine;
  if (machine === null) {
    at("machine").textContent = "What this machine's battery says is not known: psutil is not installed.";
    return;
  }
  const charge = machine.percent === null ? "no battery" : `${Math.round(machine.percent)} % charged`;
  at("machine").textContent = `This machine: ${charge}, ${machine.on_mains ? "on mains" : "not on mains"}.`;
  at("battery").value = machine.percent === null ? 100 : Math.round(machine.percent);
  at("mains").checked = machine.on_mains;
}

// The start

async function start() {
  try {
    about = await ask("about");
  } catch (error) {
    complain(error);
    return;
  }
  document.title = `${about.name} – anybit`;
  at("name").textContent = about.name;
  const classes = about.classes > 0 ? `, ${about.classes} classes` : "";
  at("facts").textContent = `${about.takes}${classes}; runs on this machine, at the width below.`;
  if (!about.pictures) {
    at("picture-title").textContent = "Input";
    at("hint").textContent = "Drop an .npy or .npz file here, or choose one";
    at("answer").textContent = "No input yet.";
    at("tried-title").textContent = "Widths tried with this input";
  }
  for (const id of ["weights", "activations"]) {
    at(id).max = about.widths.length - 1;
    at(id).value = about.widths.indexOf(8);
    at(id).addEventListener("input", () => {
      at("follow").checked = false;
      sayWidths();
      soon();
    });
  }
  for (const id of ["battery", "mains", "follow"]) {
    at(id).addEventListener("input", askPolicy);
  }
  sayWidths();
  sayPolicy();
  askPolicy();
  listenForPictures();
  offerExamples();
  const first = at("examples").firstChild;
  if (first) {
    takeExample(0, first);
  } else {
    show();
  }
}

start();
