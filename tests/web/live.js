// What is live or out of place below the elements of a selector, as a list of complaints; evaluated
// in a page that shows what a model wrote.
(selector) => {
    const found = [];
    const own = ".code-head, .code-head *, .table-box, .code-box";
    const tags = new Set(("p br hr ul ol li blockquote pre code span div em strong b i del s sub sup kbd " +
        "table thead tbody tr th td a h3 h4 h5 h6").split(" "));
    const kept = new Set(["class", "href", "rel", "target", "title", "start", "tabindex", "role", "aria-label"]);
    for (const root of document.querySelectorAll(selector)) {
        for (const one of root.querySelectorAll("*")) {
            if (one.matches(own)) continue;
            if (!tags.has(one.localName)) found.push("tag " + one.localName);
            for (const { name, value } of one.attributes) {
                if (!kept.has(name)) found.push(`${one.localName} ${name}=${value}`);
                if (name === "href" && !/^(https?|mailto):/.test(value)) found.push("href " + value);
                if (name === "class" && !/^((language-[^ ]+|hl|hl-[a-z]+|align-[a-z]+) ?)+$/.test(value)) {
                    found.push("class " + value);
                }
            }
            if (one.localName === "a" && !one.rel.includes("noopener")) found.push("rel of " + one.href);
        }
    }
    if (window.hit) found.push("a script ran");
    return found;
};
