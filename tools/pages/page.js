"use strict";
// All texts reach the page as text nodes or attributes, never as markup: messages and words are not to be trusted.
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);

function el(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

document.querySelectorAll(".plot").forEach((plot, i) => {
  const {data: traces, layout} = data.charts[i];
  layout.dragmode = matchMedia("(pointer: coarse)").matches ? false : "zoom";
  Plotly.newPlot(plot, traces, layout, {responsive: true, displayModeBar: false});
});

// --- the browser of games -------------------------------------------------------------------------------------------

const list = byId("list");
let shown = [];

const messages = (count) => `${count} message${count === 1 ? "" : "s"}`;

function filterGames() {
  const source = byId("source").value, outcome = byId("outcome").value, search = byId("search").value.trim().toLowerCase();
  shown = data.games.filter((game) => (!source || game.source === +source) && (!outcome || game.outcome === outcome)
    && game.word.toLowerCase().includes(search));
  list.replaceChildren(...shown.map((game, i) => el("option", {value: i}, `${game.word} · ${game.outcome}, ${messages(game.length)}`)));
  list.selectedIndex = shown.length ? 0 : -1;
  byId("found").textContent = `${shown.length.toLocaleString("en")} of ${data.games.length.toLocaleString("en")} games`;
  showGame();
}

function showGame() {
  const game = shown[list.selectedIndex];
  if (!game) {
    byId("game").replaceChildren("No game in the sample is like that; widen the filters.");
    return;
  }
  const labels = ["words", "seed"].filter((name) => name in game.labels).map((name) => ` · ${name}: ${game.labels[name]}`);
  byId("game").replaceChildren(
    el("h3", {}, "target word: ", el("span", {class: "secret", id: "target"}, game.word)),
    el("p", {class: "quiet"}, el("b", {style: `color: ${data.outcomes[game.outcome]}`}, game.outcome),
      ` · ${messages(game.length)} · game ${game.number} of ${data.sources[game.source]}`, ...labels),
    ...game.messages.map((message, i) => showMessage(game, message, i + 1)));
}

function showMessage(game, message, place) {
  const decisive = game.outcome !== data.undecided && place === game.length, late = place > game.length;
  const player = message.role in game.labels ? `, ${game.labels[message.role]}` : "";
  const notes = [[decisive, `decides: ${game.outcome}`], [late, "not counted: after the end of the game"],
    [message.cut_off, "cut off at the token limit"]].filter(([holds]) => holds).map(([, note]) => ` · ${note}`);
  const parts = message.parts.map(([kind, text]) => kind ? el("span", {class: kind}, text) : text);
  if (!message.parts.some(([, text]) => text.trim())) parts.push(el("i", {}, "(empty message)"));
  const kind = `message ${message.role === data.first_role ? "first" : "second"}${decisive ? " decisive" : ""}${late ? " late" : ""}`;
  return el("div", {class: kind}, el("div", {class: "quiet"}, el("b", {}, message.role), `${player}, message ${place}`, ...notes),
    el("div", {class: "text"}, ...parts));
}

byId("source").append(...data.sources.map((name, i) => el("option", {value: i}, name)));
byId("outcome").append(...Object.keys(data.outcomes).map((name) => el("option", {value: name}, name)));
for (const id of ["source", "outcome"]) byId(id).addEventListener("change", filterGames);
byId("search").addEventListener("input", filterGames);
list.addEventListener("change", showGame);
filterGames();
