// Builds the page from its data: tabs, cards, tables, charts; theme and keyboard.

const CHARTS = { lines: LineChart, bars: BarChart, spans: SpanChart, map: MapChart };

const BLOCKS = {
  figures: (block) => element("div", { class: "figures" }, ...block.items.map((item) =>
    element("div", { class: `figure ${item.tone || ""}` }, element("div", { class: "label" }, item.label), element("div", { class: "value" }, item.value), element("div", { class: "more" }, item.note || "")))),
  table: (block) => card(block, tableOf(block.columns, block.rows, block.title)),
  text: (block) => card(block),
  code: (block) => card(block, element("pre", { tabindex: 0, "aria-label": block.title }, block.text)),
  events: (block) => card(block, element("ol", { class: "events" }, ...block.items.map((item) => element("li", { class: item.label ? null : "plain" },
    ...(item.label ? [element("span", { class: "when" }, item.when), element("span", { class: `badge ${item.tone || ""}` }, item.label)] : []),
    element("div", {}, item.text, ...(item.more || []).map((line) => element("div", { class: "more" }, line))))))),
  columns: (block) => element("div", { class: "columns" }, ...block.items.map((item) =>
    element("div", {}, element("h3", {}, item.title), ...item.blocks.map(render)))),
};

function card(block, ...content) {
  const head = block.title ? [element("h3", {}, block.title)] : [];
  if (block.note) head.push(element("p", {}, block.note));
  return element("section", { class: block.half ? "card half" : "card", "aria-label": block.title || null }, ...head, ...content);
}

function render(block) {
  try {
    const Kind = CHARTS[block.kind];
    return Kind ? card(block, new Kind(block).node) : BLOCKS[block.kind](block);
  } catch (error) { // one part that cannot be drawn leaves the others
    return card({ title: block.title, note: `This part cannot be shown: ${error.message}` });
  }
}

function tabs(sections) {
  const list = document.getElementById("tabs");
  const main = document.getElementById("main");
  const pairs = sections.map((section) => {
    const tab = element("button", { type: "button", role: "tab", id: `tab-${section.id}`, "aria-controls": section.id });
    tab.append(section.title);
    const panel = element("div", { class: "panel", role: "tabpanel", id: section.id, "aria-labelledby": `tab-${section.id}` });
    panel.append(element("h2", { class: "sr" }, section.title), ...section.blocks.map(render));
    list.append(tab);
    main.append(panel);
    return { tab, panel };
  });
  const select = (index, { focus = false, keep = true } = {}) => {
    pairs.forEach(({ tab, panel }, at) => {
      tab.setAttribute("aria-selected", String(at === index));
      tab.tabIndex = at === index ? 0 : -1;
      panel.hidden = at !== index;
    });
    if (focus) pairs[index].tab.focus();
    list.scrollLeft = Math.max(0, pairs[index].tab.offsetLeft - 40);
    if (keep) history.replaceState(null, "", `#${sections[index].id}`);
    tip.hide();
  };
  pairs.forEach(({ tab }, index) => tab.addEventListener("click", () => select(index)));
  list.addEventListener("keydown", (event) => {
    const now = pairs.findIndex(({ tab }) => tab === document.activeElement);
    const next = { ArrowRight: now + 1, ArrowLeft: now - 1, Home: 0, End: pairs.length - 1 }[event.key];
    if (now < 0 || next === undefined) return;
    event.preventDefault();
    select((next + pairs.length) % pairs.length, { focus: true });
  });
  const named = () => sections.findIndex((section) => `#${section.id}` === location.hash);
  addEventListener("hashchange", () => { if (named() >= 0) select(named(), { keep: false }); });
  if (sections.length) select(Math.max(0, named()), { keep: false });
}

function theme() {
  const button = document.getElementById("theme");
  const names = { auto: "Auto", light: "Light", dark: "Dark" };
  const stored = () => { try { return localStorage.getItem("trimtab-theme"); } catch { return null; } };
  const set = (name) => {
    if (name === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = name;
    button.querySelector("span").textContent = names[name];
    button.setAttribute("aria-label", `Theme: ${names[name].toLowerCase()}`);
    try { localStorage.setItem("trimtab-theme", name); } catch { /* a page opened from a file may have no storage */ }
  };
  let now = Object.hasOwn(names, stored() || "") ? stored() : "auto";
  set(now);
  button.addEventListener("click", () => {
    const order = Object.keys(names);
    now = order[(order.indexOf(now) + 1) % order.length];
    set(now);
  });
}

theme();
tabs(JSON.parse(document.getElementById("report-data").textContent).sections);
document.documentElement.dataset.ready = "true";
