// One held sample with its frames as pictures, and what is known of it.
import {get} from "../api.js";
import {inBrief, pictures, shapeOf} from "../arrays.js";
import {fill, h} from "../dom.js";
import {count, duration, figure, share, typeName} from "../format.js";
import {empty, facts, problem, table} from "../parts.js";
import {address} from "../router.js";

/** {element, show(table)}: a section with a held sample of a table, another one whenever somebody wants it. */
export function makeSample(signal) {
  const place = h("div", h("p.quiet", "Loading …"));
  let wanted = "";
  const again = h("button", {type: "button", click: () => show(wanted)}, "Another one");
  const element = h("section.block", h("div.bar", h("h2", "One sample"), again,
    h("span.quiet", "As likely as in a draw. Looking takes nothing away.")), place);
  const show = async (name) => {
    wanted = name;
    again.disabled = true;
    try {
      const sample = await heldOne(name, signal);
      fill(place, sample ? drawn(sample, await episodeOf(sample, signal)) : empty(NOTHING));
    } catch (error) {
      if (error.name !== "AbortError") fill(place, problem(error));
    } finally {
      again.disabled = false;
    }
  };
  return {element, show};
}

const NOTHING = "Nothing is held at this moment, or a sample is larger than 4 MiB. Learners may take samples as quickly as they come: try another one.";
const TRIES = 4;

/** A sample, or null where none was held whenever it was looked. */
async function heldOne(name, signal) {
  for (let left = TRIES; left > 0; left -= 1) {
    const sample = await get("sample", {table: name}, signal);
    if (sample) return sample;
    await new Promise((done) => setTimeout(done, 500));
  }
  return null;
}

/** The first episode that its actor closed after the sample was recorded; null where that is not known. */
async function episodeOf({client, age, episode}, signal) {
  if (episode !== null) return null;
  const found = await get("episodes", {client, limit: 1000}, signal);
  const recorded = Date.now() / 1000 - age;
  return found.findLast(({time}) => time >= recorded) ?? null;
}

function drawn(sample, episode) {
  const rows = rowsOf(Object.entries(sample.arrays));
  const shown = rows.map((row) => [row, [row.now && pictures(row.name, row.now), row.later && pictures(`next_${row.name}`, row.later)].filter(Boolean)]);
  return [
    h("div.grid", about(sample, episode), standing(sample)),
    shown.filter(([, both]) => both.length).map(([, both]) => h("div.card.pictures", both)),
    table("Columns of the sample", COLUMNS, shown.filter(([, both]) => !both.length).map(([row]) => row)),
  ];
}

function about({server, table: name, client, number, age, model_version: version, model_lag: lag, episode: length}, episode) {
  const isKept = length !== null;
  const actor = isKept ? h("span", `kept by ${server}`) : h("a.mono", {href: address("actors", {id: client})}, client.slice(0, 8));
  const within = isKept ? `of ${count(length)} entries` :
    episode ? `returned ${figure(episode.returned)} after ${count(episode.length)}` : "not known yet";
  return h("section.card", h("h2", "Where it comes from"), facts([
    ["table, server", `${name}, ${server}`],
    [isKept ? "episode's memory" : "actor", actor],
    ["entry", count(number)],
    [isKept ? "episode" : "its actor's next episode", within],
    ["recorded", `${duration(age)} ago`],
    ["model that acted", version ? `version ${count(version)}` : "nobody said"],
    ["models behind the newest", lag === null ? "–" : count(lag)],
  ]));
}

function standing({weight, probability, importance}) {
  return h("section.card", h("h2", "How likely it is"), facts([
    ["weight", figure(weight)],
    ["chance at each draw from its server", probability < 0.01 ? `1 in ${count(1 / probability)}` : share(probability)],
    ["importance", figure(importance)],
  ]), h("p.quiet", "The weight is its priority to the power of the exponent, times init_w and the episode's multiplier. " +
    "An importance of 1 is an entry of the mean chance; batches divide by their largest."));
}

const COLUMNS = [
  {title: "Column", value: (row) => h("b.mono", row.name)},
  {title: "Type", value: (row) => h("code", `${typeName(row.now?.dtype ?? row.later.dtype)} ${shapeOf(row.now ?? row.later)}`)},
  {title: "At this step", value: (row) => inBrief(row.name, row.now)},
  {title: "After the window", value: (row) => inBrief(`next ${row.name}`, row.later)},
];

/** A column and its "next_..." in one row. */
function rowsOf(arrays) {
  const rows = new Map();
  const names = new Set(arrays.map(([name]) => name));
  for (const [name, array] of arrays) {
    const root = name.startsWith("next_") && !names.has(`next_${name}`) ? name.slice(5) : name;
    const row = rows.get(root) ?? {name: root, now: null, later: null};
    row[root === name ? "now" : "later"] = array;
    rows.set(root, row);
  }
  return [...rows.values()];
}
