// Lag: versions by which acting models, and the models of learned entries, are behind the newest model.
import {get} from "../api.js";
import {fill, h, patch} from "../dom.js";
import {ago, count, figure, NONE, share} from "../format.js";
import {term} from "../help.js";
import {makeOverTime, titled} from "../overtime.js";
import {empty, every, facts, showProblem, table} from "../parts.js";
import {address} from "../router.js";

const MOST = 100; // actors, the farthest behind
const IS_STALE = /^table\.(.+)\.stale_share$/;
const IS_MODEL = /^model\.(.+)$/;
const now = () => Date.now() / 1000;

const COLUMNS = [
  {title: "Actor", value: (row) => h("a.mono", {href: address("actors", {id: row.client})}, row.name || row.label)},
  {title: "State", value: (row) => h(`span.state.${row.state}`, row.state)},
  {title: "Host", value: (row) => row.host || NONE},
  {title: "Acted with", term: "ActorRow.model_version", value: (row) => (row.model_version === null ? NONE : `version ${row.model_version}`), number: true},
  {title: "Behind", term: "ActorRow.model_lag", value: (row) => (row.model_lag === null ? NONE : row.model_lag ? count(row.model_lag) : "newest"), number: true},
  {title: "Steps/s", term: "ActorRow.steps_per_second", value: (row) => figure(row.steps_per_second), number: true},
  {title: "Reported", value: (row) => ago(row.last_seen, now()), number: true},
];

const CHARTS = [
  {title: "Models behind, actors", unit: "versions", named: "ActorRow.model_lag"},
  {title: "Models behind, learned entries", unit: "versions", named: "HeldSample.model_lag"},
  {title: "Skipped as too old", unit: "share of the entries that left the table", named: "TableRow.stale_share", format: share, top: 0.1},
  {title: "Newest model", unit: "version", format: count},
];

function linesOf(names) {
  const trained = names.includes("learner.lag_mean") ? "learner.lag" : "sample_lag"; // of each take, or of some batches
  const behind = ["actor_lag", trained].map((name) => ({[`${name}_mean`]: "mean", [`${name}_max`]: "largest"}));
  return [...behind, titled(names, IS_STALE), titled(names, IS_MODEL)];
}

export function openLag(page) {
  const {root, stream, signal} = page;
  const message = h("div");
  const cards = h("div.grid.wide", h("p.quiet", "Loading …"));
  const list = h("div");
  fill(root, cards, makeOverTime({kinds: CHARTS, linesOf, sync: "lag"}, page), message, h("h2", "Actors, the farthest behind first"), list);
  every(3, signal, stream, async () => {
    const {rows} = await get("actors", {sort: "model_lag", order: "down", limit: MOST}, signal);
    const here = rows.filter(({state}) => state !== "gone");
    patch(list, here.length ? table("Actors by model", COLUMNS, here) : empty(NO_ACTORS));
  }, (error) => showProblem(message, error));
  return {update: (overview) => patch(cards, act(overview), learn(overview))};
}

const NO_ACTORS = "No actor has recorded anything in this run yet. An actor connects with memoire.connect(ADDRESS).";

const versions = (lag) => `${figure(lag)} version${lag === 1 ? "" : "s"}`;

/** The models that actors and inference nodes act with. */
function act({models, actor_lag: lag, outdated, actors, inference}) {
  const topics = Object.entries(models);
  const answer = !topics.length ? "No model was published yet" : lag === null ? "No actor reports its model" :
    lag.max === 0 ? "Every actor acts with the newest model" : `Actors are ${versions(lag.mean)} behind, at most ${count(lag.max)}`;
  return h("section.card", h("h2", "How old are the models that act?"), h("p.answer", answer),
    !topics.length && h("p.quiet", "A learner publishes one with server.publish(\"policy\", weights), and actors follow it with client.model(\"policy\")."),
    facts([
      ...topics.map(([topic, version]) => [`Newest model of ${topic}`, `version ${version}`]),
      [term("Overview.actors", "Actors that report their model"), lag === null ? NONE : `${count(lag.actors)} of ${count(actors.active)} active`],
      [term("Overview.outdated"), count(outdated)],
      ...inference.map((row) => [h("a", {href: address("inference")}, row.name), `version ${row.version}${row.behind ? `, ${row.behind} behind` : ""}`]),
    ]));
}

/** Models of the entries that learners learned from. */
function learn({tables, freshness}) {
  const {lag_mean: mean, lag_max: most} = freshness;
  const answer = mean === null ? "No recent batch reports its models" : mean === 0 ? "All learned entries are from the newest model" :
    `The models of learned entries are ${versions(mean)} behind, at most ${count(most)}`;
  return h("section.card", h("h2", "How old are the models of learned entries?"), h("p.answer", answer), facts(tables.flatMap((row) => [
    [term("TableRow.max_model_lag", `Limit of table ${row.name}`), row.max_model_lag === null ? "none (max_model_lag)" : versions(row.max_model_lag)],
    ...(row.is_taken ? [
      [term("TableRow.stale_share", `Skipped in table ${row.name}`), row.stale_share === null ? NONE : share(row.stale_share)],
      [term("TableRow.passed_over_samples", "Entries too old, in total"), count(row.passed_over_samples)],
    ] : []),
  ])));
}
