// Does it learn, and better than before: returns, lengths and scalars, over steps, time or models, runs side by side.
import {at, get, query} from "../api.js";
import {makeChart} from "../charts.js";
import {columnsOf, placesOn, together} from "../curves.js";
import {fill, h} from "../dom.js";
import {words} from "../format.js";
import {empty, every, showProblem} from "../parts.js";
import {isChosen, makeReturns} from "../returns.js";
import {address, remember} from "../router.js";

const IS_SCALAR = /^(client|learner)\./;
const SMOOTH = {off: 1, some: 5, much: 20};
const HEIGHT = 340;

export function openLearning({root, parameters, stream, signal}) {
  const state = Object.fromEntries(parameters);
  const message = h("div");
  const place = h("div.grid.wide");
  const ending = h("p");
  const charts = new Map();
  signal.addEventListener("abort", () => closeAll(charts));
  const change = (changes) => {
    Object.assign(state, changes);
    remember(changes);
    returns.refresh();
    refresh();
  };
  const returns = makeReturns({state, change, stream, signal, height: HEIGHT});
  fill(root, h("div.wide-chart", returns.element), message, place, ending);

  const refresh = every(5, signal, stream, async () => {
    try {
      const runs = await get("runs", {}, signal);
      const current = runs.find((run) => run.is_current);
      const beside = isChosen(state).map((name) => runs.find((run) => run.name === name && !run.is_current)).filter(Boolean);
      const shown = [...(current ? [current] : []), ...beside];
      const topic = Object.keys(stream.newest?.models ?? {})[0] ?? "";
      const axis = state.over === "version" && topic ? "version" : state.over !== "time" ? "steps" : shown.length > 1 ? "elapsed" : "time";
      const figures = await Promise.all(shown.map((run) => get("figures", {run: run.name}, signal)));
      const names = ["length", ...new Set(figures.flat().filter((name) => IS_SCALAR.test(name)))];
      const asked = [...names, "nodes_up", ...(topic ? [`model.${topic}`] : [])];
      const answers = await Promise.all(shown.map((run) => get("curves", {run: run.name, name: asked, points: 400}, signal)));
      draw(place, charts, names, {runs: shown, answers, axis, topic, width: SMOOTH[state.smooth] ?? SMOOTH.some});
      fill(ending, exports(current?.name ?? ""));
      showProblem(message, null);
    } catch (error) {
      if (error.name !== "AbortError") showProblem(message, error);
    }
  });
}

function draw(place, charts, names, {runs, answers, axis, topic, width}) {
  const known = names.filter((name) => answers.some(({mean}) => mean[name]?.some((value) => value !== null)));
  for (const [name, chart] of charts) {
    if (known.includes(name)) continue;
    chart.close();
    charts.delete(name);
  }
  for (const name of known) {
    if (!charts.has(name)) charts.set(name, makeChart({title: titleOf(name), sync: "learning"}));
    const sources = answers.map((answer, run) => ({xs: placesOn(axis, answer, runs[run].began, topic), time: answer.time, away: answer.away,
      columns: columnsOf(answer, name, width)}));
    const {x, columns} = together(sources);
    const lines = runs.map((run, shade) => ({name: runs.length > 1 ? run.name : lineName(name), shade, values: columns[3 * shade],
      ...(runs.length > 1 ? {} : {low: columns[1], high: columns[2]})}));
    charts.get(name).set(x, lines, {axis, away: axis === "time" ? answers[0].away : []});
  }
  const wanted = known.map((name) => charts.get(name).element);
  const isSame = wanted.length === place.childElementCount && wanted.every((each, at) => place.children[at] === each);
  if (!isSame || !wanted.length) fill(place, wanted.length ? wanted : empty(NOTHING));
}

const NOTHING = "No episode has ended yet, and no scalar has come in: client.scalars({...}) and server.scalars({...}) send them.";

const rest = (name) => words(name.slice(name.indexOf(".") + 1));
const titleOf = (name) => (name === "length" ? "Length of episodes" : `${rest(name)} · ${name.startsWith("client.") ? "mean of the actors" : "learner"}`);
const lineName = (name) => (name === "length" ? "steps" : rest(name));

function exports(run) {
  return ["Everything that is kept of this run: ", h("a", {href: at(`api/export.run${query({run})}`)}, "one file"), " to open elsewhere, ",
    h("a", {href: at(`api/export.csv${query({run})}`)}, "CSV"), ", ", h("a", {href: at(`api/export.tfevents${query({run})}`)}, "TensorBoard"),
    ". Other runs, and their settings side by side: ", h("a", {href: address("runs")}, "all runs"),
    ". Each actor by itself: ", h("a", {href: address("actors", {sort: "return_mean", order: "up"})}, "actors by their mean return"), "."];
}

function closeAll(charts) {
  for (const chart of charts.values()) chart.close();
  charts.clear();
}
