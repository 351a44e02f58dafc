// Scalars that actors and learners report: their titles and their groups.
import {figure, share, words} from "./format.js";

const IS_SCALAR = /^(client|learner)\./;
const HIDDEN = new Set(["recent_return", "learner_steps", "model_version", "lag_mean", "lag_max", "trainer_waits"]); // other charts show them

/** {title, unit, term?, format?} of scalars with known names; others keep their names. */
const KNOWN = {
  test_return: {title: "Test return", unit: "episodes that are not learned from", term: "test_return"},
  test_length: {title: "Length of test episodes", unit: "steps", term: "Learning.length_mean"},
  policy_loss: {title: "Policy loss", term: "policy_loss"},
  entropy: {title: "Entropy", unit: "of the actions' distribution", term: "entropy"},
  approx_kl: {title: "KL divergence", unit: "between the policy before an update and after it", term: "kl"},
  clip_fraction: {title: "Clipped ratios", unit: "share of the entries", term: "clip_fraction", format: share, top: 0.1},
  ratio: {title: "Probability ratio", unit: "new policy to old", term: "ratio"},
  value_loss: {title: "Value loss", term: "value_loss"},
  explained_variance: {title: "Explained variance", unit: "1 is perfect", term: "explained_variance"},
  loss: {title: "Loss"},
  grad_norm: {title: "Gradient norm", unit: "before it is clipped", term: "grad_norm"},
};
const SAME = {
  eval_return: "test_return", actor_loss: "policy_loss", pi_loss: "policy_loss", critic_loss: "value_loss", q_loss: "value_loss", vf_loss: "value_loss",
  kl: "approx_kl", mean_kl: "approx_kl", ratio_mean: "ratio", clipfrac: "clip_fraction", gradient_norm: "grad_norm", explained_var: "explained_variance",
};
const GROUPS = {
  Episodes: ["length", "test_return", "test_length"],
  "The policy": ["policy_loss", "entropy", "approx_kl", "clip_fraction", "ratio"],
  "The value function": ["value_loss", "explained_variance"],
  "The optimizer": ["loss", "grad_norm"],
};
const REST = "Other figures";

const rest = (name) => name.slice(name.indexOf(".") + 1);
const known = (name) => SAME[rest(name)] ?? rest(name);

/** True if another chart shows the scalar. */
export const isHidden = (name) => HIDDEN.has(name);

/** Names of the figures that the page Learning draws, out of all names. */
export const drawn = (names) => ["length", "test_return", "test_length", ...new Set(names.filter((name) => IS_SCALAR.test(name) && !isHidden(rest(name))))];

/** [[heading, names]] in their order; only those that there are. */
export function grouped(names) {
  const groups = Object.entries(GROUPS).map(([title, own]) => [title, own.flatMap((each) => names.filter((name) => known(name) === each))]);
  const taken = new Set(groups.flatMap(([, own]) => own));
  return [...groups, [REST, names.filter((name) => !taken.has(name))]].filter(([, own]) => own.length);
}

/** {title, unit, term, format} of the chart of a figure. */
export function called(name) {
  if (name === "length") return {title: "Length of episodes", unit: "steps", term: "Learning.length_mean"};
  const entry = KNOWN[known(name)];
  const plain = {title: words(rest(name)).replace(/^./, (letter) => letter.toUpperCase()), ...entry, format: entry?.format ?? figure};
  return name.startsWith("client.") ? {...plain, unit: "mean of the actors"} : plain;
}
