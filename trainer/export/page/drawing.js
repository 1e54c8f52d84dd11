// Boxes as SVG over a picture: in its pixels, with lines and letters of one size on the screen.
"use strict";

const NS = "http://www.w3.org/2000/svg";
const COLORS = 8, LETTER = 13, SMALL = 11, NARROW = 500, FURTHER = 3;
const measure = document.createElement("canvas").getContext("2d");

export const color = label => `k${((label % COLORS) + COLORS) % COLORS}`;

export function element(name, attributes, ...children) {
  const node = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

const meets = (one, other) =>
  one.x < other.x + other.width && other.x < one.x + one.width &&
  one.y < other.y + other.height && other.y < one.y + one.height;

// Returns a free place for a label: above the box, inside or below it, or further up or down; null if there is none,
// unless there `must` be one. Boxes without a label are still in the table.
function place([x1, y1, , y2], wide, high, size, taken, must) {
  const x = Math.min(Math.max(0, x1), Math.max(0, size.width - wide));
  const ys = [y1 - high, y1, y2, y2 - high];
  for (let step = 1; step <= FURTHER; step++) ys.push(y1 + step * high, y1 - (step + 1) * high);
  const inside = ys.filter(y => y >= 0 && y + high <= size.height);
  const plates = (inside.length ? inside : [0]).map(y => ({x, y, width: wide, height: high}));
  const free = plates.find(plate => !taken.some(other => meets(plate, other))) ?? (must ? plates[0] : null);
  if (free) taken.push(free);
  return free;
}

function handles([x1, y1, x2, y2], unit) {
  const corners = {nw: [x1, y1], ne: [x2, y1], sw: [x1, y2], se: [x2, y2]};
  return Object.entries(corners).map(([corner, [x, y]]) =>
    element("circle", {class: `handle ${corner}`, "data-corner": corner, cx: x, cy: y, r: 7 * unit,
                       "stroke-width": 1.5 * unit}));
}

export function text(box) {
  return box.score === null ? box.name : `${box.name} ${box.score.toFixed(2)}`;
}

// Labels of boxes, over all boxes; that of the selected box is placed first.
function labels(boxes, size, unit, letter, selected) {
  const taken = [], high = (letter + 5) * unit;
  measure.font = `${letter}px system-ui, sans-serif`;
  const order = boxes.includes(selected) ? [selected, ...boxes.filter(box => box !== selected)] : boxes;
  return order.flatMap(box => {
    const wide = (measure.measureText(text(box)).width + 8) * unit;
    const plate = place(box.box, wide, high, size, taken, box === selected);
    if (!plate) return [];
    const label = element("g", {class: `box ${color(box.label)}`}, element("rect", {class: "plate", ...plate}),
      element("text", {x: plate.x + 4 * unit, y: plate.y + high - 5.5 * unit, "font-size": letter * unit}, text(box)));
    label.box = box;
    return [label];
  });
}

// Draws boxes, the first on top. `selected` has handles. If `reachable`, the Tab key goes from box to box.
export function draw(svg, size, boxes, {selected = null, reachable = false} = {}) {
  svg.setAttribute("viewBox", `0 0 ${size.width} ${size.height}`);
  const screen = svg.clientWidth || svg.parentElement.clientWidth || size.width, unit = size.width / screen;
  const groups = boxes.map(box => {
    const [x1, y1, x2, y2] = box.box, sides = {x: x1, y: y1, width: x2 - x1, height: y2 - y1};
    const corners = box.box.map(side => Math.round(side));
    const group = element("g", {class: `box ${color(box.label)}${box === selected ? " selected" : ""}`},
      element("rect", {class: "halo", ...sides, "stroke-width": 5 * unit}),
      element("rect", {class: "side", ...sides, "stroke-width": 2.5 * unit}));
    if (reachable) {
      group.setAttribute("tabindex", "0");
      group.setAttribute("role", "button");
      group.setAttribute("aria-pressed", String(box === selected));
      group.setAttribute("aria-label", `${text(box)}, from ${corners[0]}, ${corners[1]} to ${corners[2]}, ${corners[3]}`);
    }
    group.box = box;
    return group;
  });
  svg.replaceChildren(...groups.reverse(), ...labels(boxes, size, unit, screen < NARROW ? SMALL : LETTER, selected));
  if (!selected) return;
  // Handles are over all boxes, in another group: the order of the Tab key must not change.
  const top = element("g", {class: `box selected ${color(selected.label)}`}, ...handles(selected.box, unit));
  top.box = selected;
  svg.append(top);
}
