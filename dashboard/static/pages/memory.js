// Memory: bytes recorded and sent, how full the tables are, the distributions of weights and ages, and one sample.
import {get} from "../api.js";
import {fill, h, patch} from "../dom.js";
import {bytes, count, duration, figure, NONE, share, until} from "../format.js";
import {column, term} from "../help.js";
import {histogram} from "../histogram.js";
import {makeOverTime, titled} from "../overtime.js";
import {choice, empty, every, facts, problem, table} from "../parts.js";
import {remember} from "../router.js";
import {makeSample} from "./sample.js";

const IS_HELD = /^table\.(.+)\.held_bytes$/;
const IS_NODE = /^node\.(.+)\.memory_bytes$/;

const CHARTS = [
  {title: "Held by tables", unit: "bytes", format: bytes},
  {title: "Batches", unit: "share of weight", format: share, top: 1},
  {title: "Memory of the nodes", unit: "bytes", format: bytes},
  {title: "Recorded and received", unit: "bytes in total", format: bytes},
  {title: "Caches that were not stored", unit: "in total", format: count},
];
const SENT = {generated_bytes: "recorded", received_bytes: "received"};
const LOST = {skipped_caches: "skipped", rejected_caches: "rejected", lost_caches: "lost"};
const BATCHES = {sample_effective: "distinct weight", sample_left_out: "left out"};
const linesOf = (names) => [titled(names, IS_HELD), BATCHES, titled(names, IS_NODE), SENT, LOST];

export function openMemory(page) {
  const {root, parameters, stream, signal} = page;
  const state = Object.fromEntries(parameters);
  const [away, cards, tables] = [h("div"), h("div.grid"), h("div.bar")];
  const spread = h("div.grid", h("p.quiet", "Loading …"));
  const sample = makeSample(signal);
  fill(root, away, cards, tables, h("section.block", spread), sample.element, makeOverTime({kinds: CHARTS, linesOf, sync: "memory"}, page));
  const look = every(5, signal, stream, async () => {
    const spreads = await get("distribution", {table: state.table}, signal);
    patch(spread, spreads.looked ? [size(spreads), weights(spreads), ages(spreads)] : h("section.card", empty("This table holds nothing that can be drawn now.")));
  }, (error) => error && fill(spread, h("section.card", problem(error))));
  const choose = (name) => {
    state.table = name;
    remember({table: name});
    look();
    sample.show(name);
  };
  sample.show(state.table);
  let names = "";
  const drawTables = (all) => {
    if (all.join("\n") === names) return;
    names = all.join("\n");
    fill(tables, all.length > 1 && choice("Table", all.map((name) => [name, `Table ${name}`]), state.table ?? all[0], choose));
  };
  return {
    update(overview) {
      patch(away, awayNote(overview));
      patch(cards, worth(overview), overview.tables.map((row) => tableCard(row, overview)));
      drawTables(overview.tables.map(({name}) => name));
    },
  };
}

const serversAway = ({nodes}) => nodes.filter(({role, state}) => role === "server" && state === "down").map(({name, url}) => name || url);

/** A note on servers that do not answer, without which the figures of the others would look like the whole cluster's. */
function awayNote(overview) {
  const names = serversAway(overview);
  const text = names.length === 1 ? `${names[0]} does not answer: the figures below do not include its data.` : `${names.join(", ")} do not answer: the figures below do not include their data.`;
  return names.length > 0 && h("p.away-note", {role: "status"}, h("b", "Incomplete. "), text);
}

function worth({totals, rates, forecast}) {
  const factor = totals.generated_bytes ? totals.received_bytes / totals.generated_bytes : null;
  return h("section.card", h("h2", "Bytes"), h("p.answer", factor === null ? "Nothing was sent yet" : `Each recorded byte is sent ${times(factor)}`), facts([
    [term("Totals.generated_bytes", "recorded by actors"), bytes(totals.generated_bytes)],
    [term("Totals.received_bytes", "received by servers"), bytes(totals.received_bytes)],
    [term("bytes_factor", "sent for each byte recorded"), factor === null ? NONE : `${figure(factor)} bytes`],
    ["arriving now", `${bytes(rates.received_bytes)}/s`],
    ["memory is full", until(forecast.memory_full, "now: new entries overwrite the oldest")],
    ["disk is full", until(forecast.disk_full, "now")],
    [term("Totals.applied", "priorities set"), count(totals.applied)],
    [term("Totals.stale", "priorities too late"), count(totals.stale)],
  ]));
}

const times = (factor) => (factor > 0.95 && factor < 1.05 ? "once" : factor < 1 ? `in part: ${share(factor)}` : `${figure(factor)} times on average`);

const drawnOf = (row) => [
  [term("TableRow.held_caches", `${row.holds} held`), count(row.held_caches)],
  [term("TableRow.unused_samples", `unused ${row.unit}`), count(row.unused_samples)],
  [term("TableRow.samples", "samples drawn"), count(row.samples)],
  [term("TableRow.overwritten_caches", "overwritten"), count(row.overwritten_caches)],
  [term("TableRow.waited", "learners waited"), duration(row.waited)],
  [term("TableRow.samples_per_insert", "samples per insert, target"), row.samples_per_insert_target ? figure(row.samples_per_insert_target) : "not set"],
];

/** Facts of a table that hands out each entry once: an arrived entry is held, taken, too old or overwritten. */
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
  ...["held_caches", "held_bytes", "samples"].map((name) => column(`TableRow.${name}`)).map((each) => ({...each, value: ([, stats]) => each.value(stats)})),
];

/** The same figures at each server, if there are several; the page of each node has all its figures. */
function perServer({facts: servers, name}) {
  const rows = Object.entries(servers);
  return rows.length > 1 && h("details", h("summary", `At each of ${count(rows.length)} servers`), table(`${name} at its servers`, OF_SERVER, rows));
}

// ------------------------------------------------------------------------------------------------------ distributions

const FEW = 0.05; // effective share of the entries, below which the card gives advice

function size({effective, population, looked, held, unit, servers, missing}) {
  const part = population > 0 && effective !== null ? Math.min(1, effective / population) : null;
  return h("section.card", h("h2", term("ClusterDistribution.effective")),
    h("p.answer", part === null ? "Not known" : `Draws are spread as over ${count(Math.round(effective))} equal entries, out of ${count(population)} (${share(part)})`),
    part !== null && part < FEW && h("p", "A few entries are drawn again and again: a lower priority_exponent spreads the draws."),
    facts([
      [`${unit} that can be drawn`, count(held)],
      ["examined", looked < held ? `${count(looked)} of them` : "all of them"],
      ["servers", missing.length ? `${servers.length}, ${missing.join(", ")} did not answer` : count(servers.length)],
    ]));
}

function weights({weights: bars, weighed}) {
  return h("section.card", h("h2", term("HeldSample.weight", "Weights")),
    h("p.answer", ends(bars, figure)), spreadOf(bars, "Weights", figure),
    h("p.quiet", weighed));
}

function ages({ages: bars}) {
  return h("section.card", h("h2", term("HeldSample.age", "Ages")),
    h("p.answer", ends(bars, duration)), spreadOf(bars, "Ages", duration),
    h("p.quiet", "Time since the entries were recorded."));
}

/** A histogram; null if all values are equal, since one bar would look like a spread. */
const spreadOf = (bars, title, format) => (bars.least === bars.greatest ? null : histogram(bars, title, format));

const ends = ({least, greatest}, format) => (least === greatest ? `all ${format(least)}` : `${format(least)} to ${format(greatest)}`);
