// The lists of the page: thumbnails, classes, boxes.
"use strict";
import {color} from "./drawing.js";

function make(name, properties = {}, ...children) {
  const node = Object.assign(document.createElement(name), properties);
  node.append(...children);
  return node;
}

// Shows a button for each image. Buttons stay as long as their images, so focus and picture stay too.
export function showThumbnails(list, images, current, count, choose) {
  for (const image of images.slice(list.children.length)) {
    const button = make("button", {type: "button"}, make("img", {src: image.url, alt: ""}), make("span"), make("span"));
    button.addEventListener("click", () => choose(image));
    list.append(make("li", {}, button));
  }
  images.forEach((image, place) => {
    const button = list.children[place].firstChild, [, name, note] = button.children;
    name.textContent = image.file.name;
    note.textContent = image.state === "failed" ? "failed" : image.state !== "ready" ? "…"
      : image.checked ? `✓ ${count(image)} checked` : `${count(image)} found`;
    note.className = image.state === "failed" ? "wrong" : image.checked ? "mark" : "";
    if (image === current && button.getAttribute("aria-current") !== "true")
      button.scrollIntoView?.({block: "nearest", inline: "nearest"});
    button.setAttribute("aria-current", String(image === current));
  });
}

// Shows a checkbox for each class found in an image; boxes of classes in `hidden` are not shown.
export function showFilter(holder, images, classes, hidden, changed) {
  const counts = new Map();
  for (const image of images)
    for (const box of image.boxes ?? image.detections) counts.set(box.label, (counts.get(box.label) ?? 0) + 1);
  const present = classes.filter(item => counts.has(item.id));
  const key = present.map(item => item.id).join();
  if (holder.dataset.key !== key) {
    holder.dataset.key = key;
    holder.replaceChildren(...present.map(item => {
      const tick = make("input", {type: "checkbox", value: String(item.id)});
      tick.addEventListener("change", () => {
        if (tick.checked) hidden.delete(item.id); else hidden.add(item.id);
        changed();
      });
      return make("label", {}, tick, make("span", {className: `swatch ${color(item.id)}`}), item.name);
    }));
  }
  for (const tick of holder.querySelectorAll("input")) tick.checked = !hidden.has(Number(tick.value));
}

function row(box, classes, editor, owner) {
  const select = make("select", {}, ...classes.map(item => make("option", {value: String(item.id)}, item.name)));
  select.addEventListener("change", () => owner.relabel(box, Number(select.value)));
  const button = make("button", {type: "button"}, "✕");
  button.addEventListener("click", () => {
    editor.selected = box;
    editor.removeSelected();
  });
  const line = make("tr", {}, make("td", {}, make("span", {className: "swatch"}), " ", select), make("td"),
                    make("td", {className: "sides"}), make("td", {}, button));
  line.box = box;
  line.addEventListener("click", event => { if (!event.target.closest("select, button")) editor.select(box); });
  return line;
}

// Shows a row for each box. Rows stay as long as their boxes, so an open list is not closed.
export function showTable(table, boxes, classes, editor, owner) {
  const body = table.tBodies[0], old = new Map([...body.rows].map(line => [line.box, line]));
  const focused = body.contains(document.activeElement) ? document.activeElement : null;
  const lines = boxes.map(box => old.get(box) ?? row(box, classes, editor, owner));
  if (lines.length !== body.rows.length || lines.some((line, place) => line !== body.rows[place]))
    body.replaceChildren(...lines);
  if (focused?.isConnected) focused.focus();
  for (const [place, line] of lines.entries()) {
    const {box} = line, [kind, score, sides] = line.cells;
    line.className = box === editor.selected ? "selected" : "";
    kind.firstChild.className = `swatch ${color(box.label)}`;
    kind.querySelector("select").value = String(box.label);
    kind.querySelector("select").setAttribute("aria-label", `Class of box ${place + 1}`);
    line.querySelector("button").setAttribute("aria-label", `Delete box ${place + 1}, ${box.name}`);
    score.textContent = box.score === null ? "yours" : box.score.toFixed(3);
    sides.textContent = box.box.map(side => side.toFixed(0)).join(", ");
  }
  table.hidden = !lines.length;
}
