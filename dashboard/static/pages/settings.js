// What was set: schema, parameters and limits of every server, and the dashboard's own. Secrets are never sent here.
import {get} from "../api.js";
import {fill, h} from "../dom.js";
import {typeName} from "../format.js";
import {empty, every, problem, table} from "../parts.js";
import {tree} from "./nodes.js";

export function openSettings({root, stream, signal}) {
  fill(root, h("p.quiet", "Loading …"));
  let shown = "";
  every(15, signal, stream, async () => {
    try {
      const found = await get("settings", {}, signal);
      const text = JSON.stringify(found);
      if (text !== shown) draw(root, found);
      shown = text;
    } catch (error) {
      if (error.name !== "AbortError") fill(root, problem(error));
    }
  });
}

function draw(root, {servers, dashboard}) {
  const groups = Object.values(alike(servers));
  fill(root, groups.length ? groups.map(group) : empty("No server has answered yet."),
    h("section.card.columns", h("h2", "This dashboard"), tree(dashboard)));
}

/** Servers that were told the same are shown once. */
function alike(servers) {
  const groups = {};
  for (const [name, {run, runs, ...rest}] of Object.entries(servers)) {
    const group = (groups[JSON.stringify(rest)] ??= {names: [], ...rest});
    group.names.push(name);
  }
  return groups;
}

function group({names, tables = {}, ...rest}) {
  return h("section.block", h("h2", names.length > 1 ? `Servers ${names.join(", ")}` : `Server ${names[0]}`),
    Object.entries(tables).map(([title, {schema, parameters, ...other}]) => [
      h("h3", `Table ${title}`), columns(title, schema),
      h("div.grid", h("section.card.columns", h("h3", "Parameters"), tree(parameters))),
      h("div.grid", h("section.card.columns", h("h3", "Storage"), tree(other)))]),
    Object.entries(rest).map(([what, value]) => h("div.grid", h("section.card.columns", h("h3", TITLES[what] ?? what), tree(value)))));
}

const TITLES = {limits: "Limits"};

/** The columns of a schema as a table: each is [name, type, shape, role]. */
function columns(title, schema) {
  const found = schema?.columns;
  if (!found) return tree(schema ?? {});
  return table(`Schema of ${title}`, SCHEMA, found);
}

const SCHEMA = [
  {title: "Column", value: ([name]) => h("b", name)},
  {title: "Type", value: ([, type]) => h("code", typeof type === "string" ? typeName(type) : JSON.stringify(type))},
  {title: "Shape", value: ([, , shape]) => h("code", `(${(shape ?? []).map((axis) => axis ?? "any").join(", ")})`)},
  {title: "Role", value: ([, , , role]) => role ?? ""},
];
