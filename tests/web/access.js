// What keeps people from using a page, as a list of complaints; [] is the aim. Evaluated in the page.
() => {
  const found = [];
  const shown = (element) => element.checkVisibility({ opacityProperty: true, visibilityProperty: true });
  const told = (element) => {
    const text = (element.getAttribute("aria-label") || element.textContent || element.id).trim().slice(0, 40);
    return `<${element.localName} class="${element.className}"> ${text}`;
  };
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const top = document.querySelector("dialog[open]") ?? document.body; // what a dialog covers is inert

  // 1. The document
  if (!document.documentElement.lang) found.push("no language");
  if (!document.title) found.push("no title");
  if (all("main").length !== 1) found.push("not one main landmark");
  if (all("h1").filter(shown).length > 1) found.push("several h1");
  for (const nav of all("nav")) if (!nav.getAttribute("aria-label")) found.push("nav without a name");
  const ids = all("[id]").map((element) => element.id);
  for (const id of new Set(ids)) if (ids.filter((other) => other === id).length > 1) found.push(`id ${id} twice`);
  const meta = document.querySelector("meta[name=viewport]").content;
  if (/user-scalable=no|maximum-scale/.test(meta)) found.push("zoom is off");

  // 2. References
  for (const name of ["aria-labelledby", "aria-describedby", "aria-controls", "for"]) {
    for (const element of all(`[${name}]`)) {
      for (const id of element.getAttribute(name).split(/\s+/)) {
        if (!document.getElementById(id)) found.push(`${name}=${id} leads nowhere: ${told(element)}`);
      }
    }
  }

  // 3. Headings go down one level at a time
  let level = 0;
  for (const heading of all("h1, h2, h3, h4, h5, h6", top).filter(shown)) {
    if (heading.closest(".prose")) continue; // a model's own
    const now = Number(heading.localName[1]);
    if (level && now > level + 1) found.push(`h${level} is followed by h${now}: ${told(heading)}`);
    level = now;
  }

  // 4. Focus: nothing jumps the order, nothing hidden takes it, everything is large enough
  for (const element of all("[tabindex]")) if (element.tabIndex > 0) found.push(`tabindex ${element.tabIndex}: ${told(element)}`);
  for (const element of all("[aria-hidden=true] :is(a, button, input, [tabindex])")) found.push(`hidden but focusable: ${told(element)}`);
  for (const element of all("button, input, select, textarea, summary", top).filter(shown)) {
    const box = element.getBoundingClientRect();
    const label = element.matches("[type=checkbox], [type=radio]") ? 18 : 24;
    if (box.width && (box.width < label || box.height < label - 1)) found.push(`small (${box.width}x${box.height}): ${told(element)}`);
  }
  for (const element of all("*", top)) {
    const style = getComputedStyle(element);
    const scrolls = /auto|scroll/.test(style.overflowX + style.overflowY) && (element.scrollWidth > element.clientWidth + 1 || element.scrollHeight > element.clientHeight + 1);
    if (scrolls && shown(element) && element.tabIndex < 0 && !element.querySelector("a, button, input, select, textarea, [tabindex]")) found.push(`scrolls, but not by keyboard: ${told(element)}`);
  }

  // 5. Contrast of all text (WCAG 1.4.3)
  const rgba = (text) => {
    const numbers = text.match(/[\d.]+/g).map(Number);
    const scale = text.startsWith("color(") ? 255 : 1;
    return [numbers[0] * scale, numbers[1] * scale, numbers[2] * scale, numbers[3] ?? 1];
  };
  const over = (front, back) => [0, 1, 2].map((at) => front[at] * front[3] + back[at] * (1 - front[3])).concat(1);
  const background = (element) => {
    const layers = [];
    for (let one = element; one; one = one.parentElement) {
      const colour = rgba(getComputedStyle(one).backgroundColor);
      if (colour[3] > 0) layers.push(colour);
      if (colour[3] === 1) break;
    }
    return layers.reduceRight((below, layer) => over(layer, below), [255, 255, 255, 1]);
  };
  const light = (colour) => {
    const [r, g, b] = colour.slice(0, 3).map((one) => (one / 255 <= 0.04045 ? one / 255 / 12.92 : ((one / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const walker = document.createTreeWalker(top, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !shown(element) || element.closest(".unseen, .skip, :disabled, script, style")) continue;
    const style = getComputedStyle(element);
    const back = background(element);
    const [a, b] = [light(over(rgba(style.color), back)), light(back)];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const size = parseFloat(style.fontSize);
    const isLarge = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
    if (ratio < (isLarge ? 3 : 4.5)) found.push(`contrast ${ratio.toFixed(2)}: ${told(element)}`);
  }

  // 6. Tables and lists
  for (const head of all("th", top)) if (!head.closest(".prose") && !head.scope) found.push(`th without scope: ${told(head)}`);
  for (const list of all("ul, ol", top)) {
    if ([...list.children].some((child) => child.localName !== "li")) found.push(`a list holds other things: ${told(list)}`);
  }
  if (document.documentElement.scrollWidth > innerWidth) found.push(`scrolls sideways: ${document.documentElement.scrollWidth} > ${innerWidth}`);
  return [...new Set(found)];
};
