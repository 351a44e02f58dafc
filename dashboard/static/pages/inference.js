// Inference: inference nodes with their answer times, the rows of their batches, and the reasons that start batches.
import {fill, h, patch} from "../dom.js";
import {count, duration, figure, share} from "../format.js";
import {column, term} from "../help.js";
import {makeOverTime} from "../overtime.js";
import {table, tile} from "../parts.js";
import {address} from "../router.js";

const IS_NODE = /^inference\.(.+)\.busy$/;
const FULL = 0.9; // share of its time from which a node counts as overloaded
const REASONS = {full: "batch full", everyone: "all clients asked", wait: "longest wait reached"};

const CHARTS = [
  {name: "rows_per_second", title: "Rows", unit: "per second"},
  {name: "batch_rows", title: "Rows of a batch", unit: "mean", top: 1},
  {name: "p50", title: "Time of an answer", unit: "half of them take less"},
  {name: "p99", title: "Time of slow answers", unit: "99 in 100 take less"},
  {name: "wait", title: "Wait for a batch", unit: "mean of the requests"},
  {name: "busy", unit: "share of a node's time", top: 1},
  {name: "version", title: "Model", unit: "version, of each node"},
  {name: "queue_rows"},
  {name: "refused_per_second", title: "Refused requests", unit: "per second"},
].map((each) => ({...column(`InferenceRow.${each.name}`), named: `InferenceRow.${each.name}`, ...each}));

const COLUMNS = [
  {title: "Inference node", value: (row) => h("a", {href: address("nodes", {url: row.url})}, row.name)},
  column("InferenceRow.version", {value: version}),
  ...["clients", "rows_per_second", "batch_rows", "wait", "p50", "p99"].map((name) => column(`InferenceRow.${name}`)),
  column("InferenceRow.busy", {value: (row) => h(row.busy > FULL ? "span.state.unready" : "span", share(row.busy))}),
  column("InferenceRow.refused_per_second"),
  {title: "Refused, in total", value: refused, wrap: true},
];

function version(row) {
  return row.behind ? h(row.is_outdated ? "span.state.unready" : "span", `${row.version} (${count(row.behind)} behind)`) : String(row.version);
}

function refused({refused: codes, failures, weights_failures: unread, expired}) {
  const parts = [...Object.entries(codes).map(([code, number]) => `${count(number)} ${code}`), failures && `${count(failures)} batches failed`,
    unread && `${count(unread)} models not read`, expired && `${count(expired)} too late`].filter(Boolean);
  return parts.join(", ") || "none";
}

const DUE = {title: "Reasons that start batches", unit: "share of the batches of all nodes", named: "InferenceRow.batches", format: share, top: 1};

/** Lines of each chart for these nodes. */
function linesOf(nodes) {
  const charts = CHARTS.map(({name}) => Object.fromEntries(nodes.map((node) => [`inference.${node}.${name}`, node])));
  const named = (reason) => nodes.map((node) => `inference.${node}.batches_${reason}`);
  const due = (curves) => Object.entries(REASONS).map(([reason, title]) => ({name: title, values: meanOf(curves, named(reason))}));
  return [...charts.slice(0, 2), [Object.keys(REASONS).flatMap(named), due], ...charts.slice(2)];
}

export function openInference(page) {
  const top = h("div", h("p.quiet", "Loading …"));
  const known = (names) => {
    const nodes = names.map((name) => name.match(IS_NODE)?.[1]).filter(Boolean);
    return nodes.length || page.stream.newest?.inference.length ? linesOf(nodes) : null;
  };
  const kinds = [...CHARTS.slice(0, 2), DUE, ...CHARTS.slice(2)];
  fill(page.root, top, makeOverTime({kinds, linesOf: known, sync: "inference"}, page));
  return {update: (overview) => patch(top, overview.inference.length ? shown(overview) : nothing(overview))};
}

/** Mean of several curves at each time, over the known values. */
function meanOf({time, mean}, names) {
  return time.map((_, at) => {
    const known = names.map((name) => mean[name]?.[at]).filter((value) => value !== null && value !== undefined);
    return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
  });
}

const sumOf = (rows, name) => rows.reduce((sum, row) => sum + (row[name] ?? 0), 0);
const worst = (rows, name) => rows.reduce((most, row) => (row[name] !== null && (most === null || row[name] > most) ? row[name] : most), null);

function shown({inference: rows, verdicts}) {
  const findings = verdicts.filter(({code}) => code.startsWith("inference") || code === "waits_for_inference");
  const tiles = [
    ["InferenceRow.rows_per_second", "Rows", `${figure(sumOf(rows, "rows_per_second"))} / s`, `${count(sumOf(rows, "clients"))} client${sumOf(rows, "clients") === 1 ? "" : "s"}, ${count(rows.length)} node${rows.length === 1 ? "" : "s"}`],
    ["InferenceRow.batch_rows", "Rows of a batch", figure(worst(rows, "batch_rows")), rows.length > 1 ? "the largest of all nodes" : "mean"],
    ["InferenceRow.p50", "Answer, 99 % below", duration(worst(rows, "p99")), `half below ${duration(worst(rows, "p50"))}`],
    ["InferenceRow.wait", "Wait for a batch", duration(worst(rows, "wait")), rows.length > 1 ? "of the slowest node" : "mean"],
    ["InferenceRow.busy", "Busy", share(worst(rows, "busy")), rows.length > 1 ? "the busiest node" : "of its time"],
    ["InferenceRow.queue_rows", "Rows that wait", count(sumOf(rows, "queue_rows")), `${figure(sumOf(rows, "refused_per_second"))} / s refused`],
  ];
  return [
    findings.map(({text, level}) => h(`p.away-note.${level}`, text)),
    h("div.tiles", tiles.map(([named, title, value, rest]) => tile(term(named, title), value, rest))),
    table("Inference nodes", COLUMNS, rows),
  ];
}

const LINES = `from memoire.nodes.http import NodePages

node = memoire.Inference("tcp://*:5570", inputs, outputs, function, connect="tcp://server:5560")
pages = NodePages("0.0.0.0:8080", node)`;

/** Purpose of the page and the lines that start a node, or a note on nodes that do not answer. */
function nothing({nodes}) {
  const away = nodes.filter(({role}) => role === "inference");
  if (away.length) return h("p.away-note", `${away.map(({name, url}) => name || url).join(", ")} ${away.length === 1 ? "does" : "do"} not answer: `, h("a", {href: address("nodes")}, "see the nodes"), ".");
  return h("section.card.start", h("h2", "No inference node is known"),
    h("p", "An inference node computes the policy for many actors at once, for instance on a GPU: docs/remote-policies.md. In its process, write:"),
    h("div.code", h("pre", {tabindex: "0", role: "group", "aria-label": "Lines that start an inference node"}, LINES)),
    h("p.quiet", "Then give this dashboard the address of its pages: ", h("code", "memoire dashboard dns:NAME:8080"), " finds all nodes behind a name."));
}
