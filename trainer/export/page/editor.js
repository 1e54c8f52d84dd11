// Edits boxes with a pointer or keys: select, move, resize, draw, delete.
"use strict";
import {draw} from "./drawing.js";

const LEAST_SIDE = 2;  // Pixels; so a click draws no box.
const STEPS = {ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1]};

const clamp = (value, most) => Math.min(Math.max(value, 0), most);
const sorted = ([x1, y1, x2, y2]) => [Math.min(x1, x2), Math.min(y1, y2), Math.max(x1, x2), Math.max(y1, y2)];
const rounded = box => box.map(side => Math.round(side * 100) / 100);

export class Editor {
  // `owner` has: boxes(), those shown; size() of the image; change(), called before a change; fresh(sides), which
  // adds a box; remove(box); updated(), called after a change.
  constructor(stage, svg, owner) {
    Object.assign(this, {stage, svg, owner, selected: null, drawing: false, drag: null});
    svg.addEventListener("pointerdown", event => this.#down(event));
    svg.addEventListener("pointermove", event => this.#move(event));
    svg.addEventListener("pointerup", () => this.#up());
    svg.addEventListener("pointercancel", () => this.#up());
    svg.addEventListener("keydown", event => this.#key(event));
    svg.addEventListener("focusin", event => this.select(event.target.closest(".box")?.box ?? null));
    new ResizeObserver(() => this.show()).observe(stage);
  }

  show() {
    const size = this.owner.size();
    if (!size) return;
    const focused = this.svg.contains(document.activeElement);
    const boxes = this.owner.boxes();
    if (!boxes.includes(this.selected)) this.selected = null;
    draw(this.svg, size, boxes, {selected: this.selected, reachable: true});
    if (focused) this.#focus();
  }

  #focus() {
    [...this.svg.querySelectorAll("[tabindex]")].find(group => group.box === this.selected)?.focus({preventScroll: true});
  }

  select(box) {
    if (box === this.selected) return;
    this.selected = box;
    this.owner.updated();
  }

  setDrawing(on) {
    this.drawing = on;
    this.stage.classList.toggle("drawing", on);
  }

  // Adds a box in the middle, for use with keys.
  add() {
    const {width, height} = this.owner.size();
    this.owner.change();
    this.selected = this.owner.fresh(rounded([width / 3, height / 3, width * 2 / 3, height * 2 / 3]));
    this.setDrawing(false);
    this.owner.updated();
    this.#focus();
  }

  removeSelected() {
    if (!this.selected) return;
    const box = this.selected;
    this.owner.change();
    this.owner.remove(box);
    this.selected = null;
    this.owner.updated();
  }

  #at(event) {
    const frame = this.svg.getBoundingClientRect(), {width, height} = this.owner.size();
    return [clamp((event.clientX - frame.left) / frame.width * width, width),
            clamp((event.clientY - frame.top) / frame.height * height, height)];
  }

  #down(event) {
    if (event.button) return;
    const [x, y] = this.#at(event), group = event.target.closest(".box");
    if (this.drawing) {
      this.drag = {kind: "draw", box: null, start: [x, y]};
    } else if (group) {
      const box = group.box, corner = event.target.dataset.corner;
      // A touch on another box selects it and lets the page scroll.
      if (box !== this.selected && event.pointerType === "touch") return this.select(box);
      this.drag = {kind: corner ?? "move", box, start: [x, y], sides: [...box.box]};
      this.select(box);
      this.#focus();
    } else {
      return this.select(null);
    }
    event.preventDefault();
    this.svg.setPointerCapture(event.pointerId);
  }

  #move(event) {
    if (!this.drag) return;
    const [x, y] = this.#at(event), {kind, start, sides} = this.drag;
    if (kind === "draw") return this.#pull(x, y);
    if (!this.drag.begun && Math.hypot(x - start[0], y - start[1]) < LEAST_SIDE) return;
    if (!this.drag.begun) this.owner.change();
    this.drag.begun = true;
    const {width, height} = this.owner.size();
    if (kind === "move") {
      const dx = Math.min(Math.max(x - start[0], -sides[0]), width - sides[2]);
      const dy = Math.min(Math.max(y - start[1], -sides[1]), height - sides[3]);
      this.drag.box.box = rounded([sides[0] + dx, sides[1] + dy, sides[2] + dx, sides[3] + dy]);
    } else {
      const [x1, y1, x2, y2] = sides;
      this.drag.box.box = rounded(sorted([kind.includes("w") ? x : x1, kind.includes("n") ? y : y1,
                                          kind.includes("e") ? x : x2, kind.includes("s") ? y : y2]));
    }
    this.owner.updated();
  }

  #pull(x, y) {
    const sides = rounded(sorted([...this.drag.start, x, y]));
    if (sides[2] - sides[0] < LEAST_SIDE || sides[3] - sides[1] < LEAST_SIDE) return;
    if (!this.drag.box) {
      this.owner.change();
      this.drag.box = this.selected = this.owner.fresh(sides);
    }
    this.drag.box.box = sides;
    this.owner.updated();
  }

  #up() {
    const drawn = this.drag?.kind === "draw" && this.drag.box;
    this.drag = null;
    if (!drawn) return;
    this.setDrawing(false);
    this.owner.updated();
  }

  #key(event) {
    const step = STEPS[event.key];
    if (event.key === "Delete" || event.key === "Backspace") {
      this.removeSelected();
    } else if (step && this.selected && !event.ctrlKey && !event.metaKey) {
      this.owner.change();
      const far = event.shiftKey ? 10 : 1, {width, height} = this.owner.size(), box = this.selected;
      const [x1, y1, x2, y2] = box.box, [dx, dy] = step.map(part => part * far);
      if (event.altKey)
        box.box = rounded([x1, y1, clamp(Math.max(x2 + dx, x1 + LEAST_SIDE), width),
                           clamp(Math.max(y2 + dy, y1 + LEAST_SIDE), height)]);
      else if (x1 + dx >= 0 && y1 + dy >= 0 && x2 + dx <= width && y2 + dy <= height)
        box.box = rounded([x1 + dx, y1 + dy, x2 + dx, y2 + dy]);
      this.owner.updated();
    } else if (event.key === "Escape") {
      document.activeElement.blur();
      this.select(null);
    } else {
      return;
    }
    event.preventDefault();
    event.stopPropagation();
  }
}
