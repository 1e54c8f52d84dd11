// Sends dropped images to the server, and shows them with the detected boxes.
"use strict";

const NS = "http://www.w3.org/2000/svg";
const COLORS = 8;
const byId = id => document.getElementById(id);
const images = [];
let model = null;

function element(name, properties = {}, ...children) {
  const node = Object.assign(document.createElement(name), properties);
  node.append(...children);
  return node;
}

function svgElement(name, attributes, text = "") {
  const node = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.textContent = text;
  return node;
}

function showMessage(text, isError = false) {
  byId("message").textContent = text;
  byId("message").classList.toggle("wrong", isError);
}

async function detect(file) {
  const response = await fetch("detect", {method: "POST", body: file});
  const result = await response.json().catch(() => ({error: `the server responded with ${response.status}`}));
  if (!response.ok) throw new Error([result.error, result.fix].filter(Boolean).join("; "));
  return result;
}

// Draws the boxes of an image, in its pixel coordinates, the best on top, and lists them below the image.
function drawDetections({result, svg, list}) {
  const minScore = Number(byId("least").value), unit = Math.max(result.width, result.height) / 400;
  const found = result.detections.filter(box => box.score >= minScore);
  svg.setAttribute("viewBox", `0 0 ${result.width} ${result.height}`);
  svg.replaceChildren(...[...found].reverse().map(({label, name, score, box: [x1, y1, x2, y2]}) => {
    const group = svgElement("g", {class: `box k${label % COLORS}`});
    group.append(
      svgElement("rect", {x: x1, y: y1, width: x2 - x1, height: y2 - y1, "stroke-width": 2 * unit}),
      svgElement("text", {x: x1 + 2 * unit, y: Math.max(y1 - 3 * unit, 12 * unit), "font-size": 12 * unit},
        `${name} ${score.toFixed(2)}`));
    return group;
  }));
  list.replaceChildren(...found.map(({name, score, box}) =>
    element("li", {}, `${name} ${score.toFixed(2)}: ${box.map(side => side.toFixed(0)).join(", ")}`)));
}

async function detectFiles(files) {
  const failed = [];
  for (const file of files) {
    showMessage(`processing ${file.name} …`);
    try {
      const result = await detect(file);
      const picture = element("img", {src: URL.createObjectURL(file), alt: file.name});
      const image = {result, svg: svgElement("svg", {"aria-hidden": "true"}), list: element("ol")};
      byId("images").prepend(element("figure", {}, element("div", {className: "stage"}, picture, image.svg),
        element("figcaption", {}, file.name, image.list)));
      images.push(image);
      drawDetections(image);
    } catch (error) {
      failed.push(`${file.name}: ${error.message}`);
    }
  }
  showMessage(`${model.name} ${model.version} processed ${images.length} image${images.length === 1 ? "" : "s"}` +
    failed.map(line => `; ${line}`).join(""), failed.length > 0);
}

for (const name of ["dragover", "dragleave", "drop"])
  document.addEventListener(name, event => {
    event.preventDefault();
    byId("drop").classList.toggle("over", name === "dragover");
    if (name === "drop" && model) detectFiles(event.dataTransfer.files);
  });
document.addEventListener("paste", event => model && detectFiles(event.clipboardData.files));
byId("file").addEventListener("change", event => detectFiles(event.target.files));
byId("least").addEventListener("input", () => {
  byId("score").textContent = Number(byId("least").value).toFixed(2);
  images.forEach(drawDetections);
});

try {
  model = await (await fetch("model.json")).json();
  byId("title").textContent = `Try ${model.name}`;
  byId("about").textContent = `version ${model.version}, ${model.classes.length} classes, format ${model.format}`;
  document.title = `${model.name}: kubedet`;
} catch (error) {
  showMessage(`the server does not respond: ${error.message}`, true);
}
