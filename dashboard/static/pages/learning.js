// Learning: returns, the learner's waiting, and its figures by subject; over steps, time or model versions, with runs side by
// side.
import {at, get, query} from "../api.js";
import {makeChart} from "../charts.js";
import {columnsOf, placesOn, together} from "../curves.js";
import {fill, h, patch} from "../dom.js";
import {count, duration, figure, NONE, share} from "../format.js";
import {term} from "../help.js";
import {empty, every, facts, showProblem} from "../parts.js";
import {makeReturns, shownRuns} from "../returns.js";
import {address, remember} from "../router.js";
import {called, drawn, grouped} from "../scalars.js";

const SMOOTH = {off: 1, some: 5, much: 20};
const HEIGHT = 340;
const WAITS = "waiting_share";
/** Meanings of the scalar `trainer_waits`. */
const TRAINER = ["trains", "waits for its first samples", "waits for samples: its ratio is reached"];
/** Findings on waiting, with the answer above their sentence. */
const FLOW = {
  no_inserts: "No steps come in", no_caches: "No caches arrive", inserts_limited: "Actors wait for the learner", waits_for_inference: "It waits for inference",
  draws_limited: "It waits for entries", learner_waits: "It waits for actors", no_learner: "No learner draws samples", learner_behind: "It does not wait: it is slower than its actors",
  settling: "Too early to say", balanced: "It waits little or not at all",
};

export function openLearning({root, parameters, stream, signal}) {
  const state = Object.fromEntries(parameters);
  const message = h("div");
  const place = h("div");
  const ending = h("p");
  const waits = h("section.card");
  const waiting = makeChart({title: "Learner waits", unit: "share of its time", named: "LearnerRow.waiting_share", format: share, top: 1, sync: "learning"});
  const charts = new Map([[WAITS, waiting]]);
  signal.addEventListener("abort", () => closeAll(charts));
  const change = (changes) => {
    Object.assign(state, changes);
    remember(changes);
    returns.refresh();
    refresh();
  };
  const returns = makeReturns({state, change, stream, signal, height: HEIGHT});
  fill(root, h("div.wide-chart", returns.element), h("div.grid.wide", waits, waiting.element), message, place, ending);

  const refresh = every(5, signal, stream, async () => {
    const runs = await get("runs", {}, signal);
    const shown = shownRuns(runs, state);
    const topic = Object.keys(stream.newest?.models ?? {})[0] ?? "";
    const axis = state.over === "version" && topic ? "version" : state.over !== "time" ? "steps" : shown.length > 1 ? "elapsed" : "time";
    const figures = await Promise.all(shown.map((run) => get("figures", {run: run.name}, signal)));
    const names = drawn(figures.flat());
    const asked = [...names, WAITS, "nodes_up", ...(topic ? [`model.${topic}`] : [])];
    const answers = await Promise.all(shown.map((run) => get("curves", {run: run.name, name: asked, points: 400}, signal)));
    draw(place, charts, names, {runs: shown, answers, axis, topic, width: SMOOTH[state.smooth] ?? SMOOTH.some});
    fill(ending, exports(runs.find((run) => run.is_current)?.name ?? ""));
  }, (error) => showProblem(message, error));
  return {update: (overview) => patch(waits, waitsFor(overview))};
}

// ---------------------------------------------------------------------------------------------------------- waiting

/** What the learner waits for now: the finding of the overview about it, and the figures behind it. */
function waitsFor({verdicts, rates, learners, tables, freshness, finished}) {
  const finding = verdicts.find(({code}) => FLOW[code]);
  const rollouts = tables.filter((each) => each.is_taken);
  const taken = rollouts.reduce((sum, each) => sum + each.samples, 0);
  const trainer = learners.find(({scalars}) => scalars.trainer_ratio !== undefined)?.scalars;
  const stale = rollouts.reduce((sum, each) => sum + each.passed_over_samples, 0);
  return [
    h("h2", "What does the learner wait for?"),
    h("p.answer", finished ? "The run is over" : finding ? FLOW[finding.code] : learners.length ? "Not known yet" : "No learner draws samples"),
    finding && h("p", finding.text),
    facts([
      [term("LearnerRow.waiting_share"), share(rates.waiting_share)],
      [term("TableRow.samples"), `${figure(rates.samples)} / s, in ${figure(rates.batches)} batches / s`],
      [term("HeldSample.age", "Age of samples"), duration(freshness.age_median)],
      [term("HeldSample.model_lag"), freshness.lag_mean === null ? NONE : h("a", {href: address("lag")}, `${figure(freshness.lag_mean)}, at most ${figure(freshness.lag_max)}`)],
      ...(trainer ? [[term("trainer_waits"), TRAINER[trainer.trainer_waits] ?? TRAINER[0]],
        [term("trainer_ratio"), figure(trainer.trainer_ratio)]] : []),
      ...(rollouts.length ? [[term("TableRow.samples", "Entries taken"), count(taken)], [term("TableRow.passed_over_samples"), count(stale)]] : []),
    ]),
  ];
}

// ---------------------------------------------------------------------------------------------------------- figures

function draw(place, charts, names, {runs, answers, axis, topic, width}) {
  const isKnown = (name) => answers.some(({mean}) => mean[name]?.some((value) => value !== null));
  const known = names.filter(isKnown);
  for (const [name, chart] of charts) {
    if (name === WAITS || known.includes(name)) continue;
    chart.close();
    charts.delete(name);
  }
  for (const name of [WAITS, ...known]) {
    const {title, term: named, ...kind} = called(name);
    if (!charts.has(name)) charts.set(name, makeChart({title, named, ...kind, sync: "learning"}));
    const sources = answers.map((answer, run) => ({xs: placesOn(axis, answer, runs[run].began, topic), time: answer.time, away: answer.away,
      columns: columnsOf(answer, name, width)}));
    const {x, columns} = together(sources);
    const lines = runs.map((run, shade) => ({name: runs.length > 1 ? run.name : lineName(name, title), shade, values: columns[3 * shade],
      ...(runs.length > 1 ? {} : {low: columns[1], high: columns[2]})}));
    charts.get(name).set(x, lines, {axis, away: axis === "time" ? answers[0].away : []});
  }
  arrange(place, charts, grouped(known));
}

const lineName = (name, title) => (name === "length" ? "steps" : name === WAITS ? "waits" : title.toLowerCase().replace(/^kl /, "KL "));

/** Place the charts below their headings. Charts of unchanged groups stay in place, so that unfolded tables stay open. */
function arrange(place, charts, groups) {
  const key = JSON.stringify(groups);
  if (place.dataset.key === key) return;
  place.dataset.key = key;
  fill(place, groups.length ? groups.map(([title, names]) => [h("h2", title), h("div.grid.wide", names.map((name) => charts.get(name).element))]) : empty(NOTHING));
}

const NOTHING = "No episode has ended yet, and no scalar has arrived. client.scalars({...}) and server.scalars({...}) send scalars.";

function exports(run) {
  return ["Export this run: ", h("a", {href: at(`api/export.run${query({run})}`)}, "one file"), " to open elsewhere, ",
    h("a", {href: at(`api/export.csv${query({run})}`)}, "CSV"), ", ", h("a", {href: at(`api/export.tfevents${query({run})}`)}, "TensorBoard"),
    ". Compare runs and their settings: ", h("a", {href: address("runs")}, "all runs"),
    ". See each actor: ", h("a", {href: address("actors", {sort: "return_mean", order: "up"})}, "actors by mean return"), "."];
}

function closeAll(charts) {
  for (const chart of charts.values()) chart.close();
  charts.clear();
}
