// Boxes as SVG over a picture: in its pixels, with lines and letters of one size on the screen.
"use strict";

const NS = "http://www.w3.org/2000/svg";
const COLORS = 8, LETTER = 13, SMALL = 11, NARROW = 500, FURTHER = 3;
const measure = document.createElement("canvas").getContext("2d");

export const color = label => `k${((label % COLORS) + COLORS) % COLORS}`;

function element(name, attributes, ...children) {
  const node = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

const meets = (one, other) =>
  one.x < other.x + other.width && other.x < one.x + one.width &&
  one.y < other.y + other.height && other.y < one.y + one.height;

// Returns a free place for a label: above the box, inside or below it, or further up or down; null if there is none.
// Boxes without a label are still in the table.
function place([x1, y1, , y2], wide, high, size, taken) {
  const x = Math.min(Math.max(0, x1), Math.max(0, size.width - wide));
  const ys = [y1 - high, y1, y2, y2 - high];
  for (let step = 1; step <= FURTHER; step++) ys.push(y1 + step * high, y1 - (step + 1) * high);
  const inside = ys.filter(y => y >= 0 && y + high <= size.height);
  const plates = (inside.length ? inside : [0]).map(y => ({x, y, width: wide, height: high}));
  const free = plates.find(plate => !taken.some(other => meets(plate, other))) ?? null;
  if (free) taken.push(free);
  return free;
}

// Labels of boxes, over all boxes.
function labels(boxes, size, unit, letter) {
  const taken = [], high = (letter + 5) * unit;
  measure.font = `${letter}px system-ui, sans-serif`;
  return boxes.flatMap(box => {
    const text = `${box.name} ${box.score.toFixed(2)}`;
    const plate = place(box.box, (measure.measureText(text).width + 8) * unit, high, size, taken);
    return plate ? [element("g", {class: `box ${color(box.label)}`}, element("rect", {class: "plate", ...plate}),
      element("text", {x: plate.x + 4 * unit, y: plate.y + high - 5.5 * unit, "font-size": letter * unit}, text))] : [];
  });
}

// Draws boxes, the first on top.
export function draw(svg, size, boxes) {
  svg.setAttribute("viewBox", `0 0 ${size.width} ${size.height}`);
  const screen = svg.clientWidth || svg.parentElement.clientWidth || size.width, unit = size.width / screen;
  const groups = boxes.map(box => {
    const [x1, y1, x2, y2] = box.box, sides = {x: x1, y: y1, width: x2 - x1, height: y2 - y1};
    return element("g", {class: `box ${color(box.label)}`},
      element("rect", {class: "halo", ...sides, "stroke-width": 5 * unit}),
      element("rect", {class: "side", ...sides, "stroke-width": 2.5 * unit}));
  });
  svg.replaceChildren(...groups.reverse(), ...labels(boxes, size, unit, screen < NARROW ? SMALL : LETTER));
}
