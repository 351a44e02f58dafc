// Theme: light, dark or the system's. "?theme=dark" in the address is for pages embedded in others.

const KEY = "memoire.theme";
const NAMES = ["system", "light", "dark"];
const SIGNS = {system: "◐", light: "☀", dark: "☾"};

function wanted() {
  const named = new URLSearchParams(location.search).get("theme") ?? localStorage.getItem(KEY);
  return NAMES.includes(named) ? named : "system";
}

/** Apply the theme, and let a button change it. */
export function startTheme(button) {
  let theme = wanted();
  const apply = () => {
    document.documentElement.dataset.theme = theme;
    button.textContent = SIGNS[theme];
    button.setAttribute("aria-label", `Theme: ${theme}. Change it.`);
    document.dispatchEvent(new Event("memoire:theme"));
  };
  const next = () => {
    theme = NAMES[(NAMES.indexOf(theme) + 1) % NAMES.length];
    localStorage.setItem(KEY, theme);
    apply();
  };
  button.addEventListener("click", next);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", apply);
  apply();
  return next;
}

/** A colour of the style sheet as it is now, such as "--line-1". */
export function colour(name) {
  const probe = document.createElement("span");
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const value = getComputedStyle(probe).color;
  probe.remove();
  return value;
}
