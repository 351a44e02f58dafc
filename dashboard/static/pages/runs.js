// Runs: the results of all known runs, the settings in which two of them differ, and exports.
import {at, get, query} from "../api.js";
import {fill, h, patch} from "../dom.js";
import {clock, count, duration, figure} from "../format.js";
import {empty, every, problem, table} from "../parts.js";
import {address, remember} from "../router.js";

const TWO = 2;

export function openRuns({root, parameters, stream, signal}) {
  const state = {pair: "", all: "", ...Object.fromEntries(parameters)};
  const list = h("div", h("p.quiet", "Loading …"));
  const compared = h("section.block");
  let runs = [];
  const chosen = () => (state.pair ? state.pair.split("\n") : []).filter((name) => runs.some((run) => run.name === name));
  const change = (changes) => {
    Object.assign(state, changes);
    remember(changes);
    draw();
    compare();
  };
  const toggle = (name) => {
    const others = chosen().filter((each) => each !== name);
    change({pair: (others.length < chosen().length ? others : [...others, name].slice(-TWO)).join("\n")});
  };
  const draw = () => {
    const columns = [{title: "Compare", value: ({name}) => box(name, chosen().includes(name), toggle)}, ...COLUMNS];
    fill(list, runs.length ? table("Runs", columns, runs.toReversed()) : empty("No run is known yet."));
  };
  const compare = async () => {
    const pair = chosen();
    if (pair.length < TWO) return fill(compared, runs.length > 1 && h("p.quiet", "Choose two runs to compare their settings."));
    try {
      const answers = await Promise.all(pair.map((run) => get("settings", {run}, signal)));
      const onAll = () => change({all: state.all ? "" : "yes"});
      patch(compared, h("h2", "Settings side by side"), differences(pair, answers.map(({servers}) => servers), Boolean(state.all)));
      compared.append(h("p", h("button", {type: "button", "aria-pressed": String(Boolean(state.all)), click: onAll}, "Show equal settings, too"), " ",
        h("a", {href: address("learning", {beside: pair.join("\n")})}, "Their curves side by side")));
    } catch (error) {
      if (error.name !== "AbortError") fill(compared, problem(error));
    }
  };
  fill(root, list, compared);
  let shown = "";
  every(5, signal, stream, async () => {
    runs = await get("runs", {}, signal);
    const isFirst = !shown;
    if (JSON.stringify(runs) !== shown && !list.contains(document.activeElement)) draw();
    shown = JSON.stringify(runs);
    if (isFirst) compare();
  }, (error) => error && fill(list, problem(error)));
}

const COLUMNS = [
  {title: "Run", value: (run) => h("b", run.name)},
  {title: "State", value: (run) => (run.facts.finished ? "finished" : run.is_current ? h("span.state.up", "current") : "unfinished")},
  {title: "Began", value: (run) => clock(run.began)},
  {title: "Took", value: (run) => duration(Math.max(0, run.seen - run.began)), number: true},
  {title: "Steps", value: (run) => count(run.facts.totals?.steps), number: true},
  {title: "Episodes", value: (run) => count(run.facts.totals?.episodes), number: true},
  {title: "Mean return", value: (run) => figure(run.facts.return_mean), number: true},
  {title: "Export", value: ({name}) => [["export.run", "one file"], ["export.csv", "CSV"], ["export.tfevents", "TensorBoard"]].map(([path, text], place) =>
    [place ? ", " : "", h("a", {href: at(`api/${path}${query({run: name})}`), "aria-label": `${name} as ${text}`}, text)])},
];

function box(name, isChosen, toggle) {
  return h("input", {type: "checkbox", checked: isChosen, "aria-label": `Compare ${name}`, change: () => toggle(name)});
}

/** Paths and values of nested settings: {"tables.default.parameters.multi_step": "3"}. */
function flat(value, path = "", leaves = {}) {
  const isLeaf = value === null || typeof value !== "object" || Array.isArray(value) || !Object.keys(value).length;
  if (isLeaf) leaves[path] = typeof value === "string" ? value : JSON.stringify(value);
  else for (const [name, inner] of Object.entries(value)) flat(inner, path ? `${path}.${name}` : name, leaves);
  return leaves;
}

/** Settings of all servers of a run: one value if the servers agree, else all values. */
function ofServers(servers) {
  const union = {};
  for (const settings of Object.values(servers)) {
    for (const [path, value] of Object.entries(flat(settings))) if (!/^runs?$|_version$/.test(path)) (union[path] ??= new Set()).add(value);
  }
  return Object.fromEntries(Object.entries(union).map(([path, values]) => [path, [...values].join(" or ")]));
}

function differences(names, settings, isAll) {
  const sides = settings.map(ofServers);
  if (sides.some((side) => !Object.keys(side).length)) return empty("The settings of one of these runs are not known: no server of it has answered this dashboard.");
  const paths = [...new Set(sides.flatMap(Object.keys))].sort();
  const rows = paths.map((path) => ({path, values: sides.map((side) => side[path] ?? "not set")}))
    .filter(({values}) => isAll || values[0] !== values[1]);
  const columns = [{title: "Setting", value: ({path}) => h("code", path)},
    ...names.map((name, place) => ({title: name, wrap: true, value: ({values}) => (values[0] === values[1] ? values[place] : h("b", values[place]))}))];
  return rows.length ? table("Settings of both runs", columns, rows) : empty("Their settings are the same.");
}
