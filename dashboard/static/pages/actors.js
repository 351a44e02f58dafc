// Every actor, by pages as the dashboard sorts and filters them; and one of them with all that is known.
import {get} from "../api.js";
import {fill, h, patch, say} from "../dom.js";
import {ago, bytes, clock, count, figure, raw, words} from "../format.js";
import {cell, choice, empty, every, facts, problem, searchField, table} from "../parts.js";
import {address, remember} from "../router.js";

const LIMIT = 100;
const now = () => Date.now() / 1000;
const COLUMNS = [
  {name: "label", title: "Actor", value: (row) => actorLink(row.client, row.label)},
  {name: "state", title: "State", value: (row) => h(`span.state.${row.state}`, row.state)},
  {name: "host", title: "Host", value: (row) => row.host},
  {name: "home", title: "Server", value: (row) => row.home},
  {name: "table", title: "Table", value: (row) => row.table},
  {name: "last_seen", title: "Last seen", value: (row) => ago(row.last_seen, now()), number: true},
  {name: "episodes", title: "Episodes", value: (row) => count(row.episodes), number: true},
  {name: "steps", title: "Steps", value: (row) => count(row.steps), number: true},
  {name: "steps_per_second", title: "Steps/s", value: (row) => figure(row.steps_per_second), number: true},
  {name: "return_mean", title: "Mean return", value: (row) => figure(row.return_mean), number: true},
  {name: "accepted_caches", title: "Caches", value: (row) => count(row.accepted_caches), number: true},
  {name: "skipped_caches", title: "Skipped", value: (row) => count(row.skipped_caches), number: true},
  {name: "received_bytes", title: "Bytes sent", value: (row) => bytes(row.received_bytes), number: true},
];

const actorLink = (client, text) => h("a.mono", {href: address("actors", {id: client})}, text || client.slice(0, 8));

export function openActors({root, parameters, stream, signal}) {
  let shown = new AbortController();
  signal.addEventListener("abort", () => shown.abort());
  const route = (state) => {
    shown.abort();
    shown = new AbortController();
    const id = state.get("id");
    if (id) openOne(root, id, stream, shown.signal);
    else openAll(root, state, stream, shown.signal);
  };
  route(parameters);
  return {route};
}

function openAll(root, parameters, stream, signal) {
  const state = {sort: "label", order: "up", state: "", text: "", offset: "0", ...Object.fromEntries(parameters)};
  const message = h("span.quiet", {role: "status"});
  const head = h("tr");
  const body = h("tbody");
  const before = h("button", {type: "button", click: () => change({offset: Math.max(0, state.offset - LIMIT)})}, "← Before");
  const after = h("button", {type: "button", click: () => change({offset: Number(state.offset) + LIMIT})}, "After →");
  const pager = h("span.pager", before, after);
  const bar = h("div.bar",
    searchField("Id, label or host", state.text, (text) => change({text, offset: "0"})),
    choice("State", [["", "every state"], ["active", "active"], ["silent", "silent"], ["gone", "gone"]], state.state,
      (chosen) => change({state: chosen, offset: "0"})),
    message, pager);
  fill(root, bar, h("div.scroll.tall", {tabindex: "0", role: "region", "aria-label": "Actors"},
    h("table", h("caption.hidden-text", "Actors"), h("thead", head), body)));

  const change = (changes) => {
    Object.assign(state, changes);
    remember(state);
    refresh();
  };
  const sort = (name) => change({sort: name, order: state.sort === name && state.order === "down" ? "up" : "down", offset: "0"});
  const refresh = every(3, signal, stream, async () => {
    drawHead(head, state, sort);
    try {
      const page = await get("actors", {...state, limit: LIMIT}, signal);
      drawRows(body, page, state);
      const first = Number(state.offset);
      say(message, page.matching ? `${first + 1}–${first + page.rows.length} of ${count(page.matching)}` +
        (page.matching < page.total ? ` (of ${count(page.total)} actors)` : " actors") : "");
      pager.hidden = page.matching <= LIMIT;
      before.disabled = first === 0;
      after.disabled = first + page.rows.length >= page.matching;
    } catch (error) {
      if (error.name !== "AbortError") fill(body, h("tr", h("td", {colspan: COLUMNS.length}, problem(error))));
    }
  });
}

function drawHead(head, state, sort) {
  const order = (name) => (state.sort !== name ? null : state.order === "up" ? "ascending" : "descending");
  if (head.childElementCount) {
    COLUMNS.forEach(({name}, index) => {
      const found = order(name);
      if (found) head.children[index].setAttribute("aria-sort", found);
      else head.children[index].removeAttribute("aria-sort");
    });
    return;
  }
  fill(head, COLUMNS.map(({name, title, number}) => h(`th${number ? ".number" : ""}`,
    {scope: "col", "aria-sort": order(name)}, h("button", {type: "button", click: () => sort(name)}, title))));
}

function drawRows(body, page, state) {
  const isFiltered = state.text || state.state;
  const nothing = isFiltered ? "No actor is like this. Take a filter away." :
    "No actor has said anything in this run yet. Start some: memoire.connect(address), or make demo.";
  patch(body, page.rows.length ? page.rows.map((row) => h("tr", COLUMNS.map((column) => cell(column, row)))) :
    h("tr", h("td", {colspan: COLUMNS.length}, empty(nothing))));
}

function openOne(root, id, stream, signal) {
  const back = h("p", h("a", {href: address("actors")}, "← All actors"));
  const place = h("div", h("p.quiet", "Loading …"));
  fill(root, back, place);
  every(3, signal, stream, async () => {
    try {
      patch(place, detail(await get(`actors/${encodeURIComponent(id)}`, {}, signal)));
    } catch (error) {
      if (error.name !== "AbortError") fill(place, problem(error), h("p.quiet", `Its id is ${id}; it may be of another run.`));
    }
  });
}

function detail({actor, homes, facts: told, episodes}) {
  const main = facts([
    ["state", h(`span.state.${actor.state}`, actor.state)],
    ["id", h("span.mono", actor.client)],
    ["host", actor.host],
    ["table", actor.table],
    ["first seen", clock(actor.first_seen)],
    ["last seen", ago(actor.last_seen, now())],
    ["episodes", count(actor.episodes)],
    ["steps", `${count(actor.steps)} (${figure(actor.steps_per_second)}/s)`],
    ["mean return", figure(actor.return_mean)],
  ]);
  const ways = facts([
    ["caches pushed", count(actor.pushed_caches)],
    ["accepted", count(actor.accepted_caches)],
    ["rejected", count(actor.rejected_caches)],
    ["lost on the way", count(actor.lost_caches)],
    ["skipped for want of credit", count(actor.skipped_caches)],
    ["bytes generated", bytes(actor.generated_bytes)],
    ["bytes sent", bytes(actor.received_bytes)],
    ["log lines dropped", count(actor.dropped_lines)],
  ]);
  const logs = h("a", {href: address("logs", {label: actor.label})}, "its log lines");
  return [
    h("div.grid", h("section.card", h("h2", "Actor ", h("span.mono", actor.label)), main, h("p", logs)),
      h("section.card", h("h2", "What it sent"), ways),
      h("section.card", h("h2", "What its server knows"), plainFacts(told))),
    h("h2", "Newest episodes"),
    episodes.length ? h("div.short", table("Newest episodes", EPISODES, episodes)) : empty("It has not ended an episode yet."),
    h("h2", "Its account at each server"),
    homes.length ? table("Accounts", accountColumns(homes), homes) : empty("No server has an account of it."),
  ];
}

const EPISODES = [
  {title: "Ended", value: (row) => clock(row.time)},
  {title: "Length", value: (row) => count(row.length), number: true},
  {title: "Return", value: (row) => figure(row.returned), number: true},
];

function accountColumns(homes) {
  return Object.keys(homes[0]).map((name) => ({title: words(name), value: (row) => plain(name, row[name])}));
}

/** What is not shown beside it already. */
function plainFacts(found) {
  const rest = Object.entries(found ?? {}).filter(([name]) => !["client", "label", "host", "table"].includes(name));
  return facts(rest.map(([name, value]) => [words(name), plain(name, value)]));
}

function plain(name, value) {
  if (value === null || typeof value !== "object") return raw(name, value);
  return Object.entries(value).map(([each, inner]) => `${words(each)} ${raw(each, inner)}`).join(", ") || "none";
}
