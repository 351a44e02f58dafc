// Does it learn, and better than before: returns, lengths and scalars, over steps or time, runs side by side.
import {at, get, query} from "../api.js";
import {makeChart} from "../charts.js";
import {fill, h} from "../dom.js";
import {clock, count, figure, words} from "../format.js";
import {choice, empty, every, showProblem, table} from "../parts.js";
import {address, remember} from "../router.js";

const MAIN = ["return", "length"];
const IS_SCALAR = /^(client|learner)\./;
const AXES = [["steps", "over steps"], ["time", "over time"]];
const SMOOTH = [["1", "as they are"], ["5", "smoothed a little"], ["20", "smoothed"]];

export function openLearning({root, parameters, stream, signal}) {
  const state = {over: "steps", smooth: "1", runs: "", ...Object.fromEntries(parameters)};
  const message = h("div");
  const runsPlace = h("div.bar", {role: "group", "aria-label": "Runs beside this one"});
  const place = h("div.grid.wide");
  const ending = h("p");
  const compared = h("section");
  const charts = new Map();
  signal.addEventListener("abort", () => closeAll(charts));
  const change = (changes) => {
    Object.assign(state, changes);
    remember(changes);
    if (changes.over) closeAll(charts);
    refresh();
  };
  fill(root, h("div.bar", choice("Over", AXES, state.over, (over) => change({over})),
    choice("Smoothing", SMOOTH, state.smooth, (smooth) => change({smooth}))), runsPlace, message, place, ending, compared);

  const refresh = every(5, signal, stream, async () => {
    try {
      const runs = await get("runs", {}, signal);
      const current = runs.find((run) => run.is_current)?.name ?? "";
      const others = state.runs ? state.runs.split("\n").filter((name) => name !== current) : [];
      drawRuns(runsPlace, runs, others, (chosen) => change({runs: chosen.join("\n")}));
      const shown = [current, ...others];
      const figures = await Promise.all(shown.map((run) => get("figures", {run}, signal)));
      const names = [...MAIN, ...new Set(figures.flat().filter((name) => IS_SCALAR.test(name)))];
      const curves = await Promise.all(shown.map((run) => get("curves", {run, name: names, points: 400}, signal)));
      draw(place, charts, names, curves, state);
      fill(compared, runs.length > 1 && [h("h2", "All runs"), table("All runs", RUNS, runs.toReversed())]);
      fill(ending, exports(current));
      showProblem(message, null);
    } catch (error) {
      if (error.name !== "AbortError") showProblem(message, error);
    }
  });
}

const RUNS = [
  {title: "Run", value: (run) => run.name + (run.is_current ? " (now)" : "")},
  {title: "Began", value: (run) => clock(run.began)},
  {title: "Steps", value: (run) => count(run.facts.totals?.steps), number: true},
  {title: "Episodes", value: (run) => count(run.facts.totals?.episodes), number: true},
  {title: "Mean return", value: (run) => figure(run.facts.return_mean), number: true},
  {title: "Finished", value: (run) => (run.facts.finished ? "yes" : "no")},
];

function drawRuns(place, runs, chosen, change) {
  const others = runs.filter((run) => !run.is_current).toReversed().slice(0, 12);
  const key = JSON.stringify([others.map((run) => run.name), chosen]);
  if (place.dataset.key === key) return;
  place.dataset.key = key;
  const toggle = (name) => (chosen.includes(name) ? chosen.filter((each) => each !== name) : [...chosen, name]);
  fill(place, others.length ? h("span.quiet", "Beside this run:") : null, others.map(({name}) => h("button",
    {type: "button", "aria-pressed": String(chosen.includes(name)), click: () => change(toggle(name))}, name)));
}

function draw(place, charts, names, curves, {over, smooth}) {
  const isTime = over === "time";
  const known = names.filter((name) => curves.some(({mean}) => mean[name]?.some((value) => value !== null)));
  for (const [name, chart] of charts) {
    if (known.includes(name)) continue;
    chart.close();
    charts.delete(name);
  }
  for (const name of known) {
    if (!charts.has(name)) charts.set(name, makeChart({title: titleOf(name), isTime, sync: "learning"}));
    const [x, lines] = together(curves, name, isTime, Number(smooth));
    charts.get(name).set(x, lines);
  }
  const wanted = known.map((name) => charts.get(name).element);
  const isSame = wanted.length === place.childElementCount && wanted.every((each, at) => place.children[at] === each);
  if (!isSame || !wanted.length) fill(place, wanted.length ? wanted : empty(NOTHING));
}

const NOTHING = "No episode has ended yet, and no scalar has come in: client.scalars({...}) and server.scalars({...}) send them.";

function titleOf(name) {
  const [whose, rest] = [name.split(".", 1)[0], name.slice(name.indexOf(".") + 1)];
  return IS_SCALAR.test(name) ? `${words(rest)} (${whose === "client" ? "mean of the actors" : "learner"})` : {return: "Return of episodes", length: "Length of episodes"}[name];
}

/**
 * One x for the curves of all runs: steps as they are, times since each run's beginning of what is shown. Bands are those of what was
 * seen, also where lines are smoothed.
 */
function together(curves, name, isTime, width) {
  const at = new Map();
  curves.forEach(({time, steps, mean, least, greatest}, run) => {
    const values = smoothed(mean[name] ?? [], width);
    const xs = isTime ? time : steps;
    const shift = isTime && run ? curves[0].time[0] - time[0] : 0;
    values.forEach((value, index) => {
      const x = xs[index];
      if (value === null || x === null || x === undefined) return;
      if (!at.has(x + shift)) at.set(x + shift, new Array(curves.length).fill(NOWHERE));
      at.get(x + shift)[run] = [value, least[name][index], greatest[name][index]];
    });
  });
  const x = [...at.keys()].sort((a, b) => a - b);
  const part = (run, which) => x.map((each) => at.get(each)[run][which]);
  return [x, curves.map(({run}, index) => ({name: run, values: part(index, 0), low: part(index, 1), high: part(index, 2)}))];
}

const NOWHERE = [null, null, null];

/** The mean over up to `width` newest values. */
function smoothed(values, width) {
  const recent = [];
  return values.map((value) => {
    if (value === null) return null;
    recent.push(value);
    if (recent.length > width) recent.shift();
    return recent.reduce((sum, each) => sum + each, 0) / recent.length;
  });
}

function exports(run) {
  return ["Everything that is kept of this run: ", h("a", {href: at(`api/export.csv${query({run})}`)}, "CSV"), ", ",
    h("a", {href: at(`api/export.tfevents${query({run})}`)}, "TensorBoard"),
    ". Each actor by itself: ", h("a", {href: address("actors", {sort: "return_mean", order: "up"})}, "actors by their mean return"), "."];
}

function closeAll(charts) {
  for (const chart of charts.values()) chart.close();
  charts.clear();
}
