// Actors: the list, which the dashboard sorts, filters and divides into pages; and the page of one actor.
import {get} from "../api.js";
import {makeChart} from "../charts.js";
import {fill, h, patch, say} from "../dom.js";
import {ago, bytes, clock, count, figure, NONE, raw, words} from "../format.js";
import {column, explained, term} from "../help.js";
import {histogram} from "../histogram.js";
import {cell, choice, empty, every, facts, problem, routed, searchField, table, tickMenu} from "../parts.js";
import {address, remember} from "../router.js";

const LIMIT = 100;
const MOST_EPISODES = 1000; // in the curves of one actor
const NEWEST = 20; // number of episodes in the table
const now = () => Date.now() / 1000;
const text = {number: false, format: null};
const COLUMNS = [
  {name: "label", title: "Actor", value: (row) => actorLink(row.client, row.name || row.label)},
  column("ActorRow.client", {...text, value: (row) => h("span.mono", row.client), isExtra: true}),
  column("ActorRow.state", {...text, value: (row) => h(`span.state.${row.state}`, row.state)}),
  ...["host", "home", "table"].map((name) => column(`ActorRow.${name}`, {...text, value: (row) => row[name]})),
  {name: "first_seen", title: "First seen", value: (row) => clock(row.first_seen), number: true, isExtra: true},
  {name: "last_seen", title: "Last seen", value: (row) => ago(row.last_seen, now()), number: true},
  ...["episodes", "steps", "steps_per_second", "return_recent"].map((name) => column(`ActorRow.${name}`)),
  ...["return_mean", "pushed_caches"].map((name) => column(`ActorRow.${name}`, {isExtra: true})),
  column("ActorRow.accepted_caches"),
  ...["rejected_caches", "lost_caches"].map((name) => column(`ActorRow.${name}`, {isExtra: true})),
  column("ActorRow.skipped_caches"),
  column("ActorRow.generated_bytes", {isExtra: true}),
  column("ActorRow.received_bytes"),
  column("ActorRow.dropped_lines", {isExtra: true}),
];
const USUAL = COLUMNS.filter(({isExtra}) => !isExtra).map(({name}) => name);
const SPREAD = "steps_per_second"; // figure of the histogram if the list is sorted by a column without figures

/** Columns named in an address ("label.steps"), in their order; the usual ones if none is named. */
function shownColumns(named) {
  const wanted = named ? named.split(".") : USUAL;
  const columns = COLUMNS.filter(({name}) => wanted.includes(name));
  return columns.length ? columns : COLUMNS.filter(({name}) => USUAL.includes(name));
}

const actorLink = (client, text) => h("a.mono", {href: address("actors", {id: client})}, text || client.slice(0, 8));

export function openActors({root, parameters, stream, signal}) {
  const route = routed(signal, (state, own) => {
    const id = state.get("id");
    return id ? openOne(root, id, stream, own) : openAll(root, state, stream, own);
  });
  route(parameters);
  return {route};
}

function openAll(root, parameters, stream, signal) {
  const state = {sort: "label", order: "up", state: "", text: "", offset: "0", columns: "", ...Object.fromEntries(parameters)};
  const message = h("span.quiet", {role: "status"});
  const spread = h("div");
  const head = h("tr");
  const body = h("tbody");
  const before = h("button", {type: "button", click: () => change({offset: Math.max(0, state.offset - LIMIT)})}, "← Previous");
  const after = h("button", {type: "button", click: () => change({offset: Number(state.offset) + LIMIT})}, "Next →");
  const pager = h("span.pager", before, after);
  const bar = h("div.bar",
    searchField("Name, id, label or host", state.text, (text) => change({text, offset: "0"})),
    choice("State", [["", "all states"], ["active", "active"], ["silent", "silent"], ["lost", "lost"], ["gone", "gone"]], state.state,
      (chosen) => change({state: chosen, offset: "0"})),
    columnMenu(state.columns, (columns) => change({columns})), message, pager);
  fill(root, spread, bar, h("div.scroll.tall", {tabindex: "0", role: "region", "aria-label": "Actors"},
    h("table", h("caption.hidden-text", "Actors"), h("thead", head), body)));

  const change = (changes) => {
    Object.assign(state, changes);
    remember(state);
    refresh();
  };
  const sort = (name) => change({sort: name, order: state.sort === name && state.order === "down" ? "up" : "down", offset: "0"});
  const refresh = every(3, signal, stream, async () => {
    const columns = shownColumns(state.columns);
    drawHead(head, columns, state, sort);
    const {columns: _, ...asked} = state;
    try {
      const by = COLUMNS.find(({name, format}) => name === state.sort && format) ?? COLUMNS.find(({name}) => name === SPREAD);
      const [page, distribution] = await Promise.all([get("actors", {...asked, limit: LIMIT}, signal), get("spread", {figure: by.name}, signal)]);
      drawSpread(spread, distribution, by);
      drawRows(body, columns, page, state);
      const first = Number(state.offset);
      say(message, page.matching ? `${first + 1}–${first + page.rows.length} of ${count(page.matching)}` +
        (page.matching < page.total ? ` (of ${count(page.total)} actors)` : " actors") : "");
      pager.hidden = page.matching <= LIMIT;
      before.disabled = first === 0;
      after.disabled = first + page.rows.length >= page.matching;
    } catch (error) {
      if (error.name !== "AbortError") fill(body, h("tr", h("td", {colspan: columns.length}, problem(error))));
    }
  });
}

/** A menu of the columns; `change` gets their names as in the address. */
function columnMenu(named, change) {
  const shown = new Set(shownColumns(named).map(({name}) => name));
  return tickMenu("Columns", COLUMNS.map(({name, title}) => ({name, label: title})), [...shown], (name, isShown) => {
    if (isShown) shown.add(name);
    else shown.delete(name);
    const names = COLUMNS.map((column) => column.name).filter((each) => shown.has(each));
    change(names.join() === USUAL.join() ? "" : names.join("."));
  });
}

/** Draw the distribution of a figure over the actors, in which outliers stand out. */
function drawSpread(place, {actors, median, mean, histogram: bars}, {title, format}) {
  if (actors < 3) return fill(place);
  patch(place, h("section.card.spread", h("h2", `${title} of ${count(actors)} actors`),
    h("p.quiet", `median ${format(median)}, mean ${format(mean)}, from ${format(bars.least)} to ${format(bars.greatest)}`),
    histogram(bars, `${title} of the actors`, format)));
}

function drawHead(head, columns, state, sort) {
  const order = (name) => (state.sort !== name ? null : state.order === "up" ? "ascending" : "descending");
  const names = columns.map(({name}) => name).join();
  if (head.dataset.names === names) {
    columns.forEach(({name}, index) => {
      const direction = order(name);
      if (direction) head.children[index].setAttribute("aria-sort", direction);
      else head.children[index].removeAttribute("aria-sort");
    });
    return;
  }
  head.dataset.names = names;
  fill(head, columns.map(({name, title, number, term: named}) => h(`th${number ? ".number" : ""}`,
    {scope: "col", "aria-sort": order(name)}, h("button", {type: "button", click: () => sort(name), title: explained(named ?? name)}, title))));
}

function drawRows(body, columns, page, state) {
  const isFiltered = state.text || state.state;
  const nothing = isFiltered ? "No actor matches. Remove a filter." :
    "No actor has recorded anything in this run yet. An actor connects with memoire.connect(ADDRESS); memoire demo starts some.";
  patch(body, page.rows.length ? page.rows.map((row) => h("tr", columns.map((column) => cell(column, row)))) :
    h("tr", h("td", {colspan: columns.length}, empty(nothing))));
}

function openOne(root, id, stream, signal) {
  const back = h("p", h("a", {href: address("actors")}, "← All actors"));
  const [first, rest] = [h("div", h("p.quiet", "Loading …")), h("div")];
  const [returns, lengths] = [["Return of its episodes", figure], ["Length of its episodes", count]].map(
    ([title, format]) => makeChart({title, format, sync: "actor"}));
  signal.addEventListener("abort", () => [returns, lengths].forEach((chart) => chart.close()));
  fill(root, back, first, h("div.grid.wide", returns.element, lengths.element), rest);
  every(3, signal, stream, async () => {
    const [detail, episodes] = await Promise.all([get(`actors/${encodeURIComponent(id)}`, {}, signal),
      get("episodes", {client: id, limit: MOST_EPISODES}, signal)]);
    const inOrder = episodes.sort((a, b) => a.time - b.time);
    const times = inOrder.map(({time}) => time);
    returns.set(times, [{name: "return", values: inOrder.map(({returned}) => returned)}]);
    lengths.set(times, [{name: "length", values: inOrder.map(({length}) => length)}]);
    patch(first, about(detail));
    patch(rest, tables(detail));
  }, (error) => error && fill(first, problem(error), h("p.quiet", `The actor's id is ${id}; it may belong to another run.`)));
}

function about({actor}) {
  const main = facts([
    ["state", h(`span.state.${actor.state}`, actor.state)],
    ["id", h("span.mono", actor.client)],
    ["host", actor.host || NONE],
    ["table", actor.table || NONE],
    ["first seen", clock(actor.first_seen)],
    ["last seen", ago(actor.last_seen, now())],
    [term("Totals.episodes", "episodes"), count(actor.episodes)],
    [term("Totals.steps", "steps"), `${count(actor.steps)} (${figure(actor.steps_per_second)}/s)`],
    [term("ActorRow.return_recent", "return, last 20"), figure(actor.return_recent)],
    [term("ActorRow.return_mean", "return, whole run"), figure(actor.return_mean)],
  ]);
  const ways = facts([
    [term("Totals.pushed_caches", "caches pushed"), count(actor.pushed_caches)],
    [term("Totals.accepted_caches", "accepted"), count(actor.accepted_caches)],
    [term("Totals.rejected_caches", "rejected"), count(actor.rejected_caches)],
    [term("Totals.lost_caches", "lost"), count(actor.lost_caches)],
    [term("Totals.skipped_caches", "skipped"), count(actor.skipped_caches)],
    [term("Totals.generated_bytes", "recorded"), bytes(actor.generated_bytes)],
    [term("Totals.received_bytes", "received"), bytes(actor.received_bytes)],
    [term("Totals.dropped_lines", "log lines dropped"), count(actor.dropped_lines)],
  ]);
  const logs = h("a", {href: address("logs", {label: actor.label})}, "its log lines");
  return h("div.grid", h("section.card", h("h2", "Actor ", h("span.mono", actor.name || actor.label)), main, h("p", logs)),
    h("section.card", h("h2", "Data sent"), ways));
}

function tables({homes, episodes, facts: reported}) {
  return [
    h("h2", "Newest episodes"),
    episodes.length ? h("div.short", table("Newest episodes", EPISODES, episodes.slice(0, NEWEST))) : empty("The actor has not ended an episode yet."),
    h("h2", "Everything that servers report"),
    h("div.folds",
      h("details", h("summary", "Facts from its server"), plainFacts(reported)),
      h("details", h("summary", "Account at each server"), homes.length ? accounts(homes) : empty("No server has an account of this actor."))),
  ];
}

const EPISODES = [
  {title: "Ended", value: (row) => clock(row.time)},
  {title: "Length", value: (row) => count(row.length), number: true},
  {title: "Return", value: (row) => figure(row.returned), number: true},
];

/** A column for each server, so that many figures of few servers fit. */
function accounts(homes) {
  const names = Object.keys(homes[0]).filter((name) => name !== "home");
  const columns = homes.map((home) => ({title: home.home, value: (name) => plain(name, home[name]), number: true}));
  return h("div.short", table("Accounts", [{title: "Account", value: words}, ...columns], names));
}

const SHOWN = [
  "client", "label", "host", "table", "episodes", "steps", "first_seen", "last_seen", "returns_mean", "pushed_caches", "accepted_caches",
  "lost_caches", "received_bytes",
];

/** Facts that the page does not show elsewhere. */
function plainFacts(reported) {
  const rest = Object.entries(reported ?? {}).filter(([name]) => !SHOWN.includes(name));
  return facts(rest.map(([name, value]) => [words(name), plain(name, value)]));
}

function plain(name, value) {
  if (value === null || typeof value !== "object") return raw(name, value);
  return Object.entries(value).map(([each, inner]) => `${words(each)} ${raw(each, inner)}`).join(", ") || "none";
}
