// Keeps the page usable without the server: the shell, never an answer of the API.
//
// `/` comes from the server whenever it answers. The files that it names have the version in their
// address, a hash of all of them, so they can be taken from the cache; a new version has a worker and
// a cache of its own. The server puts the version in here, too.

const VERSION = "{{version}}";
const BASE = `/assets/v-${VERSION}/`;
const CACHE = `mlxlite-${VERSION}`;
const PATIENCE_MS = 4000;
const MODULES = [
  "api", "app", "attach", "boot", "charts", "chat", "composer", "conversation", "dialogs", "dom", "fetching", "icons",
  "keys", "log", "message", "meter", "models", "render", "rows", "run", "sanitise", "sessions", "settings", "sidebar",
  "status", "theme", "tree", "upkeep",
];
const FIXED = ["/", "/manifest.webmanifest", "/assets/icon.svg"];
const VISITED = ["/curves", "/curve-terrain", "/dag"];  // kept, with their files, once they were opened
const SHEETS = ["app", "hljs", "models"];
const SHELL = [...FIXED, ...SHEETS.map((name) => `${BASE}${name}.css`), ...MODULES.map((name) => `${BASE}${name}.js`)];

addEventListener("install", (event) => {
  // The API is not the worker's: with this the browser does not even ask it (where it knows how).
  const away = ["/api/*", "/v1/*", "/stats", "/health", "/tokenize", "/apply-template"];
  event.addRoutes?.(away.map((pathname) => ({ condition: { urlPattern: { pathname } }, source: "network" })));
  event.waitUntil(keepShell());
});

async function keepShell() {
  const cache = await caches.open(CACHE);
  // A file that is not there must not keep the others from being kept.
  await Promise.all(SHELL.map((path) => keep(cache, path).catch(() => {})));
  await skipWaiting();
}

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
  const { origin, pathname } = new URL(request.url);
  if (request.method !== "GET" || origin !== location.origin) return;
  if (FIXED.includes(pathname) || VISITED.includes(pathname)) event.respondWith(serverFirst(pathname));
  else if (pathname.startsWith(BASE)) event.respondWith(cacheFirst(pathname));
});

/** From the server, asking whether what the browser has is still good; kept if it is a success. */
async function keep(cache, path) {
  const response = await fetch(path, { cache: "no-cache", signal: AbortSignal.timeout(PATIENCE_MS) });
  if (response.ok) await cache.put(path, response.clone());
  return response;
}

async function serverFirst(path) {
  const cache = await caches.open(CACHE);
  try {
    return await keep(cache, path);
  } catch {
    return (await cache.match(path)) ?? Response.error();
  }
}

async function cacheFirst(path) {
  const cache = await caches.open(CACHE);
  return (await cache.match(path)) ?? keep(cache, path).catch(() => Response.error());
}
