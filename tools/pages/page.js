"use strict";
// All texts reach the page as text nodes or attributes, never as markup: messages and words are not to be trusted.
const data = JSON.parse(document.getElementById("data").textContent);
const PALETTE = 7;
const byId = (id) => document.getElementById(id);

function el(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

// --- charts ---------------------------------------------------------------------------------------------------------

const DASHES = ["solid", "dash", "dot"], MARKERS = ["circle", "square", "triangle-up", "diamond"];
const redraws = [];

// Plotly takes <b>, <a href>, ... and entities in texts for markup; escaped, every text is shown as it is.
const plain = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function number(value, percent) {
  if (percent) return `${+(100 * value).toFixed(1)}%`;
  const size = Math.abs(value);
  return size && (size < 1e-3 || size >= 1e6) ? value.toExponential(1) : String(+value.toPrecision(4));
}

function valueText(chart, y, low, high) {
  return number(y, chart.percent) + (low === null ? "" : ` [${number(low, chart.percent)}, ${number(high, chart.percent)}]`);
}

// Charts of the same quantity in a section have the same range, so that they can be compared; all intervals are in it.
function yRange(chart) {
  const alike = data.charts.filter((other) => other.section === chart.section && other.y_label === chart.y_label);
  const ys = alike.flatMap((other) => other.series.flatMap((line) => line.points)).flatMap(([, ...y]) => y).filter((y) => y !== null);
  if (chart.reference !== null) ys.push(chart.reference);
  if (chart.percent) ys.push(0);
  const low = Math.min(...ys), high = Math.max(...ys);
  const pad = 0.06 * (high - low) || 0.1 * Math.abs(low) || 1;
  return chart.percent ? [0, Math.min(1.02, high + pad)] : [low - pad, high + pad];
}

function trace(chart, line, place) {
  const count = chart.series.length, colour = css(`--c${line.colour % PALETTE}`), of = (i) => line.points.map((point) => point[i]);
  // Side by side, so that the bars of several series at one x do not hide each other.
  const gap = chart.labels ? Math.min(0.02 * chart.labels.length, 0.8 / count) : 0;
  const above = ([, y, , high]) => high === null ? NaN : high - y, below = ([, y, low]) => low === null ? NaN : y - low;
  const joined = chart.labels ? data.group === "epoch" : line.points.length > 1;
  const dotted = chart.labels || !joined;
  return {
    type: "scatter", name: plain(line.name), x: of(0).map((x) => x + (place - (count - 1) / 2) * gap), y: of(1),
    mode: [joined && "lines", dotted && "markers"].filter(Boolean).join("+"),
    line: {color: colour, width: chart.labels ? 1.2 : 1.6, dash: DASHES[Math.floor(line.colour / PALETTE) % DASHES.length]},
    marker: {color: colour, size: 8, symbol: MARKERS[place % MARKERS.length]},
    error_y: {type: "data", symmetric: false, array: line.points.map(above), arrayminus: line.points.map(below), color: colour, thickness: 1.8, width: 0},
    cliponaxis: false, hoverinfo: "text",
    hovertext: line.points.map(([x, ...y]) => plain(`${line.name}, ${chart.labels ? chart.labels[x] : number(x)}: ${valueText(chart, ...y)}`)),
  };
}

function xAxis(chart) {
  if (!chart.labels) return {};
  const every = Math.ceil(chart.labels.length / 12), places = chart.labels.map((_, x) => x).filter((x) => x % every === 0);
  const room = Math.floor(48 / places.length), short = (label) => label.length > room ? "…" + label.slice(1 - room) : label;
  return {tickvals: places, ticktext: places.map((x) => plain(short(chart.labels[x]))), range: [-0.5, chart.labels.length - 0.5]};
}

function layout(chart) {
  const quiet = css("--quiet"), axis = {gridcolor: css("--line"), zeroline: false, automargin: true, linecolor: css("--line")};
  const reference = {type: "line", xref: "paper", x0: 0, x1: 1, y0: chart.reference, y1: chart.reference, line: {color: quiet, dash: "dash", width: 1}};
  const width = 50 + 7 * Math.max(...chart.series.map((line) => line.name.length)), columns = Math.max(1, Math.floor(300 / width));
  return {
    height: 310 + 20 * Math.ceil(chart.series.length / columns), margin: {l: 50, r: 10, t: 10, b: 40},
    paper_bgcolor: "transparent", plot_bgcolor: "transparent", font: {family: "system-ui, sans-serif", size: 12, color: quiet},
    xaxis: {...axis, title: {text: plain(chart.x_label).replace(" (", "<br>("), font: {size: 12}}, showgrid: !chart.labels, ...xAxis(chart)},
    yaxis: {...axis, title: {text: plain(chart.y_label), font: {size: 12}}, range: yRange(chart), tickformat: chart.percent ? ".1~%" : ""},
    shapes: chart.reference === null ? [] : [reference],
    showlegend: true, legend: {orientation: "h", yref: "container", y: 0, yanchor: "bottom", x: 0, itemclick: "toggle"},
    hovermode: "closest", hoverlabel: {bgcolor: css("--card"), font: {color: css("--text"), size: 12}},
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
  };
}

function chartTable(chart) {
  const xs = [...new Set(chart.series.flatMap((line) => line.points.map(([x]) => x)))].sort((a, b) => a - b);
  const lookUp = chart.series.map((line) => new Map(line.points.map((point) => [point[0], point])));
  const rows = xs.map((x) => [chart.labels ? chart.labels[x] : number(x),
    ...lookUp.map((points) => points.has(x) ? valueText(chart, ...points.get(x).slice(1)) : "")]);
  return table([chart.x_label, ...chart.series.map((line) => line.name)], rows, "numbers");
}

function drawChart(chart) {
  const plot = el("div", {class: "plot", role: "img", "aria-label": `${chart.title}; the numbers are in the table below`});
  redraws.push(() => Plotly.react(plot, chart.series.map((line, place) => trace(chart, line, place)), layout(chart), {responsive: true, displayModeBar: false}));
  const caption = el("figcaption", {}, el("h3", {}, chart.title), ...(chart.note ? [el("p", {}, chart.note)] : []));
  return el("figure", {}, caption, plot, folded("Numbers", () => chartTable(chart)));
}

const redraw = () => redraws.forEach((draw) => draw());

// --- tables ---------------------------------------------------------------------------------------------------------

function table(head, rows, kind) {
  const titles = head.length ? [el("thead", {}, el("tr", {}, ...head.map((title) => el("th", {scope: "col"}, title))))] : [];
  const body = rows.map((row) => el("tr", {}, ...row.map((cell) => el("td", {}, cell))));
  return el("div", {class: "scroll", tabindex: 0}, el("table", {class: kind}, ...titles, el("tbody", {}, ...body)));
}

// What is folded is made when it is opened: a page with many curves stays light.
function folded(title, content) {
  const details = el("details", {}, el("summary", {}, title));
  details.addEventListener("toggle", () => { if (details.open && details.children.length === 1) details.append(content()); });
  return details;
}

// --- games ----------------------------------------------------------------------------------------------------------

let shown = [], current = -1;

function outcomeMark(outcome) {
  return el("span", {class: "outcome", style: `--dot: var(--c${data.game.outcomes[outcome] % PALETTE})`}, outcome);
}

const lengthText = (game) => `${game.length} message${game.length === 1 ? "" : "s"}`;

function sourceText(game) {
  const source = data.sources[game.source];
  return data.group === "file" ? source.group : `epoch ${source.group}, ${source.kind}`;
}

function listItem(game, place) {
  const item = el("li", {role: "option", id: `item-${place}`, "aria-selected": "false"},
    el("span", {class: "word"}, game.word), " ", outcomeMark(game.outcome),
    el("div", {class: "quiet"}, `${lengthText(game)} · ${sourceText(game)}`));
  item.addEventListener("click", () => select(place));
  return item;
}

function filterGames() {
  const [group, kind, outcome] = ["group", "kind", "outcome"].map((id) => byId(id).value);
  const search = byId("search").value.trim().toLowerCase();
  shown = data.games.filter((game) => {
    const source = data.sources[game.source];
    return (!group || source.group === group) && (!kind || source.kind === kind) && (!outcome || game.outcome === outcome)
      && game.word.toLowerCase().includes(search);
  });
  byId("list").replaceChildren(...shown.map(listItem));
  byId("found").textContent = `${shown.length.toLocaleString("en")} of ${data.games.length.toLocaleString("en")} games`;
  current = -1;
  byId("list").scrollTop = 0;
  select(0);
}

function select(place) {
  const list = byId("list");
  if (current >= 0) list.children[current].setAttribute("aria-selected", "false");
  current = shown.length ? Math.max(0, Math.min(place, shown.length - 1)) : -1;
  if (current < 0) {
    list.removeAttribute("aria-activedescendant");
    byId("game").replaceChildren(el("p", {class: "quiet"}, "No game in the sample is like that; widen the filters."));
    return;
  }
  const item = list.children[current];
  item.setAttribute("aria-selected", "true");
  list.setAttribute("aria-activedescendant", item.id);
  // Not scrollIntoView, which would move the whole page too.
  const top = item.offsetTop, bottom = top + item.offsetHeight;
  if (top < list.scrollTop) list.scrollTop = top;
  if (bottom > list.scrollTop + list.clientHeight) list.scrollTop = bottom - list.clientHeight;
  showGame(shown[current]);
}

function showGame(game) {
  const previous = el("button", {type: "button", id: "previous"}, "← previous"), next = el("button", {type: "button", id: "next"}, "next →");
  previous.disabled = current === 0;
  next.disabled = current === shown.length - 1;
  // The button is made anew with its game; the focus stays where it was.
  previous.addEventListener("click", () => { select(current - 1); byId("previous").focus(); });
  next.addEventListener("click", () => { select(current + 1); byId("next").focus(); });
  const labels = ["words", "seed"].filter((name) => name in game.labels).map((name) => ` · ${name}: ${game.labels[name]}`).join("");
  byId("game").replaceChildren(
    el("div", {class: "game-head"}, el("h3", {}, "target word: ", el("span", {class: "secret", id: "target"}, game.word)), el("span", {}, previous, " ", next)),
    el("p", {}, outcomeMark(game.outcome), el("span", {class: "quiet"}, ` · ${lengthText(game)} · at most ${game.max_turns} turns · game ${game.number} of ${sourceText(game)}${labels}`)),
    el("ol", {id: "messages"}, ...game.messages.map((message, i) => showMessage(game, message, i + 1))),
    ...(game.messages.length ? [] : [el("p", {class: "empty"}, "no messages")]));
}

function showMessage(game, message, place) {
  const decisive = game.outcome !== data.game.undecided && place === game.length;
  const player = message.role in game.labels ? `${game.labels[message.role]} · ` : "";
  const who = el("div", {class: "who"}, el("b", {}, message.role), `${player}message ${place}`);
  if (decisive) who.append(el("span", {class: "tag decides"}, `decides: ${game.outcome}`));
  if (place > game.length) who.append(el("span", {}, "not counted: after the end of the game"));
  if (message.cut_off) who.append(el("span", {}, "cut off at the token limit"));
  const parts = message.parts.map(([kind, text]) => kind ? el("span", {class: kind}, text) : text);
  const text = message.parts.some(([, part]) => part.trim()) ? el("div", {class: "text"}, ...parts) : el("div", {class: "empty"}, "(empty message)");
  if (message.hidden) text.append(el("span", {class: "quiet"}, ` … ${message.hidden.toLocaleString("en")} more characters`));
  return el("li", {class: `message ${message.role === data.game.roles[0] ? "first" : "second"}${decisive ? " decisive" : ""}${place > game.length ? " after" : ""}`}, who, text);
}

function fillSelect(id, values, all) {
  byId(id).append(el("option", {value: ""}, all), ...values.map((value) => el("option", {value}, value)));
  byId(id).addEventListener("change", filterGames);
  byId(id).parentElement.hidden = values.length < 2;
}

function setUpBrowser() {
  byId("group-label").textContent = data.group;
  const groups = [...new Set(data.sources.map((source) => source.group))];
  fillSelect("group", data.group === "file" ? groups : groups.sort((a, b) => a - b), "all");
  fillSelect("kind", [...new Set(data.sources.map((source) => source.kind))], "self-play and evaluation");
  fillSelect("outcome", Object.keys(data.game.outcomes), "any");
  byId("search").addEventListener("input", filterGames);
  const parts = data.sources.map((source, i) => `${sourceText({source: i})}: ${source.sampled.toLocaleString("en")} of ${source.games.toLocaleString("en")}`);
  byId("sample").textContent = "A random sample, spread evenly over the outcomes as far as there are games: outcomes are not as frequent "
    + `here as above. ${parts.join("; ")}.`;
  const steps = {ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10, Home: -Infinity, End: Infinity};
  byId("list").addEventListener("keydown", (event) => {
    if (event.key in steps) { event.preventDefault(); select(current + steps[event.key]); }
  });
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
    if (event.key === "j") select(current + 1);
    if (event.key === "k") select(current - 1);
    if (event.key === "/") { event.preventDefault(); byId("search").focus(); }
  });
  filterGames();
}

// --- the page -------------------------------------------------------------------------------------------------------

function setUpPage() {
  document.title = `SPAG: ${data.name}`;
  byId("name").textContent = data.group === "file" ? `Games of ${data.name}` : `SPAG run ${data.name}`;
  byId("made").textContent = `${data.game.title}; report of ${data.made}`;
  byId("how-counted").textContent = data.game.how_counted;
  byId("headlines").append(...data.headlines.map((text) => el("p", {class: "headline"}, text)));
  byId("missing").hidden = !data.missing.length;
  byId("missing").lastElementChild.append(...data.missing.map((text) => el("li", {}, text)));
  for (const section of ["match", "play", "learning", "imitation"]) {
    const charts = data.charts.filter((chart) => chart.section === section), tables = data.tables.filter((one) => one.section === section);
    byId(section).hidden = !charts.length;
    byId(section).append(el("div", {class: "charts"}, ...charts.map(drawChart)));
    byId(section).append(...tables.map((one) => el("div", {class: "card"}, el("h3", {}, one.title), table(one.head, one.rows, "numbers"))));
  }
  byId("settings").hidden = !data.settings.length;
  byId("settings").append(...data.settings.map(({title, rows}, place) => {
    const details = folded(title, () => table([], rows, "settings"));
    details.open = place === 0;
    return details;
  }));
  byId("browse").hidden = !data.games.length;
  for (const section of document.querySelectorAll("section:not([hidden])")) {
    section.prepend(el("h2", {}, section.dataset.title));
    byId("nav").append(el("a", {href: `#${section.id}`}, section.dataset.title));
  }
  byId("footer").textContent = "Made by tools/report.py; this file is all there is to it and loads nothing.";
}

setUpPage();
redraw();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
if (data.games.length) setUpBrowser();
