// Every node: does it answer, how long, what does it hold; and all that one of them said. Learners beside them.
import {get} from "../api.js";
import {fill, h, patch} from "../dom.js";
import {ago, bytes, count, duration, figure, raw, share, words} from "../format.js";
import {empty, every, problem, table} from "../parts.js";
import {address} from "../router.js";

const now = () => Date.now() / 1000;

/** What those who come have to have: a key, or nothing, which is said so that it is seen. */
function guard(row) {
  if (row.open.length) return h("span.state.unready", {title: row.open.join(", ")}, "nothing");
  if (row.keys === null) return "–";
  return row.keys ? "keys" : "this machine";
}

const COLUMNS = [
  {title: "Node", value: (row) => h("a", {href: address("nodes", {url: row.url})}, row.name || row.url)},
  {title: "Role", value: (row) => row.role},
  {title: "State", value: (row) => h(`span.state.${row.state}`, row.state)},
  {title: "Why", value: (row) => row.reasons.join("; "), wrap: true},
  {title: "Since", value: (row) => ago(row.since, now()), number: true},
  {title: "Up for", value: (row) => duration(row.uptime), number: true},
  {title: "Memory", value: (row) => bytes(row.memory_bytes), number: true},
  {title: "Files", value: (row) => (row.descriptors === null ? "–" : `${count(row.descriptors)} of ${count(row.most_descriptors)}`), number: true},
  {title: "Asks for", value: guard},
  {title: "Refused", value: (row) => count(row.refused), number: true},
  {title: "Faults", value: (row) => count(row.faults), number: true},
  {title: "Answer took", value: (row) => duration(row.took), number: true},
  {title: "Software", value: (row) => row.software},
];
const LEARNERS = [
  {title: "Learner", value: (row) => h("span.mono", row.name || row.learner.slice(0, 24))},
  {title: "At", value: (row) => row.where},
  {title: "Last seen", value: (row) => ago(row.last_seen, now()), number: true},
  {title: "Batches", value: (row) => count(row.batches), number: true},
  {title: "Samples", value: (row) => count(row.samples), number: true},
  {title: "Waits", value: (row) => share(row.waiting_share), number: true},
  {title: "Scalars", value: (row) => Object.entries(row.scalars).map(([name, value]) => `${name} ${figure(value)}`).join(", "), wrap: true},
];

export function openNodes({root, parameters, stream, signal}) {
  let shown = null;
  let close = () => {};
  const route = (state) => {
    close();
    const abort = new AbortController();
    signal.addEventListener("abort", () => abort.abort());
    close = () => abort.abort();
    const url = state.get("url");
    shown = url ? openNode(root, url, stream, abort.signal) : openList(root);
    if (stream.newest) shown.update?.(stream.newest);
  };
  route(parameters);
  return {route, update: (overview) => shown.update?.(overview)};
}

function openList(root) {
  const place = h("div");
  fill(root, place);
  return {
    update({nodes, learners}) {
      patch(place, table("Nodes", COLUMNS, nodes), h("h2", "Learners"),
        learners.length ? table("Learners", LEARNERS, learners) :
          empty("No learner was heard from lately. One draws with server.get_batch or memoire.Reader."));
    },
  };
}

function openNode(root, url, stream, signal) {
  const place = h("div");
  fill(root, h("p", h("a", {href: address("nodes")}, "← All nodes")), place);
  every(3, signal, stream, async () => {
    try {
      const node = (await get("nodes", {}, signal)).find((each) => each.url === url);
      if (!node) return fill(place, empty(`There is no node at ${url} any more.`));
      const {status, ...row} = node;
      patch(place, table(row.name || url, COLUMNS, [row]), h("h2", "All that it said"), h("section.card", tree(status)));
    } catch (error) {
      if (error.name !== "AbortError") fill(place, problem(error));
    }
  });
  return {};
}

/** Nested values, open at the top: for people who look for one figure. */
export function tree(value, name = "") {
  if (value === null || typeof value !== "object") return h("span.mono", raw(name, value));
  const entries = Object.entries(value);
  if (!entries.length) return h("span.quiet", Array.isArray(value) ? "none" : "nothing");
  if (Array.isArray(value) && value.every((each) => each === null || typeof each !== "object")) {
    return h("span.mono", value.join(", "));
  }
  return h("dl.tree", entries.map(([each, inner]) => [h("dt", words(each)), h("dd", tree(inner, each))]));
}
