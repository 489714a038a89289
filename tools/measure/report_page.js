"use strict";
// Models wrote the texts, so they reach the page as text nodes or attributes, never as markup.
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const list = byId("list");
let shown = [];

function el(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

function filterGames() {
  const source = byId("source").value, outcome = byId("outcome").value, search = byId("search").value.trim().toLowerCase();
  shown = data.games.filter((game) => (!source || game.source === +source) && (!outcome || game.outcome === outcome)
    && game.word.toLowerCase().includes(search));
  list.replaceChildren(...shown.map((game, i) => el("option", {value: i}, `${game.word} · ${game.outcome}, ${messages(game)}`)));
  list.selectedIndex = shown.length ? 0 : -1;
  byId("count").textContent = `${shown.length} of ${data.games.length} games`;
  showGame();
}

function messages(game) {
  return `${game.length} message${game.length === 1 ? "" : "s"}`;
}

function showGame() {
  const game = shown[list.selectedIndex];
  if (!game) return byId("game").replaceChildren("No game of the sample matches these filters.");
  byId("game").replaceChildren(
    el("h3", {}, "target word: ", el("span", {class: "secret", id: "target"}, game.word)),
    el("p", {class: "quiet"}, el("b", {}, game.outcome),
      ` · ${messages(game)} · game ${game.number} of ${data.sources[game.source]}`),
    ...game.messages.map(showMessage));
}

function showMessage({kinds, notes, parts}) {
  const pieces = parts.map(([kind, text]) => kind ? el("span", {class: kind}, text) : text);
  return el("div", {class: `message ${kinds}`}, el("div", {class: "quiet"}, notes), el("div", {class: "text"}, ...pieces));
}

byId("source").append(...data.sources.map((name, i) => el("option", {value: i}, name)));
byId("outcome").append(...data.outcomes.map((name) => el("option", {value: name}, name)));
for (const id of ["source", "outcome"]) byId(id).addEventListener("change", filterGames);
byId("search").addEventListener("input", filterGames);
list.addEventListener("change", showGame);
filterGames();
