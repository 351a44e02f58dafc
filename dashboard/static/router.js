// Routing: the page and its state are in the address after "#/", so that a link shows the same view.

/** {page, parameters} of the address as it is now. */
export function here() {
  const [path, search = ""] = location.hash.replace(/^#\/?/, "").split("?");
  return {page: path || "overview", parameters: new URLSearchParams(search)};
}

/** The address of a page with a state; empty values are left out. */
export function address(page, state = {}) {
  const parameters = new URLSearchParams();
  for (const [name, value] of Object.entries(state)) {
    if (value !== "" && value !== null && value !== undefined) parameters.set(name, value);
  }
  const search = parameters.toString();
  return `#/${page}${search ? `?${search}` : ""}`;
}

/** Change parts of the state of this page, without a step in the browser's history. */
export function remember(changes) {
  const {page, parameters} = here();
  history.replaceState(null, "", address(page, {...Object.fromEntries(parameters), ...changes}));
}
