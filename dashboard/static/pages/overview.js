// Overview: findings on the cluster, the curve of returns, the figures that explain it, and the tables.
import {get} from "../api.js";
import {h, patch} from "../dom.js";
import {bytes, count, duration, figure, NONE, share, until, words} from "../format.js";
import {column, term} from "../help.js";
import {spark} from "../histogram.js";
import {every, facts, table, tile} from "../parts.js";
import {makeReturns} from "../returns.js";
import {address, remember} from "../router.js";
import {isHidden} from "../scalars.js";

const CURVES = ["steps_per_second", "episodes_per_second", "caches_per_second", "samples_per_second", "samples_per_insert", "sample_age_median"];
const SPAN = 600;
const SCALARS = 4; // number of scalars beside the curve
const HEIGHT = 330;
const HEIGHT_OF_PHONE = 230;
const NARROW = 700;
const NEAR = 5; // values on either side, over which the return of a former run is averaged
const FEW = 0.5; // share of the targeted samples per step, below which the tile is marked
const LEVELS = {good: "All well", notice: "Notice", bad: "Trouble"};

export function openOverview({root, parameters, stream, signal}) {
  const state = Object.fromEntries(parameters);
  const verdicts = h("ul.verdicts", {"aria-label": "State of the cluster", "aria-live": "polite"});
  const start = h("div");
  const showStart = startPlace(start);
  const now = h("section.card.now");
  const change = (changes) => {
    Object.assign(state, changes);
    remember(changes);
    returns.refresh();
  };
  const returns = makeReturns({state, change, stream, signal, height: innerWidth < NARROW ? HEIGHT_OF_PHONE : HEIGHT});
  const rest = h("div", h("p.quiet", "Waiting for the first answer of the nodes …"));
  root.replaceChildren(verdicts, start, h("div.hero", returns.element, now), rest);
  let curves = {};
  let former = null;
  every(30, signal, stream, async () => {
    former = await formerRun(signal);
  });
  every(3, signal, stream, async () => {
    const since = Math.max(0, (stream.newest?.time ?? Date.now() / 1000) - SPAN);
    curves = (await get("curves", {name: CURVES, since, points: 120}, signal)).mean;
  });
  return {
    update(overview) {
      const waits = isWaiting(overview);
      const findings = overview.verdicts.filter(({code}) => !(waits && code === "waiting_for_actors")); // the start card says it
      patch(verdicts, findings.map((each) => verdict(each, findings[0].level)));
      showStart(overview);
      patch(now, learned(overview, returns.values, former));
      patch(rest, sections(overview, curves));
    },
  };
}

// ------------------------------------------------------------------------------------------------------ findings

function verdict({level, code, text}, worst) {
  const title = level === "good" && worst !== "good" ? "Otherwise" : code === "settling" ? "Starting" : LEVELS[level] ?? level;
  const [page, state] = WHERE[code] ?? [];
  const link = page && h("a", {href: address(page, state)}, `See ${PAGE_NAMES[page]}`);
  return h(`li.verdict.${level}`, h("b", title), h("span", marked(text), link && [" ", link]));
}

/** A text with its commands (in ` `) and options as code, which no line break splits. */
export const marked = (text) => text.split(/(`[^`]+`|--[a-z][a-z-]*)/).map((part, at) => (at % 2 ? h("code.nowrap", part.replaceAll("`", "")) : part));

const PAGE_NAMES = {lag: "how far models are behind", inference: "the inference nodes", nodes: "the nodes", actors: "the actors", live: "the curves over time", memory: "the stored data"};

/** The page with details of each finding, and the page's state. */
const WHERE = {
  no_node: ["nodes"], no_server: ["nodes"], node_down: ["nodes"], node_unready: ["nodes"], disk_full: ["nodes"], refused: ["nodes"],
  servers_missing: ["nodes"], proxies_missing: ["nodes"], no_inserts: ["actors", {sort: "last_seen"}], no_caches: ["nodes"],
  learner_behind: ["live"], samples_old: ["live"], models_behind: ["lag"], caches_rejected: ["actors", {sort: "rejected_caches"}], actors_gone: ["actors"],
  inference_missing: ["nodes"], waits_for_inference: ["inference"], inference_behind: ["inference"], inference_refuses: ["inference"], lag: ["lag"], learner_skips_stale: ["lag"], feedback_late: ["memory"],
  no_actors: ["actors"], actors_missing: ["actors", {sort: "last_seen"}], actors_silent: ["actors", {state: "silent"}], actors_idle: ["nodes"],
  learner_waits: ["live"], actors_ahead: ["live"], no_learner: ["nodes"], left_out: ["memory"], inserts_limited: ["memory"], draws_limited: ["memory"],
};

// ------------------------------------------------------------------------------------------------------ beside the curve

/** The run before the current one, with its returns over steps; null if there is none. */
async function formerRun(signal) {
  const before = (await get("runs", {}, signal)).filter((run) => !run.is_current).at(-1);
  if (!before) return null;
  const {steps, mean} = await get("curves", {run: before.name, name: ["return"], since: 0, points: 400}, signal);
  return {name: before.name, steps, returns: mean.return};
}

/** Return of the former run at the same number of steps: the mean of the nearest values. */
function returnAt({steps, returns}, now) {
  const known = steps.map((each, at) => [each, returns[at]]).filter(([each, value]) => each !== null && value !== null);
  const after = known.findIndex(([each]) => each >= now);
  if (after < 0) return "already over";
  const near = known.slice(Math.max(0, after - NEAR), after + NEAR).map(([, value]) => value);
  return figure(near.reduce((sum, value) => sum + value, 0) / near.length);
}

const SIGNS = {rising: "↗ rising", falling: "↘ falling", level: "→ level"};

function learned({learning, run, finished, totals}, values, former) {
  const {return_mean: mean, goal} = learning;
  const trend = trendOf(values);
  const scalars = Object.entries({...learning.client_scalars, ...learning.learner_scalars}).filter(([name]) => !isHidden(name)).slice(0, SCALARS);
  return [
    h("h2", "Does it learn?"),
    h("div.label", term("Learning.return_mean")),
    h("div.value", figure(mean), trend && h(`span.trend.${trend}`, SIGNS[trend])),
    mean === null && h("p.quiet", "No episode has ended yet."),
    goal !== null && mean !== null && goalBar(mean, goal),
    facts([
      former && [`${former.name} at the same step`, returnAt(former, totals.steps)],
      ["Best so far", values.length ? figure(Math.max(...values)) : NONE],
      ["Lowest and highest", mean === null ? NONE : `${figure(learning.return_min)} and ${figure(learning.return_max)}`],
      [term("Learning.length_mean", "Episode length"), mean === null ? NONE : `${figure(learning.length_mean)} steps`],
      ...scalars.map(([name, value]) => [words(name), figure(value)]),
      ["Run", h("a", {href: address("runs")}, finished ? `${run} (over)` : run || NONE)],
    ].filter(Boolean)),
  ];
}

function goalBar(mean, goal) {
  const part = goal > 0 ? Math.min(1, Math.max(0, mean / goal)) : Number(mean >= goal);
  const text = mean >= goal ? `The goal of ${figure(goal)} is reached` : `${share(part)} of the goal of ${figure(goal)}`;
  return [h("progress", {max: 1, value: part, "aria-label": text}), h("p.quiet", text)];
}

// -------------------------------------------------------------------------------------------------------------- figures

function sections(overview, curves) {
  return [
    h("div.tiles", tilesOf(overview).map((each) => tileOf(each, curves))),
    h("div.grid.four", waiting(overview), fresh(overview), actors(overview), room(overview)),
    tableOf(overview),
  ];
}

function tilesOf({totals, rates, freshness, tables}) {
  const target = tables.map((each) => each.samples_per_insert_target).find(Boolean) ?? 0;
  const ratio = rates.samples_per_insert;
  const isLow = target && ratio !== null && ratio < FEW * target;
  return [
    {name: "steps", term: "Totals.steps", label: "Steps", value: count(totals.steps), rest: `${figure(rates.steps)} / s`, curve: "steps_per_second"},
    {name: "episodes", term: "Totals.episodes", label: "Episodes", value: count(totals.episodes), rest: `${figure(rates.episodes)} / s`, curve: "episodes_per_second"},
    {name: "caches", term: "Totals.accepted_caches", label: "Caches", value: count(totals.accepted_caches), rest: `${figure(rates.caches)} / s`, curve: "caches_per_second"},
    {name: "samples", term: "TableRow.samples", label: "Samples drawn", value: `${figure(rates.samples)} / s`, rest: `${figure(rates.batches)} batches / s`, curve: "samples_per_second"},
    {name: "samples_per_step", term: "TableRow.samples_per_insert", label: "Samples per step", value: figure(ratio), isLow, rest: target ? `target ${figure(target)}` : "no target set", curve: "samples_per_insert"},
    {name: "sample_age", term: "HeldSample.age", label: "Age of samples", value: duration(freshness.age_median), rest: freshness.age_median === null ? "no recent batch" : `9 in 10 < ${duration(freshness.age_p90)}`,
      curve: "sample_age_median"},
  ];
}

function tileOf({name, term: named, label, value, rest, curve, isLow}, curves) {
  const line = spark(curves[curve] ?? [], `${label}: ${words(curve)}, the last ten minutes`, 32);
  const element = tile(term(named, label), value, h(isLow ? "span.low" : "span", rest), line);
  element.dataset.figure = name;
  return element;
}

function card(question, answer, ...rest) {
  return h("section.card", h("h2", question), h("p.answer", answer), ...rest);
}

function waiting({rates, latency, learners, tables}) {
  const held = tables.flatMap((each) => [each.rate.draws_wait, each.rate.inserts_wait]).filter(Boolean);
  const isIdle = rates.waiting_share === null || (!rates.samples && rates.waiting_share < 0.5);
  const answer = isIdle ? "No learner draws samples now" :
    rates.waiting_share < 0.02 ? "The learner does not wait" : `The learner waits ${share(rates.waiting_share)} of its time`;
  return card("Does the learner wait?", answer, ...held.map((text) => h("p", text)), facts([
    [term("LearnerRow.waiting_share", "Learner waits"), share(rates.waiting_share)],
    [term("Totals.skipped_caches", "Caches skipped"), share(rates.skipped_share)],
    [term("Overview.latency"), latency.p50 === null ? NONE : `${duration(latency.p50)}, 99\u00a0% <\u00a0${duration(latency.p99)}`],
    ["Learners", h("a", {href: address("nodes")}, count(learners.length))],
    ["Batches taken", count(learners.reduce((sum, each) => sum + each.batches, 0))],
  ]));
}

function fresh({freshness}) {
  const isKnown = freshness.age_median !== null;
  const answer = isKnown ? `Half of the samples are younger than ${duration(freshness.age_median)}` : "No batch was drawn recently";
  return card("Is the data fresh?", answer, facts([
    [term("HeldSample.age", "Oldest sample"), duration(freshness.age_max)],
    [term("HeldSample.model_lag"), freshness.lag_mean === null ? NONE : h("a", {href: address("lag")}, `${figure(freshness.lag_mean)}, at most ${figure(freshness.lag_max)}`)],
    [term("SampleFreshness.effective", "Effective batch"), freshness.effective === null ? NONE : share(freshness.effective)],
    [term("SampleFreshness.left_out", "Priority left out"), share(freshness.left_out)],
  ]));
}

function actors({actors: numbers, nodes}) {
  const missing = numbers.missing ? `, ${numbers.missing} of ${numbers.expected} missing` : "";
  const down = nodes.filter((node) => node.state !== "up");
  const link = (state) => h("a", {href: address("actors", {state})}, count(numbers[state]));
  return card("How many actors are active?", `${count(numbers.active)} actor${numbers.active === 1 ? "" : "s"} active${missing}`, facts([
    [term("Overview.actors", "Active"), link("active")],
    ...(numbers.idle ? [["of these, no step recorded yet", count(numbers.idle)]] : []),
    ["Silent", link("silent")],
    ...(numbers.lost ? [["Lost", link("lost")]] : []),
    ["Gone (ended in order)", link("gone")],
    ["Nodes that answer", h("a", {href: address("nodes")}, `${nodes.length - down.length} of ${nodes.length}`)],
    ...down.map((node) => [node.name || node.url, h(`span.state.${node.state}`, node.state)]),
  ]));
}

function room({forecast, totals, finished, rates, durable}) {
  const answer = finished ? "The run is over" : forecast.goal !== null ? `Done in ${duration(forecast.goal)}` : "No end is foreseen";
  return card("When does the run end?", answer, facts([
    [term("Forecast.memory_full"), until(forecast.memory_full, "now; new entries overwrite the oldest")],
    [term("Forecast.disk_full"), until(forecast.disk_full, "now")],
    [term("bytes_sent"), !totals.generated_bytes ? NONE : `${bytes(totals.received_bytes)} for ${bytes(totals.generated_bytes)} recorded`],
    ["Arriving now", `${bytes(rates.received_bytes)} / s`],
    [term("Overview.durable"), durable ? "yes" : "no: no state folder"],
  ]));
}

function tableOf({tables}) {
  const columns = [
    {title: "Table", value: (row) => row.name},
    {title: "Storage", value: (row) => row.storage},
    column("TableRow.clients"),
    column("TableRow.held_caches", {value: (row) => `${count(row.held_caches)} ${row.holds}`}),
    column("TableRow.held_bytes"),
    column("TableRow.full", {value: fullness, number: false}),
    ...["samples", "unused_samples"].map((name) => column(`TableRow.${name}`)),
    column("TableRow.overwritten_caches", {value: (row) => `${count(row.overwritten_caches)} ${row.holds}`}),
  ];
  return tables.length ? table("Tables", columns, tables) : null;
}

function fullness(row) {
  if (row.full === null) return "no limit";
  const text = share(row.full);
  return h("span.full", h("progress", {max: 1, value: row.full, "aria-label": `${row.name} is ${text} full`}), text);
}

// ------------------------------------------------------------------------------------------------------ before the first actor

/** True if the cluster is ready and nothing was recorded yet. */
function isWaiting({totals, actors, nodes, finished, recorded}) {
  const isUp = nodes.some((node) => node.role === "server" && node.state !== "down");
  return isUp && !finished && !recorded && totals.steps === 0 && actors.active + actors.silent + actors.lost + actors.gone === 0;
}

/** The node that actors connect to: a proxy if one answers, else a server; null if none answers. */
function entrance(nodes) {
  const open = nodes.filter((node) => node.endpoint && node.state !== "down");
  return open.find((node) => node.role === "proxy") ?? open[0] ?? null;
}

/**
 * Return a function that keeps the start card in an element; call it with each overview. The card is redrawn only when its
 * lines change, so that a selection in it and the text of its button stay.
 */
function startPlace(element) {
  let shown = null;
  return (overview) => {
    const node = isWaiting(overview) ? entrance(overview.nodes) : undefined;
    const key = node === undefined ? null : JSON.stringify([node?.endpoint, node?.keys]);
    if (key !== shown) patch(element, key !== null && startCard(node));
    shown = key;
  };
}

function startCard(node) {
  const front = node?.endpoint ?? "tcp://HOST:5560";
  const keys = node?.keys ? ', keys="FOLDER"' : "";
  const lines = ["import memoire", `client = memoire.connect("${front}"${keys})`, "writer = client.writer(envs)  # then writer.step(...) after each env.step"];
  return h("section.card.start", h("h2", "Ready, and waiting for the first actor"),
    h("p", "Servers are up and nothing was recorded yet. In the process that steps the environments, write:"),
    h("div.code", h("pre", {tabindex: "0", role: "group", "aria-label": "Lines that start an actor"}, lines.join("\n")), h("button", {type: "button", click: copy}, "Copy")),
    keys && h("p.quiet", "FOLDER holds the actor's keys; `memoire keys` makes them."),
    h("p.quiet", "Test the connection: ", h("code", `memoire doctor ${front}`)));
}

/** Copy the lines beside the button to the clipboard; select them if there is no clipboard. */
async function copy(event) {
  const button = event.currentTarget;
  const pre = button.previousElementSibling;
  try {
    const late = new Promise((_, refuse) => setTimeout(refuse, 1000)); // a browser may wait for a permission
    await Promise.race([navigator.clipboard.writeText(pre.textContent), late]);
    button.textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(pre);
    button.textContent = "Selected";
  }
}

// ---------------------------------------------------------------------------------------------------------------- trend

const KNOWN = 10; // least number of values for a trend
const SURE = 2.5; // standard errors that the slope of a level curve seldom reaches
const ALIKE = 0.99;

/** Trend of the newest two thirds of the values, by their slope: "rising", "falling" or "level"; "" if few are known.
 *
 * Neighbours on a smoothed curve are correlated, so the standard error of the slope is widened. */
function trendOf(values) {
  const recent = values.slice(-Math.floor((values.length * 2) / 3));
  if (recent.length < KNOWN) return "";
  const middle = (recent.length - 1) / 2;
  const mean = sum(recent) / recent.length;
  const spread = sum(recent.map((_, at) => (at - middle) ** 2));
  const slope = sum(recent.map((value, at) => (at - middle) * value)) / spread;
  const rest = recent.map((value, at) => value - mean - slope * (at - middle));
  const squares = sum(rest.map((value) => value ** 2));
  const alike = squares > 0 ? Math.min(ALIKE, Math.max(0, sum(rest.slice(1).map((value, at) => value * rest[at])) / squares)) : 0;
  const error = Math.sqrt((squares / (recent.length - 2) / spread) * ((1 + alike) / (1 - alike)));
  if (Math.abs(slope) <= SURE * error) return "level";
  return slope > 0 ? "rising" : "falling";
}

const sum = (values) => values.reduce((all, value) => all + value, 0);
