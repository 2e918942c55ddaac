// Keeps the page usable without the server: the shell, never an answer of the API.
//
// While the server is there every file comes from it (an unchanged one as a 304 by its ETag), so
// nothing is ever stale; what came is kept, and shown when the server does not answer.

const CACHE = "mlxlite-{{version}}"; // the server puts in a hash of all files
const PATIENCE_MS = 4000;
const SHELL = [
  "/", "/manifest.webmanifest",
  ...[
    "app.css", "hljs.css", "icon.svg", "theme.js", "app.js", "api.js", "attach.js", "charts.js", "chat.js", "composer.js",
    "conversation.js", "dialogs.js", "dom.js", "icons.js", "keys.js", "log.js", "message.js", "meter.js",
    "models.js", "render.js", "run.js", "sanitise.js", "sessions.js", "settings.js", "sidebar.js", "status.js", "tree.js",
  ].map((name) => `/assets/${name}`),
];

addEventListener("install", (event) => {
  event.waitUntil(
    caches.open(CACHE).then(async (cache) => {
      // A file that is not there must not keep the others from being kept.
      await Promise.all(SHELL.map((path) => fresh(path).then((response) => response.ok && cache.put(path, response), () => {})));
      await skipWaiting();
    }),
  );
});

addEventListener("activate", (event) => {
  event.waitUntil(
    caches.keys().then(async (names) => {
      await Promise.all(names.filter((name) => name !== CACHE).map((name) => caches.delete(name)));
      await clients.claim();
    }),
  );
});

addEventListener("fetch", (event) => {
  const { request } = event;
  const url = new URL(request.url);
  if (request.method !== "GET" || url.origin !== location.origin) return;
  const isShell = url.pathname === "/" || url.pathname === "/manifest.webmanifest" || url.pathname.startsWith("/assets/");
  if (isShell) event.respondWith(serverFirst(url.pathname));
});

/** From the server, asking whether what the browser has is still good. */
const fresh = (path) => fetch(path, { cache: "no-cache", signal: AbortSignal.timeout(PATIENCE_MS) });

async function serverFirst(path) {
  const cache = await caches.open(CACHE);
  try {
    const response = await fresh(path);
    if (response.ok) await cache.put(path, response.clone());
    return response;
  } catch {
    return (await cache.match(path)) ?? Response.error();
  }
}
