// The page: images and their detections.
"use strict";
import {color, draw} from "./drawing.js";

const at = id => document.getElementById(id);
const images = [], hidden = new Set();
let model = null, current = null, looking = false;

const least = () => Number(at("least").value);
const shown = boxes => boxes.filter(box => !hidden.has(box.label) && box.score >= least());

function say(sentence, wrong = false) {
  at("message").textContent = sentence;
  at("message").classList.toggle("wrong", wrong);
}

function make(name, properties = {}, ...children) {
  const node = Object.assign(document.createElement(name), properties);
  node.append(...children);
  return node;
}

async function detect(blob) {
  const response = await fetch("detect", {method: "POST", body: blob});
  const answer = await response.json().catch(() => ({error: `the server answered ${response.status}`}));
  if (!response.ok) throw new Error([answer.error, answer.fix].filter(Boolean).join("; "));
  return answer;
}

function choose(image) {
  current = image;
  at("json").hidden = true;
  if (image) {
    at("stage").classList.remove("bare");
    Object.assign(at("picture"), {hidden: false, src: image.url, alt: `The image ${image.file.name}`});
  }
  show();
}

function step(by) {
  if (images.length) choose(images[(images.indexOf(current) + by + images.length) % images.length]);
}

function discard() {
  const place = images.indexOf(current);
  URL.revokeObjectURL(current.url);
  images.splice(place, 1);
  at("images").children[place].remove();
  choose(images[Math.min(place, images.length - 1)] ?? null);
  (images.length ? at("discard") : at("file")).focus();
}

function show() {
  at("shown").value = least().toFixed(2);
  at("images").hidden = images.length < 2;
  showThumbnails();
  at("work").hidden = !images.length;
  if (!current) return;
  at("name").textContent = current.file.name;
  for (const id of ["before", "after"]) at(id).disabled = images.length < 2;
  const boxes = shown(current.detections);
  if (current.width) {
    at("stage").style.setProperty("--ratio", current.width / current.height);
    draw(at("boxes"), current, boxes);
  } else {
    at("boxes").replaceChildren();
  }
  at("found").hidden = !boxes.length;
  at("found").tBodies[0].replaceChildren(...boxes.map(box => make("tr", {},
    make("td", {}, make("span", {className: `swatch ${color(box.label)}`}), " ", box.name),
    make("td", {}, box.score.toFixed(3)),
    make("td", {className: "sides"}, box.box.map(side => side.toFixed(0)).join(", ")))));
  showFilter();
  at("classes").hidden = !at("filter").children.length;
  const below = current.detections.filter(box => box.score < least()).length;
  at("count").textContent = current.state === "failed" ? `failed: ${current.error}`
    : current.state !== "ready" ? "looking …" : `${boxes.length} found, ${below} below the minimum score`;
  at("count").classList.toggle("wrong", current.state === "failed");
  at("copy").disabled = current.state !== "ready";
}

// Shows a button for each image. Buttons stay as long as their images, so focus and picture stay too.
function showThumbnails() {
  for (const image of images.slice(at("images").children.length)) {
    const button = make("button", {type: "button"}, make("img", {src: image.url, alt: ""}), make("span"), make("span"));
    button.addEventListener("click", () => choose(image));
    at("images").append(make("li", {}, button));
  }
  images.forEach((image, place) => {
    const button = at("images").children[place].firstChild, [, name, note] = button.children;
    name.textContent = image.file.name;
    note.textContent = image.state === "failed" ? "failed" : image.state !== "ready" ? "…"
      : `${shown(image.detections).length} found`;
    note.className = image.state === "failed" ? "wrong" : "";
    button.setAttribute("aria-current", String(image === current));
  });
}

// Shows a checkbox for each class found in an image; boxes of classes in `hidden` are not shown.
function showFilter() {
  const labels = new Set(images.flatMap(image => image.detections.map(box => box.label)));
  const present = model.classes.filter(item => labels.has(item.id)), key = present.map(item => item.id).join();
  if (at("filter").dataset.key === key) return;
  at("filter").dataset.key = key;
  at("filter").replaceChildren(...present.map(item => {
    const tick = make("input", {type: "checkbox", checked: !hidden.has(item.id)});
    tick.addEventListener("change", () => {
      if (tick.checked) hidden.delete(item.id); else hidden.add(item.id);
      show();
    });
    return make("label", {}, tick, make("span", {className: `swatch ${color(item.id)}`}), item.name);
  }));
}

async function add(files) {
  const chosen = [...files];
  for (const file of chosen)
    images.push({file, url: URL.createObjectURL(file), state: "waiting", detections: [], width: 0, height: 0});
  if (!chosen.length) return;
  choose(images[images.length - chosen.length]);
  if (looking) return;
  looking = true;
  for (let image; (image = images.find(one => one.state === "waiting"));) await look(image);
  looking = false;
  const failed = images.filter(image => image.state === "failed");
  say(`${model.name} ${model.version} looked at ${images.length - failed.length} of ${images.length} ` +
      `image${images.length === 1 ? "" : "s"}${failed.length ? `; ${failed.at(-1).file.name}: ${failed.at(-1).error}` : ""}`,
      failed.length > 0);
}

async function look(image) {
  image.state = "looking";
  say(images.length > 1 ? `looking at image ${images.indexOf(image) + 1} of ${images.length} …` : "looking …");
  try {
    const {model: title, width, height, detections} = await detect(image.file);
    Object.assign(image, {state: "ready", title, width, height, detections});
  } catch (error) {
    Object.assign(image, {state: "failed", error: error.message});
  }
  show();
}

async function copy() {
  const text = JSON.stringify({model: current.title, image: current.file.name, width: current.width,
    height: current.height, least_score: least(), detections: shown(current.detections)}, null, 2);
  try {
    await navigator.clipboard.writeText(text);
    say("copied");
  } catch {  // Over plain http, or refused: show it, to copy by hand.
    Object.assign(at("json"), {value: text, hidden: false}).select();
    say("The browser does not allow copying: the text is selected below the boxes.");
  }
}

document.addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("textarea")) return;
  if (event.key === ",") step(-1);
  else if (event.key === ".") step(1);
  else return;
  event.preventDefault();
});
for (const name of ["dragover", "dragleave", "drop"])
  document.addEventListener(name, event => {
    event.preventDefault();
    at("drop").classList.toggle("over", name === "dragover");
    if (name === "drop" && model) add(event.dataTransfer.files);
  });
document.addEventListener("paste", event => model && add(event.clipboardData.files));

at("least").addEventListener("input", show);
at("file").addEventListener("change", event => {
  add(event.target.files);
  event.target.value = "";  // The same file may be chosen again.
});
at("picture").addEventListener("error", () => {  // Browsers do not show TIFF.
  at("picture").hidden = true;
  at("stage").classList.add("bare");
});
at("picture").addEventListener("load", show);
new ResizeObserver(show).observe(at("stage"));
at("before").addEventListener("click", () => step(-1));
at("after").addEventListener("click", () => step(1));
at("discard").addEventListener("click", discard);
at("copy").addEventListener("click", copy);

try {
  model = await (await fetch("model.json")).json();
  at("title").textContent = `Try ${model.name}`;
  at("about").textContent = `version ${model.version}, ${model.classes.length} classes, in the format ${model.format}`;
  document.title = `${model.name}: kubedet`;
} catch (error) {
  say(`the server does not answer: ${error.message}`, true);
}
