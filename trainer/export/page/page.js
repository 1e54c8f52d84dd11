// The page: images that were dropped, with the boxes that the model found in them.
"use strict";

const NS = "http://www.w3.org/2000/svg";
const COLORS = 8;
const at = id => document.getElementById(id);
const images = [];
let model = null;

function make(name, properties = {}, ...children) {
  const node = Object.assign(document.createElement(name), properties);
  node.append(...children);
  return node;
}

function shape(name, attributes, text = "") {
  const node = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.textContent = text;
  return node;
}

function say(sentence, wrong = false) {
  at("message").textContent = sentence;
  at("message").classList.toggle("wrong", wrong);
}

async function detect(file) {
  const response = await fetch("detect", {method: "POST", body: file});
  const answer = await response.json().catch(() => ({error: `the server answered ${response.status}`}));
  if (!response.ok) throw new Error([answer.error, answer.fix].filter(Boolean).join("; "));
  return answer;
}

// Draws the boxes of an image in its pixels, the best on top, and lists them below it.
function show({answer, svg, list}) {
  const least = Number(at("least").value), unit = Math.max(answer.width, answer.height) / 400;
  const found = answer.detections.filter(box => box.score >= least);
  svg.setAttribute("viewBox", `0 0 ${answer.width} ${answer.height}`);
  svg.replaceChildren(...[...found].reverse().map(({label, name, score, box: [x1, y1, x2, y2]}) => {
    const group = shape("g", {class: `box k${label % COLORS}`});
    group.append(
      shape("rect", {x: x1, y: y1, width: x2 - x1, height: y2 - y1, "stroke-width": 2 * unit}),
      shape("text", {x: x1 + 2 * unit, y: Math.max(y1 - 3 * unit, 12 * unit), "font-size": 12 * unit},
        `${name} ${score.toFixed(2)}`));
    return group;
  }));
  list.replaceChildren(...found.map(({name, score, box}) =>
    make("li", {}, `${name} ${score.toFixed(2)}: ${box.map(side => side.toFixed(0)).join(", ")}`)));
}

async function add(files) {
  const failed = [];
  for (const file of files) {
    say(`looking at ${file.name} …`);
    try {
      const answer = await detect(file);
      const picture = make("img", {src: URL.createObjectURL(file), alt: `The image ${file.name}`});
      const image = {answer, svg: shape("svg", {"aria-hidden": "true"}), list: make("ol")};
      at("images").prepend(make("figure", {}, make("div", {className: "stage"}, picture, image.svg),
        make("figcaption", {}, file.name, image.list)));
      images.push(image);
      show(image);
    } catch (error) {
      failed.push(`${file.name}: ${error.message}`);
    }
  }
  say(`${model.name} ${model.version} looked at ${images.length} image${images.length === 1 ? "" : "s"}` +
    failed.map(line => `; ${line}`).join(""), failed.length > 0);
}

for (const name of ["dragover", "dragleave", "drop"])
  document.addEventListener(name, event => {
    event.preventDefault();
    at("drop").classList.toggle("over", name === "dragover");
    if (name === "drop" && model) add(event.dataTransfer.files);
  });
document.addEventListener("paste", event => model && add(event.clipboardData.files));
at("file").addEventListener("change", event => add(event.target.files));
at("least").addEventListener("input", () => {
  at("score").textContent = Number(at("least").value).toFixed(2);
  images.forEach(show);
});

try {
  model = await (await fetch("model.json")).json();
  at("title").textContent = `Try ${model.name}`;
  at("about").textContent = `version ${model.version}, ${model.classes.length} classes, in the format ${model.format}`;
  document.title = `${model.name}: kubedet`;
} catch (error) {
  say(`the server does not answer: ${error.message}`, true);
}
