// What a cluster shows before its first actor: the line that starts one, with the address that is right here.
import {h, patch} from "../dom.js";

/** Whether nothing was recorded yet in a cluster that is ready for it. */
export function isWaiting({totals, actors, nodes, finished, recorded}) {
  const isUp = nodes.some((node) => node.role === "server" && node.state !== "down");
  return isUp && !finished && !recorded && totals.steps === 0 && actors.active + actors.silent + actors.lost + actors.gone === 0;
}

/** Where actors connect: a proxy before a server, one that answers before one that does not. */
function entrance(nodes) {
  const open = nodes.filter((node) => node.endpoint && node.state !== "down");
  return open.find((node) => node.role === "proxy") ?? open[0] ?? null;
}

/**
 * Keeps the card with the lines to copy in an element: call it with each overview. It is drawn again only when its lines
 * change, so a selection in it and the word on its button stay.
 */
export function startPlace(element) {
  let shown = null;
  return (overview) => {
    const node = isWaiting(overview) ? entrance(overview.nodes) : undefined;
    const key = node === undefined ? null : JSON.stringify([node?.endpoint, node?.keys]);
    if (key !== shown) patch(element, key !== null && startCard(node));
    shown = key;
  };
}

function startCard(node) {
  const address = node?.endpoint ?? "tcp://HOST:5560";
  const keys = node?.keys ? ', keys="FOLDER"' : "";
  const lines = ["import memoire", `client = memoire.connect("${address}"${keys})`, "writer = client.writer(envs)  # then writer.step(...) after each env.step"];
  return h("section.card.start", h("h2", "Ready, and waiting for the first actor"),
    h("p", "Servers are up and nothing was recorded yet. In the process that plays, write:"),
    h("div.code", h("pre", {tabindex: "0", role: "group", "aria-label": "Lines that start an actor"}, lines.join("\n")), h("button", {type: "button", click: copy}, "Copy")),
    keys && h("p.quiet", "FOLDER holds the actor's keys; `memoire keys` makes them."),
    h("p.quiet", "Does it get through? ", h("code", `memoire doctor ${address}`)));
}

/** Put the lines beside the button on the clipboard; where there is none, select them. */
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
