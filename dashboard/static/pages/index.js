// All pages, in the order of the navigation. `open({root, parameters, stream, signal})` draws a page and
// returns its callbacks: update(overview) once a second, route(parameters) if only its state changed, close() at its end.
import {openActors} from "./actors.js";
import {openGlossary} from "./glossary.js";
import {openInference} from "./inference.js";
import {openLag} from "./lag.js";
import {openLearning} from "./learning.js";
import {openLive} from "./live.js";
import {openLogs} from "./logs.js";
import {openMemory} from "./memory.js";
import {openNodes} from "./nodes.js";
import {openOverview} from "./overview.js";
import {openPrompts} from "./prompts.js";
import {openRuns} from "./runs.js";
import {openSettings} from "./settings.js";
import {openStarts} from "./starts.js";

export const PAGES = {
  overview: {title: "Overview", open: openOverview},
  live: {title: "Live", open: openLive},
  learning: {title: "Learning", open: openLearning},
  lag: {title: "Lag", open: openLag},
  inference: {title: "Inference", open: openInference},
  starts: {title: "Starts", open: openStarts},
  prompts: {title: "Prompts", open: openPrompts},
  runs: {title: "Runs", open: openRuns},
  memory: {title: "Memory", open: openMemory},
  actors: {title: "Actors", open: openActors},
  nodes: {title: "Nodes", open: openNodes},
  logs: {title: "Logs", open: openLogs},
  settings: {title: "Settings", open: openSettings},
  glossary: {title: "Terms", open: openGlossary, isHidden: true}, // linked from the footer and from each bubble
};
