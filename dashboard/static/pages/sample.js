// One held sample: its frames as pictures, its origin and its probability.
import {get} from "../api.js";
import {inBrief, pictures, shapeOf} from "../arrays.js";
import {fill, h, say} from "../dom.js";
import {count, duration, figure, NONE, share, typeName} from "../format.js";
import {term} from "../help.js";
import {empty, facts, problem, table} from "../parts.js";
import {address} from "../router.js";

/** {element, show(table)}: a section with a held sample of a table, and buttons for another sample and for its neighbours. */
export function makeSample(signal) {
  const place = h("div", h("p.quiet", "Loading …"));
  const where = h("output.quiet");
  let [wanted, shown, asked] = ["", null, 0];
  const step = (name, text, title) => h("button", {type: "button", title, disabled: true, click: () => go(shown[name])}, text);
  const earlier = step("earlier", "← Earlier", "The entry before (←)");
  const later = step("later", "Later →", "The entry after (→)");
  const again = h("button", {type: "button", click: () => show(wanted)}, "Another sample");
  const keys = ({key, target}) => {
    const button = {ArrowLeft: earlier, ArrowRight: later}[key];
    if (button && !target.closest("input, select, .strip")) button.click();
  };
  const element = h("section.block", {keydown: keys}, h("div.bar", h("h2", "One sample"), again,
    h("span.steps", earlier, where, later), h("span.quiet", "Drawn as a learner draws. The sample stays in the table.")), place);
  const put = ({sample, content, error}, nothing) => {
    if (error) {
      if (error.name !== "AbortError") fill(place, problem(error));
      return;
    }
    if (sample || !shown) fill(place, content ?? empty(nothing));
    shown = sample ?? shown;
    say(where, sample ? placeOf(sample) : shown ? nothing : ""); // the text below says it already
  };
  const look = async (ask, nothing) => {
    const number = (asked += 1);
    const focused = document.activeElement;
    for (const button of [again, earlier, later]) button.disabled = true;
    const answer = await answerTo(ask, signal);
    if (number !== asked) return; // another table was chosen meanwhile: its sample may be here already
    put(answer, nothing);
    again.disabled = false;
    earlier.disabled = !Number.isInteger(shown?.earlier);
    later.disabled = !Number.isInteger(shown?.later);
    if ([again, earlier, later].includes(focused)) (focused.disabled ? again : focused).focus();
  };
  const show = (name) => {
    [wanted, shown] = [name, null];
    return look(() => heldOne(name, signal), NOTHING);
  };
  const go = (number) => {
    const {server, client} = shown;
    return look(() => get("sample", {table: shown.table, server, client, number}, signal), "This entry is no longer held.");
  };
  return {element, show};
}

/** Position of an entry in its episode, or its number if the episode is unknown. */
const placeOf = ({step, episode, number, earlier, later}) => (step !== null ? `step ${count(step)} of ${count(episode)} of its episode` :
  earlier === null && later === null ? `entry ${count(number)} of its actor` : `entry ${count(number)} of its actor, among its held entries`);

const NOTHING = "There is no sample to show: the table is empty now, or a sample is larger than 4 MiB. Learners may take samples as soon as they arrive: try again.";
const TRIES = 4;

/** {sample, content}, both null if nothing is held, or {error}. */
async function answerTo(ask, signal) {
  try {
    const sample = await ask();
    return {sample, content: sample && drawn(sample, await episodeOf(sample, signal))};
  } catch (error) {
    return {error};
  }
}

/** A sample, or null if none was held at each of several tries. */
async function heldOne(name, signal) {
  for (let left = TRIES; left > 0; left -= 1) {
    const sample = await get("sample", {table: name}, signal);
    if (sample) return sample;
    await new Promise((done) => setTimeout(done, 500));
  }
  return null;
}

/** The first episode that its actor closed after the sample was recorded; null if that is not known. */
async function episodeOf({client, age, episode}, signal) {
  if (episode !== null) return null;
  const closed = await get("episodes", {client, limit: 1000}, signal);
  const recorded = Date.now() / 1000 - age;
  return closed.findLast(({time}) => time >= recorded) ?? null;
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
    episode ? `returned ${figure(episode.returned)} after ${count(episode.length)} steps` : "not known yet";
  return h("section.card", h("h2", "Where it comes from"), facts([
    ["table, server", `${name}, ${server}`],
    [isKept ? "episodes" : "actor", actor],
    ["entry", count(number)],
    [isKept ? "episode" : "episode that its actor closed next", within],
    ["recorded", `${duration(age)} ago`],
    [term("HeldSample.model_version", "model that acted"), version ? `version ${count(version)}` : "not reported"],
    [term("HeldSample.model_lag", "models behind the newest"), lag === null ? NONE : count(lag)],
  ]));
}

function standing({weight, probability, importance, td_error: error, episode}) {
  return h("section.card", h("h2", "How likely it is"), facts([
    [term("HeldSample.td_error"), error !== null ? figure(error) : episode !== null ? "none yet" : "known to its actor only"],
    [term("HeldSample.weight", "weight"), figure(weight)],
    [term("HeldSample.probability", "chance at each draw from its server"), probability < 0.01 ? `1 in ${count(1 / probability)}` : share(probability)],
    [term("HeldSample.importance", "importance"), figure(importance)],
  ]));
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
