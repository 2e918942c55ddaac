// HTML that the server made of a model's words -> nodes of our own making.
//
// A model's output is hostile. The server escapes it; this trusts nobody all the same: the HTML is
// parsed into a document that runs and loads nothing, and what is shown is built anew from a list
// of tags, attributes and schemes. Whatever is not on the list is left as its text. No image is
// ever loaded, since its address alone would tell a stranger what was said: it becomes a link.

import { h } from "./dom.js";

const KEPT = new Set([
  "p", "br", "hr", "ul", "ol", "li", "blockquote", "pre", "code", "span", "div", "em", "strong", "b", "i",
  "del", "s", "sub", "sup", "kbd", "table", "thead", "tbody", "tr", "th", "td",
]);
const RENAMED = { h1: "h3", h2: "h4", h3: "h5", h4: "h6", h5: "h6", h6: "h6" }; // below the page's own
const DROPPED = new Set([
  "script", "style", "template", "noscript", "iframe", "object", "embed", "svg", "math", "head", "title",
  "textarea", "select", "audio", "video", "canvas", "frameset", "xmp", "noembed", "noframes", "plaintext",
]);
const SCHEMES = new Set(["http:", "https:", "mailto:"]);
const CODE_CLASS = /^(?:language-[\w+#.-]{1,32}|hl(?:-[a-z]{1,16})?)$/; // of colours.py
const CELL_CLASS = /^align-(?:left|center|right)$/;
const DEEPEST = 64;

/** A fragment that is safe to show. */
export function safeNodes(html) {
  const parsed = new DOMParser().parseFromString(html, "text/html");
  const fragment = document.createDocumentFragment();
  fill(fragment, parsed.body, 0);
  return fragment;
}

function fill(target, source, depth) {
  for (const node of source.childNodes) {
    if (node.nodeType === Node.TEXT_NODE) target.append(node.data);
    else if (node.nodeType === Node.ELEMENT_NODE) addElement(target, node, depth);
  }
}

function addElement(target, source, depth) {
  const tag = source.localName;
  if (DROPPED.has(tag) || source.namespaceURI !== "http://www.w3.org/1999/xhtml") return;
  if (depth > DEEPEST) {
    target.append(source.textContent);
    return;
  }
  const made = element(source, tag);
  if (made) target.append(made);
  fill(made ?? target, source, depth + 1);
}

function element(source, tag) {
  if (tag === "a") return anchor(source.getAttribute("href"), source.getAttribute("title"));
  if (tag === "img") return image(source);
  const name = RENAMED[tag] ?? (KEPT.has(tag) ? tag : null);
  if (name === null) return null;
  const made = document.createElement(name);
  const allowed = { span: CODE_CLASS, code: CODE_CLASS, pre: CODE_CLASS, td: CELL_CLASS, th: CELL_CLASS }[name];
  if (allowed) {
    const names = (source.getAttribute("class") ?? "").split(/\s+/).filter((one) => allowed.test(one));
    if (names.length) made.className = names.join(" ");
  }
  if (name === "ol" && /^\d{1,9}$/.test(source.getAttribute("start") ?? "")) {
    made.setAttribute("start", source.getAttribute("start"));
  }
  return made;
}

/** A link that leads out, or null for an address that is not on the list. */
function anchor(address, title = null) {
  const href = safeAddress(address);
  if (href === null) return null;
  return h("a", { href, title, target: "_blank", rel: "noopener noreferrer nofollow" });
}

function image(source) {
  const text = source.getAttribute("alt") || "image";
  const link = anchor(source.getAttribute("src"));
  if (link) link.append(text);
  return link ?? h("span", {}, text);
}

/** Absolute addresses only: a relative one would lead into this very page. */
function safeAddress(address) {
  let url;
  try {
    url = new URL(address ?? "");
  } catch {
    return null;
  }
  return SCHEMES.has(url.protocol) ? url.href : null;
}
