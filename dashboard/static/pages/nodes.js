// Nodes: state, uptime and use of resources of every node, and the learners. The page of one node has its curves and, below in
// folds, everything that it reports.
import {get} from "../api.js";
import {fill, h, patch} from "../dom.js";
import {ago, bytes, clock, count, duration, figure, NONE, raw, share, words} from "../format.js";
import {column, term} from "../help.js";
import {makeOverTime} from "../overtime.js";
import {empty, every, problem, routed, table, tile} from "../parts.js";
import {address} from "../router.js";

const now = () => Date.now() / 1000;

/** Requirement for a peer to connect: a key, or nothing, which is highlighted. */
function access(row) {
  if (row.open.length) return h("span.state.unready", {title: row.open.join(", ")}, "everybody");
  if (row.keys === null) return NONE;
  return row.keys ? "keys" : "this machine";
}

const stateOf = (row) => h(`span.state.${row.state}`, row.state === "down" ? "away" : row.state === "unready" ? "not ready" : row.state);

const COLUMNS = [
  {title: "Node", value: (row) => h("a", {href: address("nodes", {url: row.url})}, row.name || row.url)},
  column("NodeRow.role", {value: (row) => row.role || NONE, number: false}),
  column("NodeRow.state", {value: stateOf, number: false}),
  ...["uptime", "cpu", "memory_bytes", "requests_per_second", "descriptors"].map((name) => column(`NodeRow.${name}`)),
  column("NodeRow.open", {value: access, number: false}),
  ...["refused", "faults", "took"].map((name) => column(`NodeRow.${name}`)),
];
const LEARNERS = [
  {title: "Learner", value: (row) => h("span.mono", {title: row.learner}, row.name || (row.learner.startsWith("server:") ? row.learner : row.learner.slice(0, 8)))},
  column("LearnerRow.where", {value: (row) => row.where, number: false}),
  ...["last_seen", "batches", "samples", "waiting_share"].map((name) => column(`LearnerRow.${name}`)),
  {title: "Scalars", value: (row) => Object.entries(row.scalars).map(([name, value]) => `${name} ${figure(value)}`).join(", "), wrap: true},
];

/** Text in place of the figures of a node that does not answer, because these are out of date. */
function away(row) {
  if (row.state !== "down") return null;
  const why = row.reasons.join("; ") || "it does not answer";
  return {after: 3, kind: "down", text: `away since ${clock(row.since)} (${ago(row.since, now())}): ${why}`};
}

export function openNodes({root, parameters, stream, signal}) {
  let shown = null;
  const route = routed(signal, (state, own) => {
    const url = state.get("url");
    shown = url ? openNode(root, url, state, stream, own) : openList(root);
    if (stream.newest) shown.update?.(stream.newest);
  });
  route(parameters);
  return {route, update: (overview) => shown.update?.(overview)};
}

function openList(root) {
  const place = h("div");
  fill(root, place);
  return {
    update({nodes, learners}) {
      const notReady = nodes.filter(({state}) => state === "unready");
      patch(place, notReady.map((row) => h("p.away-note", h("b", `${row.name || row.url} is not ready: `), row.reasons.join("; "))),
        table("Nodes", COLUMNS, nodes, away), h("h2", "Learners"),
        learners.length ? table("Learners", LEARNERS, learners) :
          empty("No learner has drawn recently. A learner draws with server.get_batch, or with memoire.Reader from another machine."));
    },
  };
}

const CURVES = [
  {name: "cpu", title: "CPU", unit: "100 % is one core", format: share},
  {name: "memory_bytes", title: "Memory", unit: "resident", format: bytes},
  {name: "requests_per_second", title: "Requests", unit: "per second", format: figure},
  {name: "took", title: "Answer", unit: "to the dashboard", format: duration},
];

function openNode(root, url, parameters, stream, signal) {
  const [head, report] = [h("div", h("p.quiet", "Loading …")), h("div")];
  let known = null;
  const linesOf = () => known && CURVES.map(({name, title}) => ({[`node.${known.name || url}.${name}`]: title}));
  const charts = makeOverTime({kinds: CURVES, linesOf, sync: "node", heading: "", usual: "3600"}, {parameters, stream, signal});
  fill(root, h("p", h("a", {href: address("nodes")}, "← All nodes")), head, charts, report);
  every(3, signal, stream, async () => {
    const [node] = await get("nodes", {url}, signal);
    if (!node) return fill(head, empty(`The dashboard no longer knows a node at ${url}.`));
    const {status, ...row} = known = node;
    patch(head, about(row, status));
    patch(report, folded(row, status));
  }, (error) => error && fill(head, problem(error)));
  return {};
}

/** Name, role, state and present figures of a node. */
function about(row, status) {
  const {host, pid} = status.process ?? {};
  const reasons = row.state !== "up" && h("p.away-note", row.state === "down" ? "It does not answer; these are its last figures. " : "It is not ready: ", row.reasons.join("; "));
  return [
    h("div.head", h("h2", row.name || row.url), stateOf(row), h("span.quiet", [row.role, row.url, host && `process ${pid} on ${host}`, row.software].filter(Boolean).join(" · "))),
    reasons,
    h("div.grid.tiles", [
      ["cpu"], ["memory_bytes"], ["requests_per_second"], ["descriptors", row.most_descriptors && `of ${count(row.most_descriptors)}`],
      ["refused"], ["faults"], ["uptime"], ["open", null, access(row)],
    ].map(([name, more, value]) => tile(term(`NodeRow.${name}`), value ?? column(`NodeRow.${name}`).value(row), more))),
  ];
}

/** Everything that the node reports, in parts that unfold. */
function folded(row, {stats, process, security, endpoints}) {
  if (!stats) return h("p.quiet", "The node has not reported anything yet.");
  const {tables, requests, learners, ...rest} = stats;
  const isPlain = (value) => value === null || typeof value !== "object";
  const entries = Object.entries(rest);
  const groups = [
    ["Counters", Object.fromEntries(entries.filter(([, value]) => isPlain(value)))],
    ...Object.entries(tables ?? {}).map(([name, figures]) => [`Table ${name}`, figures]),
    ["Learners", learners],
    ...entries.filter(([name, value]) => !isPlain(value) && name !== "security").map(([name, value]) => [heading(name), value]),
    ["Addresses", endpoints], ["Process", process], ["Security", security],
  ];
  return [h("h2", "Everything that it reports"), h("div.folds", requestsOf(requests),
    groups.filter(([, value]) => !isEmpty(value)).map(([title, value]) => fold(title, value)))];
}

const heading = (name) => words(name).replace(/^./, (letter) => letter.toUpperCase());
const isEmpty = (value) => value === null || value === undefined || (typeof value === "object" && !Object.keys(value).length);

/** Requests to a server by kind, the most frequent first; other nodes do not count kinds. */
function requestsOf(requests) {
  if (isEmpty(requests) || typeof requests !== "object") return null;
  const rows = Object.entries(requests).map(([kind, {seconds, counts}]) => ({kind, seconds, answered: counts.reduce((sum, each) => sum + each, 0)}))
    .filter(({answered}) => answered > 0);
  rows.sort((a, b) => b.answered - a.answered);
  return h("details", h("summary", "Requests ", h("span.quiet", count(rows.length))), table("Requests by kind", REQUESTS, rows));
}

const REQUESTS = [
  {title: "Kind", value: ({kind}) => h("code", kind)},
  {title: "Answered", value: ({answered}) => count(answered), number: true},
  {title: "Mean time", value: ({answered, seconds}) => duration(answered ? seconds / answered : null), number: true},
];

function fold(title, value) {
  const size = typeof value === "object" ? Object.keys(value).length : 1;
  return h("details", h("summary", `${title} `, h("span.quiet", count(size))), h("div", tree(value)));
}

/** Nested values as a list with indents, in which a reader looks for one figure. */
export function tree(value, name = "") {
  if (value === null || typeof value !== "object") return h("span.mono", raw(name, value));
  const entries = Object.entries(value);
  if (!entries.length) return h("span.quiet", Array.isArray(value) ? "none" : "nothing");
  if (Array.isArray(value) && value.every((each) => each === null || typeof each !== "object")) {
    return h("span.mono", value.join(", "));
  }
  return h("dl.tree", entries.map(([each, inner]) => [h("dt", words(each)), h("dd", tree(inner, each))]));
}
