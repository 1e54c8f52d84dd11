// The page: images, detections and corrections.
"use strict";
import {Camera} from "./camera.js";
import {pack, sharedPlace} from "./corrections.js";
import {Editor} from "./editor.js";
import {text} from "./drawing.js";
import {showFilter, showTable, showThumbnails} from "./lists.js";

const at = id => document.getElementById(id);
const images = [], hidden = new Set();
const UNCHECKED = {boxes: null, edited: false, checked: false, asked: false};
let model = null, current = null, looking = false, lastLabel = null, saved = true;

const least = () => Number(at("least").value);
const shown = boxes => boxes.filter(box => !hidden.has(box.label) && (box.score === null || box.score >= least()));
// Corrected boxes are shown whatever their score: all that is exported is visible.
const visible = image => image.boxes ? image.boxes.filter(box => !hidden.has(box.label)) : shown(image.detections);
const exported = image => image.boxes ?? image.detections.filter(box => box.score >= least());

function say(sentence, wrong = false) {
  at("message").textContent = sentence;
  at("message").classList.toggle("wrong", wrong);
}

async function detect(blob) {
  const response = await fetch("detect", {method: "POST", body: blob});
  const answer = await response.json().catch(() => ({error: `the server answered ${response.status}`}));
  if (!response.ok) throw new Error([answer.error, answer.fix].filter(Boolean).join("; "));
  return answer;
}

const owner = {
  boxes: () => current ? visible(current) : [],
  size: () => current?.width ? current : null,
  updated: () => show(),
  // The image keeps the boxes above the least score, also those of hidden classes.
  change() {
    current.boxes = exported(current);
    current.edited = true;
    current.checked = true;
    current.asked = false;
    saved = false;
    say("");
  },
  fresh(sides) {
    const label = lastLabel ?? editor.selected?.label ?? current.boxes[0]?.label ?? model.classes[0].id;
    hidden.delete(label);
    const box = {label, name: nameOf(label), score: null, box: sides};
    current.boxes.unshift(box);
    return box;
  },
  remove(box) {
    current.boxes.splice(current.boxes.indexOf(box), 1);
  },
  relabel(box, label) {
    owner.change();
    lastLabel = label;
    Object.assign(box, {label, name: nameOf(label), score: null});
    show();
  },
};
const nameOf = label => model.classes.find(item => item.id === label).name;
const editor = new Editor(at("stage"), at("boxes"), owner);
const camera = new Camera(at("video"), at("live-boxes"), detect, shown);

function choose(image) {
  current = image;
  editor.selected = null;
  editor.setDrawing(false);
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
  saved ||= !images.some(image => image.checked);
  choose(images[Math.min(place, images.length - 1)] ?? null);
  (images.length ? at("discard") : at("file")).focus();
}

function show() {
  at("shown").value = least().toFixed(2);
  at("images").hidden = images.length < 2;
  showThumbnails(at("images"), images, current, image => visible(image).length, choose);
  at("work").hidden = !images.length;
  at("share").hidden = !images.length;
  if (!current) return;
  at("name").textContent = current.file.name;
  for (const id of ["before", "after"]) at(id).disabled = images.length < 2;
  if (current.width) at("stage").style.setProperty("--ratio", current.width / current.height);
  editor.show();
  const ready = current.state === "ready", boxes = ready ? visible(current) : [];
  if (!ready) at("boxes").replaceChildren();
  showTable(at("found"), boxes, model.classes, editor, owner);
  showFilter(at("filter"), images, model.classes, hidden, show);
  at("classes").hidden = !at("filter").children.length;
  at("count").textContent = summary(current, boxes.length);
  at("count").classList.toggle("wrong", current.state === "failed");
  for (const id of ["draw", "right", "copy"]) at(id).disabled = !ready;
  at("draw").setAttribute("aria-pressed", String(editor.drawing));
  at("remove").disabled = !editor.selected;
  at("right").setAttribute("aria-pressed", String(current.checked));
  at("reset").disabled = !current.boxes;
  gather();
}

function summary(image, count) {
  if (image.state === "failed") return `failed: ${image.error}`;
  if (image.state !== "ready") return "looking …";
  if (image.boxes) return `${count} corrected box${count === 1 ? "" : "es"}; the least score no longer applies`;
  const below = image.detections.filter(box => box.score < least()).length;
  return `${count} found, ${below} below the least score`;
}

function gather() {
  const right = images.filter(image => image.checked).length;
  at("export").disabled = !right;
  at("export").textContent = right ? `Download corrections (${right})` : "Download corrections";
  at("gathered").textContent = right
    ? `${right} of ${images.length} images are checked and can be downloaded with their boxes as a COCO set.`
    : "Correct the boxes of an image, or mark all as right: you can download checked images as a COCO set.";
}

async function add(files) {
  const chosen = [...files];
  for (const file of chosen)
    images.push({file, url: URL.createObjectURL(file), state: "waiting", detections: [], width: 0, height: 0, ...UNCHECKED});
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
  const place = images.indexOf(image) + 1;
  say(images.length > 1 ? `looking at image ${place} of ${images.length} …` : "looking …");
  try {
    const answer = await detect(image.file);
    Object.assign(image, {state: "ready", answer, width: answer.width, height: answer.height});
    image.detections = structuredClone(answer.detections);
  } catch (error) {
    Object.assign(image, {state: "failed", error: error.message});
  }
  show();
}

async function copy() {
  const boxes = visible(current).map(({label, name, score, box}) => ({label, name, score, box}));
  const text = JSON.stringify({model: current.answer.model, image: current.file.name, width: current.width,
    height: current.height, least_score: least(), corrected: Boolean(current.boxes), detections: boxes}, null, 2);
  try {
    await navigator.clipboard.writeText(text);
    say("copied");
  } catch {  // Over plain http, or refused: show it, to copy by hand.
    Object.assign(at("json"), {value: text, hidden: false}).select();
    say("The browser does not allow copying: the text is selected below the boxes.");
  }
}

// Returns whether an image may be exported: asks about boxes of different classes in the same place.
function settled(image) {
  const boxes = image.asked ? [] : sharedPlace(exported(image));
  if (!boxes.length) return true;
  if (image !== current) choose(image);
  const names = boxes.map(text).join(", ");
  image.asked = confirm(`These boxes of different classes are in the same place: ${names}.\n\nKeep all of them? ` +
                        "Cancel to keep one: delete the others, or change their class.");
  if (image.asked) return true;
  for (const box of boxes) hidden.delete(box.label);
  editor.select(boxes[0]);
  say(`${image.file.name}: several classes in the same place: ${names}`, true);
  return false;
}

async function download() {
  const right = images.filter(image => image.checked);
  if (!right.every(settled)) return;
  try {
    const file = await pack(model, right.map(image => ({...image, boxes: exported(image)})));
    const link = document.createElement("a");
    Object.assign(link, {href: URL.createObjectURL(file), download: file.name}).click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
    saved = true;
    at("next").hidden = false;
    at("commands").textContent = `kubedet data merge SET ${file.name} -o more/${model.name}\n` +
      `kubedet run --source coco:more/${model.name} --recipe small`;
    say(`downloaded: ${file.name}`);
  } catch (error) {
    say(`the download failed: ${error.message}`, true);
  }
}

function draw() {
  if (!current || current.state !== "ready") return;
  editor.setDrawing(!editor.drawing);
  show();
  say(editor.drawing ? "Drag over the picture to draw a box; Enter adds one in the middle." : "");
}

async function start() {
  const sentence = await camera.start(at("pace"));
  at("live").hidden = Boolean(sentence);
  say(sentence, true);
}

const TYPING = "input:not([type=range]):not([type=checkbox]), select, textarea";
document.addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest(TYPING)) return;
  if (event.key === "Escape" && editor.drawing) draw();
  else if (event.key === "Enter" && editor.drawing && !event.target.closest("button, summary, label")) editor.add();
  else if (event.key === "n" || event.key === "N") draw();
  else if (event.key === ",") step(-1);
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
window.addEventListener("beforeunload", event => { if (!saved) event.preventDefault(); });

at("least").addEventListener("input", show);
at("file").addEventListener("change", event => {
  add(event.target.files);
  event.target.value = "";  // The same file may be chosen again.
});
at("picture").addEventListener("error", () => {  // Browsers do not show TIFF.
  at("picture").hidden = true;
  at("stage").classList.add("bare");
});
at("picture").addEventListener("load", () => editor.show());
at("before").addEventListener("click", () => step(-1));
at("after").addEventListener("click", () => step(1));
// Pressed by a key, the button adds a box at once.
at("draw").addEventListener("click", event => event.detail ? draw() : editor.add());
at("remove").addEventListener("click", () => editor.removeSelected());
at("right").addEventListener("click", () => {
  if (!settled(current)) return;
  current.checked = current.edited || !current.checked;
  current.boxes = current.checked ? exported(current) : null;
  saved = saved && !current.checked;
  show();
});
at("reset").addEventListener("click", () => {
  Object.assign(current, UNCHECKED, {detections: structuredClone(current.answer.detections)});
  show();
});
at("discard").addEventListener("click", discard);
at("copy").addEventListener("click", copy);
at("export").addEventListener("click", download);
at("camera").addEventListener("click", start);
at("stop").addEventListener("click", () => { camera.stop(); at("live").hidden = true; });
at("snap").addEventListener("click", async () => add([await camera.keep()]));

try {
  model = await (await fetch("model.json")).json();
  at("title").textContent = `Try ${model.name}`;
  at("about").textContent = `version ${model.version}, ${model.classes.length} classes, in the format ${model.format}`;
  document.title = `${model.name}: kubedet`;
} catch (error) {
  say(`the server does not answer: ${error.message}`, true);
}
