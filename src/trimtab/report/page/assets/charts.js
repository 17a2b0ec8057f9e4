"use strict";
// Charts in SVG. Text from the data reaches the page only through textContent and attribute values, never as markup.

const SVG = "http://www.w3.org/2000/svg";
const COLORS = 8;
const fill = (index) => `var(--c${index % COLORS})`;
const clamp = (value, low, high) => Math.min(high, Math.max(low, value));
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

function element(tag, attributes = {}, ...children) {
  return furnish(document.createElement(tag), attributes, children);
}
function shape(tag, attributes = {}, ...children) {
  return furnish(document.createElementNS(SVG, tag), attributes, children);
}
function furnish(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children) node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  return node;
}

// A unit and the factor that suits numbers as large as this.
function unitFor(size, unit) {
  const pick = (steps) => steps.find(([factor]) => size < factor * 1000 && size >= factor) || (size >= 1 ? steps[0] : steps.at(-1));
  if (unit === "s") {
    if (size >= 7200) return [3600, "h"];
    if (size >= 180) return [60, "min"];
    return size >= 1 || !size ? [1, "s"] : size >= 1e-3 ? [1e-3, "ms"] : [1e-6, "µs"];
  }
  if (unit === "B") return pick([[1e15, "PB"], [1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]]);
  if (unit === "iB") {
    const steps = [[2 ** 50, "PiB"], [2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"], [1, "B"]];
    return steps.find(([factor]) => size >= factor) || steps.at(-1);
  }
  if (unit === "%") return [0.01, "%"];
  return [1, unit || ""];
}
function plain(value) {
  const size = Math.abs(value);
  if (size !== 0 && (size >= 1e7 || size < 1e-3)) return value.toExponential(2).replace("e+", "e");
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  return String(Number(value.toPrecision(size >= 100 ? 4 : 3)));
}
function show(value, unit) {
  if (value === null || value === undefined) return "–";
  if (!isNumber(value)) return String(value);
  const [factor, label] = unitFor(Math.abs(value), unit);
  return plain(value / factor) + (label ? (label === "%" ? " %" : ` ${label}`) : "");
}

function ticksOf(low, high, count) {
  const span = high - low || Math.abs(high) || 1;
  const rough = span / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((each) => each * power).find((each) => each >= rough) || rough;
  const ticks = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-9 && ticks.length < 40; at += step) ticks.push(Math.abs(at) < step * 1e-9 ? 0 : at);
  return ticks;
}

const tip = {
  at(x, y, text) {
    const box = document.getElementById("tip");
    box.textContent = text;
    box.hidden = false;
    const { width, height } = box.getBoundingClientRect();
    box.style.left = `${clamp(x + 14 + width > innerWidth ? x - width - 14 : x + 14, 4, Math.max(4, innerWidth - width - 4))}px`;
    box.style.top = `${clamp(y - height - 10, 4, Math.max(4, innerHeight - height - 4))}px`;
  },
  hide() { document.getElementById("tip").hidden = true; },
  say(text) { document.getElementById("live").textContent = text; },
};

function fitted(text, width) {
  const room = Math.max(3, Math.floor(width / 7.2));
  return text.length <= room ? text : `${text.slice(0, Math.ceil(room / 2) - 1)}…${text.slice(text.length - Math.floor(room / 2))}`;
}

// Names of layers differ at their ends.
function fittedEnd(text, width) {
  const room = Math.max(3, Math.floor(width / 7.2));
  return text.length <= room || text.includes(" … ") ? fitted(text, width) : `…${text.slice(1 - room)}`;
}

// What all charts have: a frame that follows the width, a table behind, and targets that the pointer and the arrow keys visit.
class Chart {
  constructor(block, height) {
    this.block = block;
    this.height = height;
    this.range = null; // the part of the x axis that is shown; null for all
    this.targets = []; // rows of {x, y, text, node}
    this.row = 0;
    this.column = -1;
    this.svg = shape("svg", { height, "aria-hidden": "true" });
    this.frame = element("div", {
      class: "chart", tabindex: 0, role: "group", "aria-roledescription": "chart",
      "aria-label": `${block.title}. Arrow keys move through the values${this.zoomable ? ", plus and minus zoom, 0 shows all" : ""}.`,
    }, this.svg);
    this.tools = element("div", { class: "bar" });
    this.node = element("div", {}, this.tools, this.frame, this.behind());
    this.frame.addEventListener("keydown", (event) => this.onKey(event));
    this.frame.addEventListener("blur", () => this.leave());
    this.frame.addEventListener("pointermove", (event) => this.onMove(event));
    this.frame.addEventListener("pointerleave", () => this.leave());
    this.frame.addEventListener("pointerdown", (event) => this.onDown(event));
    this.frame.addEventListener("pointerup", (event) => this.onUp(event));
    this.frame.addEventListener("pointercancel", () => this.onUp(null));
    this.frame.addEventListener("dblclick", () => this.zoomTo(null));
    new ResizeObserver(() => this.resized()).observe(this.frame);
  }
  get zoomable() { return false; }
  resized() {
    const width = this.frame.clientWidth;
    if (width && width !== this.width) {
      this.width = width;
      this.draw();
    }
  }
  draw() {
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
    this.svg.replaceChildren();
    this.targets = [];
    this.paint();
    this.cursor = shape("g");
    this.svg.append(this.cursor);
  }
  add(tag, attributes, ...children) {
    const node = shape(tag, attributes, ...children);
    this.svg.append(node);
    return node;
  }
  text(x, y, words, attributes = {}) { return this.add("text", { x, y, ...attributes }, words); }
  zoomButtons() {
    const group = element("span", { class: "zoom" });
    for (const [label, title, act] of [["+", "Zoom in", () => this.zoomBy(0.5)], ["−", "Zoom out", () => this.zoomBy(2)], ["All", "Show all", () => this.zoomTo(null)]]) {
      const button = element("button", { type: "button", "aria-label": `${title}: ${this.block.title}` }, label);
      button.addEventListener("click", act);
      group.append(button);
    }
    this.tools.append(group);
  }
  zoomBy(factor, around) {
    const [low, high] = this.range || this.full();
    const middle = around === undefined ? (low + high) / 2 : around;
    this.zoomTo([middle - (middle - low) * factor, middle + (high - middle) * factor]);
  }
  zoomTo(range) {
    if (!this.zoomable) return;
    const [low, high] = this.full();
    if (range) {
      const size = clamp(range[1] - range[0], (high - low) * 1e-4, high - low);
      const start = clamp(range[0], low, high - size);
      range = size >= (high - low) * 0.999 ? null : [start, start + size];
    }
    this.range = range;
    this.column = -1;
    if (this.width) this.draw();
    this.frame.dataset.zoomed = range ? "true" : "false";
    tip.hide();
  }
  onKey(event) {
    const rows = this.targets;
    const move = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
    const at = () => { const target = this.target(); return target && this.valueAt ? this.valueAt(target.x) : undefined; };
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (move && rows.length) {
      if (move[0] && rows.length === 1) return; // up and down scroll the page
      this.row = clamp(this.row + (this.column < 0 ? 0 : move[0]), 0, rows.length - 1);
      this.column = clamp(this.column < 0 ? 0 : this.column + move[1], 0, rows[this.row].length - 1);
    } else if (event.key === "Home" || event.key === "End") {
      this.column = event.key === "Home" ? 0 : (rows[this.row] || [0]).length - 1;
    } else if (this.zoomable && (event.key === "+" || event.key === "=")) return event.preventDefault(), this.zoomBy(0.5, at());
    else if (this.zoomable && event.key === "-") return event.preventDefault(), this.zoomBy(2, at());
    else if (event.key === "0" || event.key === "Escape") return this.zoomTo(null), tip.hide();
    else return;
    event.preventDefault();
    const target = this.target();
    if (!target) return;
    const box = this.frame.getBoundingClientRect();
    this.point(target);
    tip.at(box.left + target.x, box.top + target.y, target.text);
    tip.say(target.text);
  }
  target() { return (this.targets[this.row] || [])[this.column]; }
  leave() { tip.hide(); if (this.cursor) this.cursor.replaceChildren(); }
  point(target) {
    this.cursor.replaceChildren();
    if (target.node) {
      const copy = target.node.cloneNode(false);
      copy.setAttribute("class", "current");
      copy.setAttribute("fill", "none");
      this.cursor.append(copy);
    } else this.cursor.append(shape("line", { class: "cursor", x1: target.x, x2: target.x, y1: this.top, y2: this.bottom }));
  }
  locate(x, y, node) { // the target under the pointer
    for (const row of this.targets) for (const target of row) if (target.node && target.node === node) return target;
    return null;
  }
  onMove(event) {
    const box = this.frame.getBoundingClientRect();
    const x = event.clientX - box.left;
    if (this.drag) {
      const [from, to] = [Math.min(this.drag.x, x), Math.max(this.drag.x, x)].map((at) => clamp(at, this.left, this.right));
      if (to - from > 4) this.cursor.replaceChildren(shape("rect", { class: "brush", x: from, y: this.top, width: to - from, height: this.bottom - this.top }));
      return;
    }
    const target = this.locate(x, event.clientY - box.top, event.target);
    if (!target) return this.leave();
    this.point(target);
    tip.at(event.clientX, event.clientY, target.text);
  }
  onDown(event) {
    if (!this.zoomable || event.button) return;
    this.drag = { x: event.clientX - this.frame.getBoundingClientRect().left };
  }
  onUp(event) {
    const drag = this.drag;
    this.drag = null;
    if (!drag || !event) return;
    const x = event.clientX - this.frame.getBoundingClientRect().left;
    if (Math.abs(x - drag.x) > 6) this.zoomTo([this.valueAt(Math.min(x, drag.x)), this.valueAt(Math.max(x, drag.x))]);
  }
  behind() {
    const details = element("details", { class: "data" }, element("summary", {}, `Data as a table: ${this.block.title}`));
    details.addEventListener("toggle", () => {
      if (details.open && details.children.length === 1) details.append(tableOf(...this.table(), this.block.title));
    });
    return details;
  }
  // Vertical grid and labels of a linear x axis; sets what valueAt needs.
  xAxis(name, unit, low, high) {
    this.low = low;
    this.high = high > low ? high : low + 1;
    const [factor, label] = unitFor(Math.max(Math.abs(low), Math.abs(high)), unit);
    for (const tick of ticksOf(this.low / factor, this.high / factor, Math.max(4, (this.right - this.left) / 90))) {
      const x = this.xOf(tick * factor);
      this.add("line", { class: "grid", x1: x, x2: x, y1: this.top, y2: this.bottom });
      this.text(x, this.bottom + 15, plain(tick), { "text-anchor": "middle" });
    }
    this.text((this.left + this.right) / 2, this.bottom + 32, label ? `${name} (${label})` : name, { "text-anchor": "middle" });
  }
  xOf(value) { return this.left + ((value - this.low) / (this.high - this.low)) * (this.right - this.left); }
  valueAt(x) { return this.low + ((clamp(x, this.left, this.right) - this.left) / (this.right - this.left)) * (this.high - this.low); }
}

function legendOf(block) {
  return block.parts.map((name, index) => {
    const swatch = element("i");
    swatch.style.background = fill(block.colors[index]);
    return element("span", { class: "legend" }, swatch, name);
  });
}

function tableOf(columns, rows, caption) {
  const numeric = columns.map((_, at) => at > 0 && rows.some((row) => isNumber((row.cells || row)[at])));
  const body = rows.map((row) => {
    const cells = row.cells || row;
    return element("tr", row.chosen ? { class: "chosen" } : {}, ...cells.map((cell, at) => {
      const column = columns[at] || {};
      return element(at ? "td" : "th", { class: !at ? null : numeric[at] ? "n" : String(cell).length > 14 ? "long" : null, scope: at ? null : "row" }, show(cell, column.unit));
    }));
  });
  const head = columns.map((column, at) => element("th", { scope: "col", class: numeric[at] ? "n" : null }, column.name));
  return element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
    element("table", {}, element("caption", { class: "sr" }, caption), element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...body)));
}
