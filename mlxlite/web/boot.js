// Starts the app once the page has been painted: the frame of it needs no script to be seen.
//
// All modules of the first view are asked for at once, so that none waits for another to name it.

const MODULES = [
  "api", "app", "attach", "chat", "composer", "conversation", "dialogs", "dom", "icons", "keys", "log", "message",
  "meter", "render", "run", "sanitise", "settings", "sidebar", "tree",
];

function start() {
  for (const name of MODULES) {
    const link = document.createElement("link");
    link.rel = "modulepreload";
    link.href = new URL(`./${name}.js`, import.meta.url);
    document.head.append(link);
  }
  import("./app.js");
}

if (document.hidden) start(); // nothing is painted until somebody looks
else requestAnimationFrame(() => setTimeout(start));
