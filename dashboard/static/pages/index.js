// All pages, in the order of the navigation. `open({root, parameters, stream, signal})` draws one and returns what it
// wants to be told: update(overview) once a second, route(parameters) when only its state changed, close() at its end.
import {openActors} from "./actors.js";
import {openLogs} from "./logs.js";
import {openOverview} from "./overview.js";

export const PAGES = {
  overview: {title: "Overview", open: openOverview},
  actors: {title: "Actors", open: openActors},
  logs: {title: "Logs", open: openLogs},
};
