// The kinds of charts: lines over steps or time, stacked bars, spans of one step, maps of layers.

class LineChart extends Chart {
  constructor(block) {
    super(block, block.height || 280);
    this.axis = 0;
    this.log = Boolean(block.log);
    this.hidden = new Set();
    block.series.forEach((series, index) => {
      const swatch = element("i");
      swatch.style.background = swatch.style.color = fill(series.color ?? index);
      const button = element("button", { type: "button", class: series.dash ? "legend dash" : "legend", "aria-pressed": "true" }, swatch, series.name);
      button.addEventListener("click", () => {
        this.hidden.has(index) ? this.hidden.delete(index) : this.hidden.add(index);
        button.setAttribute("aria-pressed", String(!this.hidden.has(index)));
        this.draw();
      });
      this.tools.append(button);
    });
    this.tools.append(element("span", { class: "gap" }));
    if (block.x.length > 1) this.choice(block.x.map((axis) => axis.name), (index) => { this.axis = index; this.zoomTo(null); });
    if (this.values().every((value) => value > 0)) {
      const button = element("button", { type: "button", "aria-pressed": String(this.log) }, "log");
      button.addEventListener("click", () => { this.log = !this.log; button.setAttribute("aria-pressed", String(this.log)); this.draw(); });
      this.tools.append(button);
    }
    this.zoomButtons();
  }
  get zoomable() { return true; }
  choice(names, act) {
    const buttons = names.map((name, index) => {
      const button = element("button", { type: "button", "aria-pressed": String(!index) }, `by ${name}`);
      button.addEventListener("click", () => {
        buttons.forEach((other) => other.setAttribute("aria-pressed", String(other === button)));
        act(index);
      });
      return button;
    });
    this.tools.append(...buttons);
  }
  values() { return this.block.series.flatMap((series) => [...series.y, ...(series.low || [])]).filter(isNumber); }
  visible() { return this.block.series.map((series, index) => ({ ...series, index, color: series.color ?? index })).filter(({ index }) => !this.hidden.has(index)); }
  full() {
    let [low, high] = [Infinity, -Infinity];
    const see = (value) => { if (isNumber(value)) { low = Math.min(low, value); high = Math.max(high, value); } };
    for (const series of this.block.series) for (const value of series.x[this.axis] || []) see(value);
    for (const dot of this.block.dots || []) see(dot.x);
    return low <= high ? [low, high] : [0, 1];
  }
  paint() {
    const { block } = this;
    const narrow = this.width < 520;
    [this.left, this.right, this.top, this.bottom] = [narrow ? 48 : 58, this.width - 12, 12, this.height - 40];
    const [low, high] = this.range || this.full();
    const inside = (x) => isNumber(x) && x >= low && x <= high;
    let [bottom, top] = [Infinity, -Infinity];
    const see = (value) => { if (isNumber(value)) { bottom = Math.min(bottom, value); top = Math.max(top, value); } };
    for (const series of this.visible()) {
      const xs = series.x[this.axis] || [];
      xs.forEach((x, at) => { if (inside(x)) { see(series.y[at]); see((series.low || [])[at]); see((series.high || [])[at]); } });
    }
    for (const dot of block.dots || []) see(dot.y);
    for (const limit of block.limits || []) see(limit.y);
    if (bottom > top) [bottom, top] = [0, 1];
    const log = this.log && bottom > 0;
    if (!log && block.zero) bottom = Math.min(0, bottom);
    if (bottom === top) [bottom, top] = log ? [bottom / 2, top * 2] : [bottom - (Math.abs(bottom) || 1) * 0.1, top + (Math.abs(top) || 1) * 0.1];
    const on = log ? Math.log10 : Number;
    const pad = (on(top) - on(bottom)) * 0.05;
    const [from, to] = [on(bottom) - (block.zero && !log && bottom === 0 ? 0 : pad), on(top) + pad];
    const yOf = (value) => this.bottom - ((on(value) - from) / (to - from)) * (this.bottom - this.top);
    const [factor, label] = unitFor(Math.max(Math.abs(bottom), Math.abs(top)), block.y.unit);
    const ticks = log
      ? ticksOf(from, to, 4).map((tick) => 10 ** tick)
      : ticksOf(from / factor, to / factor, 5).map((tick) => tick * factor);
    for (const tick of ticks) {
      const y = yOf(tick);
      this.add("line", { class: "grid", x1: this.left, x2: this.right, y1: y, y2: y });
      this.text(this.left - 6, y + 4, plain(tick / factor), { "text-anchor": "end" });
    }
    this.xAxis(block.x[this.axis].name, block.x[this.axis].unit, low, high);
    this.text(12, (this.top + this.bottom) / 2, label ? `${block.y.name} (${label})` : block.y.name, { "text-anchor": "middle", transform: `rotate(-90 12 ${(this.top + this.bottom) / 2})` });
    for (const series of this.visible()) this.line(series, inside, yOf);
    for (const limit of block.limits || []) {
      this.add("line", { class: "limit", x1: this.left, x2: this.right, y1: yOf(limit.y), y2: yOf(limit.y) });
      this.text(this.right - 4, yOf(limit.y) - 6, limit.label, { class: "name halo", "text-anchor": "end" });
    }
    const marks = (block.marks || []).filter((mark) => inside(mark.x[this.axis]));
    marks.forEach((mark) => {
      const x = this.xOf(mark.x[this.axis]);
      const color = mark.tone === "bad" ? "var(--c4)" : mark.tone === "warn" ? "var(--c1)" : "var(--c7)";
      this.add("line", { class: "mark", x1: x, x2: x, y1: this.top, y2: this.bottom });
      this.add("path", { d: `M${x - 5} ${this.top - 8}h10l-5 9z`, fill: color });
    });
    for (const dot of block.dots || []) {
      this.add("circle", { cx: this.xOf(dot.x), cy: yOf(dot.y), r: 8, fill: "none", stroke: "var(--c4)", "stroke-width": 3 });
      const after = this.xOf(dot.x) < this.right - 150;
      this.text(this.xOf(dot.x) + (after ? 14 : -14), yOf(dot.y) - 8, dot.label, { class: "name halo", "text-anchor": after ? "start" : "end" });
    }
    this.aim(inside, yOf, marks);
  }
  line(series, inside, yOf) {
    const xs = series.x[this.axis] || [];
    const points = xs.map((x, at) => [x, at]).filter(([x, at]) => inside(x) && isNumber(series.y[at]));
    const color = fill(series.color);
    if (series.low) {
      const banded = points.filter(([, at]) => isNumber(series.low[at]) && isNumber(series.high[at]));
      const up = banded.map(([x, at]) => `${this.xOf(x).toFixed(1)},${yOf(series.high[at]).toFixed(1)}`);
      const down = banded.map(([x, at]) => `${this.xOf(x).toFixed(1)},${yOf(series.low[at]).toFixed(1)}`).reverse();
      if (up.length > 1) this.add("polygon", { points: [...up, ...down].join(" "), fill: color, "fill-opacity": 0.18 });
    }
    let path = "";
    let before = -2;
    for (const [x, at] of points) { // a missing value interrupts the line
      const joined = before >= 0 && !series.y.slice(before + 1, at).some((value) => !isNumber(value));
      const [px, py] = [this.xOf(x).toFixed(1), yOf(series.y[at]).toFixed(1)];
      path += joined ? (series.steps ? `H${px}V${py}` : `L${px} ${py}`) : `M${px} ${py}`;
      before = at;
    }
    if (path) this.add("path", { d: path, fill: "none", stroke: color, "stroke-width": 2, "stroke-linejoin": "round", "stroke-dasharray": series.dash ? "6 4" : null });
    if (this.block.points || points.length <= 40) {
      for (const [x, at] of points) this.add("circle", { cx: this.xOf(x), cy: yOf(series.y[at]), r: 3, fill: color });
    }
  }
  aim(inside, yOf, marks) {
    const axis = this.block.x[this.axis];
    const shown = this.visible();
    const longest = shown.reduce((best, series) => ((series.x[this.axis] || []).length > (best ? best.x[this.axis].length : 0) ? series : best), null);
    if (!longest) return;
    const row = longest.x[this.axis].filter(inside).map((x) => {
      const lines = [`${axis.name} ${show(x, axis.unit)}`];
      let y = this.bottom;
      for (const series of shown) {
        const xs = series.x[this.axis] || [];
        let at = -1;
        xs.forEach((other, index) => { if (isNumber(other) && (at < 0 || Math.abs(other - x) < Math.abs(xs[at] - x))) at = index; });
        if (at < 0 || !isNumber(series.y[at])) continue;
        const spread = series.low && isNumber(series.low[at]) && series.high[at] !== series.low[at] ? ` (${show(series.low[at], this.block.y.unit)} to ${show(series.high[at], this.block.y.unit)})` : "";
        lines.push(`${series.name}: ${show(series.y[at], this.block.y.unit)}${spread}`);
        y = Math.min(y, yOf(series.y[at]));
      }
      return { x: this.xOf(x), y, text: lines.slice(0, 14).join("\n") };
    });
    for (const mark of marks) {
      const near = row.reduce((best, target) => (!best || Math.abs(target.x - this.xOf(mark.x[this.axis])) < Math.abs(best.x - this.xOf(mark.x[this.axis])) ? target : best), null);
      if (near && near.text.length < 900) near.text += `\n▼ ${mark.label}`;
    }
    this.targets = [row];
  }
  locate(x) {
    if (x < this.left - 8 || !this.targets.length) return null;
    return this.targets[0].reduce((best, target) => (!best || Math.abs(target.x - x) < Math.abs(best.x - x) ? target : best), null);
  }
  table() {
    const { block } = this;
    const banded = block.series.some((series) => series.low);
    const columns = [{ name: "series" }, ...block.x, { name: block.y.name, unit: block.y.unit }];
    if (banded) columns.push({ name: "lowest", unit: block.y.unit }, { name: "highest", unit: block.y.unit });
    const rows = block.series.flatMap((series) => series.y.map((y, at) => [
      series.name, ...block.x.map((_, axis) => (series.x[axis] || [])[at] ?? null), y, ...(banded ? [(series.low || [])[at] ?? y, (series.high || [])[at] ?? y] : []),
    ]));
    return [columns, rows];
  }
}

class BarChart extends Chart {
  constructor(block) {
    // On a phone long labels stand above their bars.
    const above = matchMedia("(max-width: 520px)").matches && block.rows.some((row) => row.label.length > 12);
    super(block, block.rows.length * (above ? 44 : 30) + 46);
    this.above = above;
    this.tools.append(...legendOf(block));
  }
  paint() {
    const { block, above } = this;
    const room = above ? 8 : clamp(this.width * 0.3, 84, 190);
    [this.left, this.right, this.top, this.bottom] = [room, this.width - 12, 4, this.height - 40];
    const sum = (row) => row.values.reduce((total, value) => total + (isNumber(value) && value > 0 ? value : 0), 0);
    this.xAxis(block.axis, block.unit, 0, Math.max(...block.rows.map(sum), 1e-12) * 1.02);
    this.add("line", { class: "axis", x1: this.left, x2: this.left, y1: this.top, y2: this.bottom });
    this.targets = block.rows.map((row, at) => {
      const y = this.top + (above ? at * 44 + 18 : at * 30 + 4);
      if (above) this.text(this.left, y - 5, fitted(row.label, this.width - 20), { class: "name" });
      else this.text(this.left - 8, y + 15, fitted(row.label, room - 12), { class: "name", "text-anchor": "end" });
      let from = 0;
      return row.values.map((value, part) => {
        if (!isNumber(value) || value <= 0) return null;
        const [x, end] = [this.xOf(from), this.xOf(from + value)];
        from += value;
        const node = this.add("rect", { x, y, width: Math.max(0.5, end - x), height: 22, fill: fill(block.colors[part]), "fill-opacity": row.faint ? 0.45 : 1, stroke: row.faint ? fill(block.colors[part]) : "none", "stroke-dasharray": "4 3" });
        const share = sum(row) ? ` (${show(value / sum(row), "%")})` : "";
        return { x: (x + end) / 2, y: y + 11, node, text: `${row.label}\n${block.parts[part]}: ${show(value, block.unit)}${share}${row.note ? `\n${row.note}` : ""}` };
      }).filter(Boolean);
    }).filter((row) => row.length);
  }
  table() {
    const { block } = this;
    return [[{ name: "" }, ...block.parts.map((name) => ({ name, unit: block.unit }))], block.rows.map((row) => [row.label, ...row.values])];
  }
}

class SpanChart extends Chart {
  constructor(block) {
    super(block, block.lanes.length * 30 + 46);
    this.tools.append(...legendOf(block), element("span", { class: "gap" }));
    this.zoomButtons();
  }
  get zoomable() { return true; }
  full() {
    const ends = this.block.lanes.flatMap((lane) => lane.spans.map((span) => span[1]));
    return [0, ends.reduce((most, end) => Math.max(most, end), 0) || 1];
  }
  paint() {
    const { block } = this;
    const room = clamp(this.width * 0.28, 84, 190);
    [this.left, this.right, this.top, this.bottom] = [room, this.width - 12, 4, this.height - 40];
    const [low, high] = this.range || this.full();
    this.xAxis(block.axis, block.unit, low, high);
    this.targets = block.lanes.map((lane, at) => {
      const y = this.top + at * 30 + 3;
      if (lane.first && at) this.add("line", { class: "axis", x1: 0, x2: this.right, y1: y - 3, y2: y - 3 });
      this.text(this.left - 8, y + 16, fitted(lane.label, room - 12), { class: "name", "text-anchor": "end" });
      return lane.spans.filter(([start, end]) => end >= low && start <= high).map(([start, end, part, name]) => {
        const [x, to] = [Math.max(this.left, this.xOf(start)), Math.min(this.right, this.xOf(end))];
        const node = this.add("rect", { x, y, width: Math.max(0.75, to - x), height: 24, fill: fill(block.colors[part]), "fill-opacity": lane.faint ? 0.5 : 1, stroke: to - x > 4 ? "var(--card)" : "none", "stroke-width": 0.75 });
        return { x: (x + to) / 2, y: y + 12, node, text: `${lane.label}: ${name}\n${block.parts[part]}, ${show(end - start, block.unit)}, from ${show(start, block.unit)}` };
      });
    }).filter((row) => row.length);
  }
  table() {
    const { block } = this;
    const columns = [{ name: "lane" }, { name: "what" }, { name: "kind" }, { name: "start", unit: block.unit }, { name: "length", unit: block.unit }];
    return [columns, block.lanes.flatMap((lane) => lane.spans.map(([start, end, part, name]) => [lane.label, name, block.parts[part], start, end - start]))];
  }
}

class MapChart extends Chart {
  constructor(block) {
    const each = clamp(Math.floor(600 / Math.max(1, block.rows.length)), 5, 22);
    super(block, block.rows.length * each + 62);
    this.each = each;
    this.tools.append(...block.scale.map((value, index) => {
      const swatch = element("i");
      swatch.style.background = this.color(index);
      return element("span", { class: "legend" }, swatch, show(value, block.unit));
    }));
  }
  color(index) {
    const neutral = this.block.scale.at(-1) === this.block.neutral;
    if (neutral && index === this.block.scale.length - 1) return "var(--none)";
    const last = Math.max(1, this.block.scale.length - 1 - neutral);
    return `var(--m${last < 8 ? Math.round((index * 6) / last) : Math.min(7, Math.floor((index * 8) / (last + 1)))})`;
  }
  paint() {
    const { block, each } = this;
    const room = clamp(this.width * 0.3, 84, 300);
    [this.left, this.right, this.top, this.bottom] = [room, this.width - 12, 20, this.height - 40];
    const edges = block.edges;
    if (block.names) {
      [this.low, this.high] = [edges[0], edges.at(-1)];
      block.names.forEach((name, at) => this.text((this.xOf(edges[at]) + this.xOf(edges[at + 1])) / 2, this.bottom + 15, fitted(name, this.xOf(edges[at + 1]) - this.xOf(edges[at])), { "text-anchor": "middle" }));
      this.text((this.left + this.right) / 2, this.bottom + 32, block.axis, { "text-anchor": "middle" });
    } else this.xAxis(block.axis, "", edges[0], edges.at(-1));
    this.text(this.left - 8, this.top - 6, block.what, { "text-anchor": "end" });
    const every = Math.ceil(14 / each);
    this.targets = block.rows.map((name, at) => {
      const y = this.top + at * each;
      if (at % every === 0) this.text(this.left - 8, y + Math.min(each, 16) - (each < 14 ? 0 : 2), fittedEnd(name, room - 12), { class: "name", "text-anchor": "end" });
      return block.values[at].map((value, column) => {
        const index = block.scale.indexOf(value);
        if (index < 0) return null;
        const [x, end] = [this.xOf(edges[column]), this.xOf(edges[column + 1])];
        const node = this.add("rect", { x, y, width: Math.max(0.75, end - x - 0.5), height: each - 0.75, fill: this.color(index) });
        const label = show(value);
        if (each >= 14 && end - x > 8 + label.length * 7) this.text((x + end) / 2, y + each / 2 + 4, label, { class: "cell", "text-anchor": "middle" }).style.fill = value === block.neutral ? "var(--ink)" : index / Math.max(1, block.scale.length - 1) > 0.4 ? "#111" : "#fff";
        const when = block.names ? block.names[column] : `${block.axis} ${show(edges[column])} to ${show(edges[column + 1])}`;
        return { x: (x + end) / 2, y: y + each / 2, node, text: `${name}\n${when}: ${show(value, block.unit)}` };
      }).filter(Boolean);
    }).filter((row) => row.length);
  }
  table() {
    const { block } = this;
    const columns = block.names || block.edges.slice(0, -1).map((edge) => `from ${block.axis} ${show(edge)}`);
    return [[{ name: block.what }, ...columns.map((name) => ({ name, unit: block.unit }))], block.rows.map((name, at) => [name, ...block.values[at]])];
  }
}
