// What is held, and is it worth its room: bytes sent against bytes generated, how full the tables are, how weights and ages
// are spread, and one sample.
import {get} from "../api.js";
import {lineOf, makeChart} from "../charts.js";
import {withGaps} from "../curves.js";
import {fill, h, patch} from "../dom.js";
import {bytes, count, duration, figure, NONE, share, until} from "../format.js";
import {column, term} from "../help.js";
import {choice, every, facts, showProblem, table} from "../parts.js";
import {RANGES, spanOf} from "../ranges.js";
import {remember} from "../router.js";
import {makeDistribution} from "./distribution.js";
import {makeSample} from "./sample.js";

const IS_HELD = /^table\.(.+)\.held_bytes$/;
const IS_NODE = /^node\.(.+)\.memory_bytes$/;

export function openMemory({root, parameters, stream, signal}) {
  const state = Object.fromEntries(parameters);
  const message = h("div");
  const cards = h("div.grid");
  const away = h("div");
  const held = makeChart({title: "Held by tables", unit: "bytes", format: bytes, sync: "memory"});
  const nodes = makeChart({title: "Memory of the nodes", unit: "bytes", format: bytes, sync: "memory"});
  const sent = makeChart({title: "Recorded and received", unit: "bytes in all", format: bytes, sync: "memory"});
  const lost = makeChart({title: "Caches that were not stored", unit: "in all", format: count, sync: "memory"});
  const batches = makeChart({title: "Batches", unit: "share of weight", format: share, top: 1, sync: "memory"});
  const charts = [held, batches, nodes, sent, lost];
  signal.addEventListener("abort", () => charts.forEach((chart) => chart.close()));
  const range = choice("Range", RANGES, state.range ?? "300", (chosen) => {
    state.range = chosen;
    remember({range: chosen});
    refresh();
  });
  const spread = makeDistribution();
  const sample = makeSample(signal);
  const tables = h("div.bar");
  fill(root, away, cards, tables, spread.element, sample.element, h("div.bar", h("h2", "Over time"), range), message,
    h("div.grid.wide", charts.map((chart) => chart.element)));
  const look = every(5, signal, stream, async () => {
    try {
      spread.set(await get("distribution", {table: state.table}, signal));
    } catch (error) {
      if (error.name !== "AbortError") spread.fail(error);
    }
  });
  const choose = (name) => {
    state.table = name;
    remember({table: name});
    look();
    sample.show(name);
  };
  sample.show(state.table);
  let names = "";
  const drawTables = (found) => {
    if (found.join("\n") === names) return;
    names = found.join("\n");
    fill(tables, found.length > 1 && choice("Table", found.map((name) => [name, `Table ${name}`]), state.table ?? found[0], choose));
  };
  const refresh = every(3, signal, stream, async () => {
    try {
      const all = await get("figures", {}, signal);
      const [ofTables, ofNodes] = [IS_HELD, IS_NODE].map((kind) => all.filter((name) => kind.test(name)));
      const name = [...ofTables, ...ofNodes, ...[SENT, LOST, BATCHES].flatMap(Object.keys)];
      const found = await get("curves", {name, points: 300, ...spanOf(state, stream)}, signal);
      const lines = (names) => Object.entries(names).map(([key, title]) => lineOf(found, key, title));
      const show = (chart, names) => chart.set(...withGaps(found, lines(names)), {away: found.away});
      show(held, titles(ofTables, IS_HELD));
      show(nodes, titles(ofNodes, IS_NODE));
      show(sent, SENT);
      show(lost, LOST);
      show(batches, BATCHES);
      showProblem(message, null);
    } catch (error) {
      if (error.name !== "AbortError") showProblem(message, error);
    }
  });
  return {
    update(overview) {
      patch(away, awayNote(overview));
      patch(cards, worth(overview), overview.tables.map((row) => tableCard(row, overview)));
      drawTables(overview.tables.map(({name}) => name));
    },
  };
}

const SENT = {generated_bytes: "recorded", received_bytes: "received"};
const LOST = {skipped_caches: "skipped", rejected_caches: "rejected", lost_caches: "lost"};

const BATCHES = {sample_effective: "distinct weight", sample_left_out: "left out"};

const titles = (names, kind) => Object.fromEntries(names.map((name) => [name, name.match(kind)[1]]));

const serversAway = ({nodes}) => nodes.filter(({role, state}) => role === "server" && state === "down").map(({name, url}) => name || url);

/** Figures below are of the servers that answer: of half of a cluster they would look like all of it. */
function awayNote(overview) {
  const names = serversAway(overview);
  const text = names.length === 1 ? `${names[0]} does not answer: what it holds is in no figure below.` : `${names.join(", ")} do not answer: what they hold is in no figure below.`;
  return names.length > 0 && h("p.away-note", {role: "status"}, h("b", "Incomplete. "), text);
}

function worth({totals, rates, forecast}) {
  const factor = totals.generated_bytes ? totals.received_bytes / totals.generated_bytes : null;
  return h("section.card", h("h2", "Bytes"), h("p.answer", factor === null ? "Nothing was sent yet" : `Each recorded byte is sent ${times(factor)}`), facts([
    [term("Totals.generated_bytes", "recorded by actors"), bytes(totals.generated_bytes)],
    [term("Totals.received_bytes", "received by servers"), bytes(totals.received_bytes)],
    [term("bytes_factor", "sent for each byte recorded"), factor === null ? NONE : `${figure(factor)} bytes`],
    ["arriving now", `${bytes(rates.received_bytes)}/s`],
    ["memory is full", until(forecast.memory_full, "now: the oldest makes room")],
    ["disk is full", until(forecast.disk_full, "now")],
    [term("Totals.applied", "priorities set"), count(totals.applied)],
    [term("Totals.stale", "too late"), count(totals.stale)],
  ]));
}

const times = (factor) => (factor > 0.95 && factor < 1.05 ? "once" : factor < 1 ? `in part: ${share(factor)}` : `${figure(factor)} times on average`);

const drawnOf = (row) => [
  [term("TableRow.held_caches", `${row.holds} held`), count(row.held_caches)],
  [term("TableRow.unused_samples", `${row.unit} left`), count(row.unused_samples)],
  [term("TableRow.samples", "samples drawn"), count(row.samples)],
  [term("TableRow.overwritten_caches", "overwritten"), count(row.overwritten_caches)],
  [term("TableRow.waited", "learners waited"), duration(row.waited)],
  [term("TableRow.samples_per_insert", "samples per insert, wanted"), row.samples_per_insert_target ? figure(row.samples_per_insert_target) : "not set"],
];

/** Each entry that arrived is held, or counted once as one of these. */
const takenOf = (row) => [
  [term("TableRow.held_caches", "fragments held"), count(row.held_caches)],
  [term("TableRow.unused_samples", "entries held"), count(row.unused_samples)],
  [term("TableRow.samples", "entries taken"), count(row.samples)],
  [term("TableRow.passed_over_samples", "entries too old"), count(row.passed_over_samples)],
  [term("TableRow.overwritten_caches", "entries overwritten"), count(row.overwritten_samples)],
  [term("TableRow.split_fragments", "fragments split"), count(row.split_fragments)],
  [term("TableRow.waited", "learners waited"), duration(row.waited)],
];

function tableCard(row, overview) {
  const isByBytes = row.full === row.held_bytes / row.byte_limit;
  const room = isByBytes ? bytes(row.byte_limit) : `${count(row.capacity)} ${row.room}`;
  const full = row.full !== null && `, ${share(row.full)} of ${room}`;
  const answering = Object.keys(row.facts).length;
  const missing = serversAway(overview).length;
  return h("section.card", h("h2", `Table ${row.name}`),
    h("p.answer", `${bytes(row.held_bytes)} held${full || ", without a limit"}`, missing > 0 && h("span.state.unready", ` by ${answering} of ${answering + missing} servers`)),
    full && h("progress", {max: 1, value: row.full, "aria-label": `How full ${row.name} is`}),
    facts([...(row.is_taken ? takenOf(row) : drawnOf(row)), [term("TableRow.missed_batches"), count(row.missed_batches)]]), ...[row.rate.draws_wait, row.rate.inserts_wait].filter(Boolean).map((text) => h("p", text)), perServer(row));
}

const OF_SERVER = [
  {title: "Server", value: ([server]) => h("b", server)},
  ...["held_caches", "held_bytes", "samples"].map((name) => column(`TableRow.${name}`)).map((each) => ({...each, value: ([, told]) => each.value(told)})),
];

/** The same at each of its servers, where there are several; the node's own page has all that it says. */
function perServer({facts: found, name}) {
  const rows = Object.entries(found);
  return rows.length > 1 && h("details", h("summary", `At each of ${count(rows.length)} servers`), table(`${name} at its servers`, OF_SERVER, rows));
}
