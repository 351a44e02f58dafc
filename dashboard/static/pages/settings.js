// Settings: tables, parameters and limits of every server, and the dashboard's own settings, by their names in the API. Changed
// settings come first; the others unfold. The API never sends secrets.
import {get} from "../api.js";
import {fill, h} from "../dom.js";
import {bytes, count, duration, figure, typeName} from "../format.js";
import {empty, every, problem, table} from "../parts.js";

export function openSettings({root, stream, signal}) {
  fill(root, h("p.quiet", "Loading …"));
  let shown = "";
  every(15, signal, stream, async () => {
    const settings = await get("settings", {}, signal);
    const text = JSON.stringify(settings);
    if (text !== shown) draw(root, settings);
    shown = text;
  }, (error) => error && fill(root, problem(error)));
}

function draw(root, {servers, dashboard, defaults}) {
  const groups = Object.values(alike(servers));
  fill(root, h("p.quiet", "Names are those of the Python API. A line at the left marks settings that differ from their default."),
    groups.length ? groups.map((each) => group(each, defaults)) : empty("No server has answered yet."),
    h("section.block", h("h2", "This dashboard"), settingsTable("This dashboard", dashboard, defaults.dashboard)));
}

/** Groups of servers with equal settings, which are shown once. */
function alike(servers) {
  const groups = {};
  for (const [name, {run, runs, ...rest}] of Object.entries(servers)) {
    const group = (groups[JSON.stringify(rest)] ??= {names: [], ...rest});
    group.names.push(name);
  }
  return groups;
}

function group({names, tables = {}, limits = {}}, defaults) {
  const several = Object.keys(tables).length > 1;
  return h("section.block", h("h2", names.length > 1 ? `Servers ${names.join(", ")}` : `Server ${names[0]}`),
    Object.entries(tables).map(([title, {schema, parameters, parameters_version: version, entry_bytes: size, ...own}]) => [
      h("h3", `Table ${title} `, h("span.quiet", `${bytes(size)} an entry${version > 1 ? `, parameters changed ${count(version - 1)} times since its start` : ""}`)),
      columns(title, schema),
      settingsTable(`Table ${title}`, {...own, ...parameters}, {...defaults.table, ...defaults.parameters, ...followed(own, limits, several, defaults.counted)})]),
    h("h3", "Limits of the server"), settingsTable(`Limits of ${names.join(", ")}`, limits, defaults.limits));
}

/** Defaults that follow from other settings: limits that tables share, and counts derived from bytes, are never marked. */
function followed(own, {held_bytes: held}, several, counted = {}) {
  const names = counted[own.storage] ?? [];
  return {byte_limit: several ? own.byte_limit : held, ...Object.fromEntries(names.map((name) => [name, own[name]]))};
}

/** Settings that differ from their default, and the others in a fold. */
function settingsTable(caption, values, defaults) {
  const rows = Object.entries(values).map(([name, value]) => {
    const usual = defaults?.[name];
    return {name, value, note: usual === undefined ? "none, required" : shown(name, usual), isChanged: usual === undefined || !same(value, usual)};
  });
  const [changed, usual] = [rows.filter(({isChanged}) => isChanged), rows.filter(({isChanged}) => !isChanged)];
  return h("div.settings",
    changed.length ? rowsOf(`${caption}: set`, changed, true) : h("p.quiet", "All settings have their defaults."),
    usual.length > 0 && h("details", h("summary", `${count(usual.length)} settings with their defaults`), rowsOf(`${caption}: defaults`, usual, false)));
}

function rowsOf(caption, rows, isChanged) {
  const head = ["Setting", "Value", ...(isChanged ? ["Default"] : [])];
  return h("div.scroll", {tabindex: "0", role: "region", "aria-label": caption}, h("table", h("caption.hidden-text", caption),
    h("thead", h("tr", head.map((title) => h("th", {scope: "col"}, title)))),
    h("tbody", rows.map(({name, value, note}) => h(isChanged ? "tr.changed" : "tr", h("td", h("code", breakable(name))),
      h("td.value", shown(name, value)), isChanged && h("td.default", note))))));
}

/** A name that may wrap after each underscore, and nowhere else. */
function breakable(name) {
  return name.split(/(?<=_)/).flatMap((part, index) => (index ? [h("wbr"), part] : [part]));
}

/** True if a value equals its default; a list of equal numbers equals a default of one number. */
function same(value, usual) {
  if (Array.isArray(value) && Array.isArray(usual) && usual.length === 1) return value.every((each) => each === usual[0]);
  return JSON.stringify(value) === JSON.stringify(usual);
}

const IS_BYTES = /bytes$|^byte_limit$|^credit$|^model_chunk$|^inline_model$/;
const IS_SECONDS = /_timeout$|_every$|_after$|_most$|^max_age$|^model_spread$/;
/** Meanings of 0 and of null, in settings for which they are not numbers. */
const ZERO = {
  capacity: "no number: bytes limit it", max_step: "as the client asks", max_episode: "no limit", max_times_sampled: "any number of times",
  sequence_length: "single transitions", burn_in: "none", expected_actors: "not known", goal_steps: "no goal", goal_episodes: "no goal",
};
const NULL = {
  importance_final: "as importance_exponent", samples_per_insert_tolerance: "no limit", max_age: "any age", max_model_lag: "any model",
  model_topic: "all topics", prev: "all columns", next: "state columns", byte_limit: "a share of held_bytes", history: "in memory", probes: "same as listen",
};
const SECRETS = ["token", "node_token"];

/** Text of a setting's value, with its unit. */
function shown(name, value) {
  if (value === null || value === undefined) return NULL[name] ?? "not set";
  if (SECRETS.includes(name)) return value ? "set" : "not set";
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (Array.isArray(value)) return value.length ? value.map((each) => (typeof each === "object" ? asJson(each) : String(each))).join(", ") : "none";
  if (value === 0 && name in ZERO) return ZERO[name];
  if (typeof value === "object") return asJson(value);
  if (typeof value !== "number") return String(value) || "not set";
  if (IS_BYTES.test(name)) return bytes(value);
  if (IS_SECONDS.test(name)) return duration(value);
  return Number.isInteger(value) ? count(value) : figure(value);
}

/** JSON in one line, with blanks at which it may wrap. */
function asJson(value) {
  return JSON.stringify(value, null, 1).replace(/\n\s*/g, " ");
}

/** The columns of a schema as a table: each is [name, type, shape, role]. */
function columns(title, schema) {
  return schema?.columns ? table(`Schema of ${title}`, SCHEMA, schema.columns) : null;
}

const SCHEMA = [
  {title: "Column", value: ([name]) => h("b", name)},
  {title: "Type", value: ([, type]) => h("code", typeof type === "string" ? typeName(type) : JSON.stringify(type))},
  {title: "Shape", value: ([, , shape]) => h("code", `(${(shape ?? []).map((axis) => axis ?? "any").join(", ")})`)},
  {title: "Role", value: ([, , , role]) => role ?? ""},
];
