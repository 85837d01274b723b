// Markdown to elements. The text comes from a model and nobody has looked at it: HTML in it is shown, not used, links lead
// to the web or to mail alone, pictures are links, and any text takes time and depth in proportion to its length.
//
// It is CommonMark with tables and deleted text of GitHub, without HTML and definitions of links. It differs where models
// do: line feeds end lines, lists may be indented by two, `---` is always a rule, and formulas of TeX are shown as they are
// written.

import { copyButton, make, scrolling } from "./dom.js";

const DEEPEST = 24;  // elements inside one another: browsers fail at thousands
const WIDEST = 100;  // columns of a table, which browsers lay out for each row

// blocks

const FENCE = /^( {0,3})(`{3,}|~{3,})[ \t]*(.*)$/;
const HEADING = /^ {0,3}(#{1,6})(?=[ \t]|$)/;
const RULE = /^ {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-+*]|(\d{1,9})[.)])(?:( {1,4})(?=\S)|(?=\s|$))/;
const UNDERLINE = /^ {0,3}={3,}[ \t]*$/;
const COLUMNS = /^[ \t]*\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;

const blank = (line) => line === undefined || !line.trim();
const indent = (line) => line.length - line.trimStart().length;
const fenceOf = (line) => {
  const found = FENCE.exec(line);
  return found && !(found[2][0] === "`" && found[3].includes("`")) ? found : null;
};
const cells = (line) => {
  const text = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  return text.split(/(?<!\\)\|/).map((each) => each.trim().replaceAll("\\|", "|"));
};
const isTable = (lines, at) => {
  const below = lines[at + 1];
  if (below === undefined || !below.includes("-") || !lines[at].includes("|") || !COLUMNS.test(below)) return false;
  const columns = cells(below).length;
  return columns <= WIDEST && cells(lines[at]).length === columns;
};
// Whether a line ends the paragraph above it. A number in a text may come to stand in front of a line: only 1 begins a list.
const interrupts = (lines, at) => {
  const line = lines[at];
  if (blank(line) || fenceOf(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line)) return true;
  const item = ITEM.exec(line);
  return (item && !blank(line.slice(item[0].length)) && (!item[3] || Number(item[3]) === 1)) || isTable(lines, at);
};

// Yields blocks: `kind`, the number of the line after it as `end`, and what its kind has.
function* blocksOf(lines, depth) {
  let at = 0;
  while (at < lines.length) {
    const line = lines[at];
    if (blank(line)) { at += 1; continue; }
    const block = (depth < DEEPEST && nested(lines, at)) || leaf(lines, at);
    yield { ...block, start: at };
    at = block.end;
  }
}

function nested(lines, at) {
  if (QUOTE.test(lines[at])) {
    const inner = [];
    let end = at;
    while (end < lines.length) {
      if (QUOTE.test(lines[end])) inner.push(lines[end].replace(QUOTE, ""));
      else if (!blank(inner.at(-1)) && !interrupts(lines, end)) inner.push(lines[end]);
      else break;
      end += 1;
    }
    return { kind: "quote", lines: inner, end };
  }
  return RULE.test(lines[at]) ? null : list(lines, at);
}

function list(lines, at) {
  const first = ITEM.exec(lines[at]);
  if (!first) return null;
  const mark = first[2].at(-1);
  const items = [];
  let loose = false;
  let end = at;
  while (end < lines.length) {
    const found = ITEM.exec(lines[end]);
    if (!found || found[2].at(-1) !== mark || RULE.test(lines[end])) break;
    const width = found[1].length + found[2].length + (found[4]?.length ?? 1);
    const enough = Math.min(width, found[1].length + 2);
    let margin = width;
    const inner = [lines[end].slice(found[0].length)];
    let fence = fenceOf(inner[0]);
    let next = end + 1;
    for (; next < lines.length; next += 1) {
      const line = lines[next];
      const inside = indent(line) >= enough;
      if (!blank(line) && !inside) {
        // The rest of a paragraph may begin at the left.
        if (fence || blank(inner.at(-1)) || interrupts(lines, next) || ITEM.test(line)) break;
      }
      if (inside && !blank(line)) margin = Math.min(margin, indent(line));
      inner.push(inside ? line.slice(margin) : line.trimStart());
      const other = fenceOf(inner.at(-1));
      if (!fence) fence = other;
      else if (other && other[2].startsWith(fence[2]) && !other[3]) fence = null;
    }
    let gap = false;
    while (inner.length > 1 && blank(inner.at(-1))) { inner.pop(); gap = true; }
    items.push(inner);
    end = next;
    loose ||= gap && end < lines.length && ITEM.exec(lines[end])?.[2].at(-1) === mark;
  }
  return { kind: "list", number: first[3], items, loose, end };
}

function leaf(lines, at) {
  const line = lines[at];
  const fence = fenceOf(line);
  if (fence) {
    let end = at + 1;
    const closes = (each) => {
      const found = FENCE.exec(each);
      return found && found[2].startsWith(fence[2]) && !found[3];
    };
    while (end < lines.length && !closes(lines[end])) end += 1;
    const inner = lines.slice(at + 1, end).map((each) => each.slice(Math.min(indent(each), fence[1].length)));
    return { kind: "code", language: fence[3].trim().split(/\s/)[0].slice(0, 40), text: inner.join("\n"), end: end + 1 };
  }
  const heading = HEADING.exec(line);
  if (heading) {
    const words = line.slice(heading[0].length).trim().split(" ");
    if (/^#+$/.test(words.at(-1))) words.pop();
    return { kind: "heading", level: heading[1].length, text: words.join(" "), end: at + 1 };
  }
  if (RULE.test(line)) return { kind: "rule", end: at + 1 };
  if (isTable(lines, at)) {
    let end = at + 2;
    while (end < lines.length && !interrupts(lines, end)) end += 1;
    const sides = cells(lines[at + 1]).map((each) => {
      if (!each.endsWith(":")) return null;
      return each.startsWith(":") ? "centre" : "number";
    });
    return { kind: "table", head: cells(lines[at]), rows: lines.slice(at + 2, end).map(cells), sides, end };
  }
  if (indent(line) >= 4) {
    let end = at;
    while (end < lines.length && (blank(lines[end]) || indent(lines[end]) >= 4)) end += 1;
    while (blank(lines[end - 1])) end -= 1;
    return { kind: "code", language: "", text: lines.slice(at, end).map((each) => each.slice(4)).join("\n"), end };
  }
  let end = at + 1;
  while (end < lines.length) {
    if (UNDERLINE.test(lines[end])) {
      return { kind: "heading", level: 1, text: lines.slice(at, end).join("\n").trim(), end: end + 1 };
    }
    if (interrupts(lines, end)) break;
    end += 1;
  }
  return { kind: "paragraph", text: lines.slice(at, end).map((each) => each.trimStart()).join("\n").trimEnd(), end };
}

const TITLE = 2;  // the level of the heading above a text
const TASK = /^\[([ xX])\] (?=\S)/;

const itemOf = (lines, loose, depth, outline) => {
  const task = TASK.exec(lines[0]);
  const inner = task ? [lines[0].slice(task[0].length), ...lines.slice(1)] : lines;
  const made = make("li", {});
  for (const block of blocksOf(inner, depth)) {
    if (block.kind === "paragraph" && !loose) made.append(inline(block.text));
    else made.append(elementOf(block, depth, outline));
  }
  if (task) made.prepend(task[1] === " " ? "\u2610 " : "\u2611 ");
  return made;
};

// Makes a block. `outline` has the level of the heading before it, which the next one exceeds by one at most.
const elementOf = (block, depth, outline) => {
  switch (block.kind) {
    case "quote":
      return make("blockquote", {}, [...blocksOf(block.lines, depth + 1)].map((each) => elementOf(each, depth + 1, outline)));
    case "list": {
      const items = block.items.map((each) => itemOf(each, block.loose, depth + 1, outline));
      if (block.number === undefined) return make("ul", {}, items);
      return make("ol", { start: Number(block.number) === 1 ? null : Number(block.number) }, items);
    }
    case "code": {
      const label = block.language ? `Code in ${block.language}` : "Code";
      const bar = make("div", { class: "bar" }, make("span", {}, block.language), copyButton(() => block.text, "Copy code"));
      return make("div", { class: "code" }, bar, scrolling(make("pre", {}, make("code", {}, block.text)), label));
    }
    case "heading":
      outline.level = Math.min(block.level + TITLE, outline.level + 1, 6);
      return make(`h${outline.level}`, {}, inline(block.text));
    case "rule":
      return make("hr");
    case "table": {
      const row = (texts, name) => {
        const known = texts.slice(0, block.sides.length);
        return make("tr", {}, known.map((text, at) => make(name, { class: block.sides[at] }, inline(text))));
      };
      const body = make("tbody", {}, block.rows.map((each) => row(each, "td")));
      return scrolling(make("table", {}, make("thead", {}, row(block.head, "th")), body), "Table");
    }
    default:
      return make("p", {}, inline(block.text));
  }
};

// text in a block

const PLAIN = /[^\\`*_~[\]!<&\nh$]+/y;
// Lengths are bounded, so that what fails is not read to its end again and again.
const LINK =
  /\([ \n]{0,9}(?:<([^<>\n]{0,2000})>|((?:[^\s()<]|\([^\s()]{0,999}\)){1,2000}))(?:[ \n]{1,9}(?:"[^"]{0,999}"|'[^']{0,999}'))?[ \n]{0,9}\)/y;
const ADDRESS = /https?:\/\/[^\s<>"`|\\^{}]{1,2000}/iy;
const ANGLED = /<((?:https?:\/\/|mailto:)[^\s<>]{0,2000})>/iy;
const BREAK = /<br {0,3}\/?>/iy;
const TICKS = /`+/y;
const ENTITY = /&(?:#(\d{1,7})|#[xX]([0-9a-fA-F]{1,6})|(amp|lt|gt|quot|apos|nbsp));/y;
const NAMED = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0" };
const FORMULAS = [["\\(", "\\)"], ["\\[", "\\]"], ["$$", "$$"]];
const PUNCTUATION = /[\p{P}\p{S}]/u;
const ESCAPED = /[!-/:-@[-`{-~]/;

const matched = (pattern, text, at) => {
  pattern.lastIndex = at;
  return pattern.exec(text);
};

// Returns where a link may lead, or null.
const address = (text) => {
  try {
    const found = new URL(text);
    return ["http:", "https:", "mailto:"].includes(found.protocol) ? found.href : null;
  } catch {
    return null;
  }
};
// Takes away what is behind an address in a text: points, and brackets that were opened in front of it.
const withoutEnd = (words) => {
  let brackets = words.split(")").length - words.split("(").length;
  let end = words.length;
  while (end && ("?!.,:;*_~'$]".includes(words[end - 1]) || (words[end - 1] === ")" && brackets > 0))) {
    brackets -= words[end - 1] === ")";
    end -= 1;
  }
  return words.slice(0, end);
};
const linkTo = (href, ...content) => {
  return make("a", { href, title: href, target: "_blank", rel: "noopener noreferrer nofollow" }, ...content);
};

const depths = new WeakMap();
const depthOf = (node) => depths.get(node) ?? 0;

// Moves the nodes between two others into an element after the first. Returns whether there was depth left for that.
const wrap = (element, first, last) => {
  let depth = 0;
  for (let node = first.nextSibling; node !== last; node = node.nextSibling) depth = Math.max(depth, depthOf(node) + 1);
  if (depth > DEEPEST) return false;
  while (first.nextSibling !== last) element.append(first.nextSibling);
  depths.set(element, depth);
  first.after(element);
  return true;
};

// The marks `*`, `_` and `~` of a text in their order, and what they make of it: CommonMark's rules of emphasis.
class Marks {
  constructor() {
    this.last = null;
  }

  push(node, char, before, after) {
    const [spaceBefore, spaceAfter] = [before, after].map((each) => !each.trim());
    const [pointBefore, pointAfter] = [before, after].map((each) => PUNCTUATION.test(each));
    const left = !spaceAfter && (!pointAfter || spaceBefore || pointBefore);
    const right = !spaceBefore && (!pointBefore || spaceAfter || pointAfter);
    const within = char === "_";
    const mark = {
      node, char, count: node.length, length: node.length, before: this.last, after: null,
      opens: left && (!within || !right || pointBefore), closes: right && (!within || !left || pointAfter),
    };
    if (this.last) this.last.after = mark;
    this.last = mark;
  }

  remove(mark) {
    if (mark.before) mark.before.after = mark.after;
    if (mark.after) mark.after.before = mark.before;
    else this.last = mark.before;
  }

  // Makes elements of the marks above `floor`, and forgets them.
  close(floor) {
    if (this.last === floor) return;
    const floors = new Map();
    let mark = this.last;
    while (mark && mark.before !== floor) mark = mark.before;
    while (mark) {
      const key = `${mark.char}${mark.opens}${mark.length % 3}${mark.char === "~" ? mark.count : ""}`;
      const end = floors.has(key) ? floors.get(key) : floor;
      let opener = mark.closes ? mark.before : end;
      while (opener !== end && opener !== floor && !this.pair(opener, mark)) opener = opener.before;
      if (!mark.closes || opener === end || opener === floor) {
        if (mark.closes) floors.set(key, mark.before);
        const next = mark.after;
        if (!mark.opens) this.remove(mark);
        mark = next;
        continue;
      }
      const count = mark.char === "~" ? mark.count : Math.min(mark.count, opener.count, 2);
      const name = mark.char === "~" ? "del" : ["em", "strong"][count - 1];
      while (mark.before !== opener) this.remove(mark.before);
      if (!wrap(make(name), opener.node, mark.node)) break;
      for (const each of [opener, mark]) {
        each.count -= count;
        each.node.data = each.char.repeat(each.count);
        if (!each.count) this.remove(each);
      }
      if (!mark.count) mark = mark.after;
    }
    while (this.last !== floor) this.remove(this.last);
  }

  pair(opener, closer) {
    if (!opener.opens || opener.char !== closer.char) return false;
    if (closer.char === "~") return opener.count === closer.count && closer.count <= 2;
    const both = closer.opens || opener.closes;
    return !both || closer.length % 3 === 0 || (opener.length + closer.length) % 3 !== 0;
  }
}

// Where runs of so many backticks begin, the first one last.
const backticks = (text) => {
  const found = new Map();
  for (const { 0: run, index } of text.matchAll(/`+/g)) {
    if (!found.has(run.length)) found.set(run.length, []);
    found.get(run.length).push(index);
  }
  found.forEach((each) => each.reverse());
  return found;
};

const inline = (text) => {
  const made = document.createDocumentFragment();
  const marks = new Marks();
  const ticks = backticks(text);
  const brackets = [];
  const without = new Set();  // ends of formulas that do not come any more
  let at = 0;
  let said = "";  // what is not yet among the nodes

  const say = (words, length = words.length) => {
    said += words;
    at += length;
  };
  const add = (node, length) => {
    made.append(said, node);
    said = "";
    at += length;
    return node;
  };
  const breakLine = (length) => {
    said = said.trimEnd();
    add(make("br"), length);
    while (text[at] === " ") at += 1;
  };
  const code = () => {
    const { length } = matched(TICKS, text, at)[0];
    const ends = ticks.get(length);
    while (ends.at(-1) <= at) ends.pop();
    if (!ends.length) { say("`".repeat(length)); return; }
    let inner = text.slice(at + length, ends.at(-1)).replaceAll("\n", " ");
    if (inner.startsWith(" ") && inner.endsWith(" ") && inner.trim()) inner = inner.slice(1, -1);
    add(make("code", {}, inner), ends.at(-1) + length - at);
  };
  const formula = () => {
    for (const [begin, end] of FORMULAS) {
      if (!text.startsWith(begin, at) || without.has(end)) continue;
      const last = text.indexOf(end, at + 2);
      if (last < 0) { without.add(end); continue; }
      add(make("code", { class: "formula" }, text.slice(at, last + 2)), last + 2 - at);
      return true;
    }
    return false;
  };
  const escape = () => {
    if (formula()) return;
    const next = text[at + 1] ?? "";
    if (next === "\n") breakLine(2);
    else if (ESCAPED.test(next)) say(next, 2);
    else say("\\");
  };
  const bracket = (mark) => {
    brackets.push({ node: add(document.createTextNode(mark), mark.length), floor: marks.last });
  };
  const endLink = () => {
    const begun = brackets.pop();
    const found = begun && matched(LINK, text, at + 1);
    const href = found && address(found[1] ?? found[2]);
    if (!href) { say("]"); return; }
    const end = add(document.createTextNode(""), 1 + found[0].length);
    marks.close(begun.floor);
    const link = linkTo(href);
    if (wrap(link, begun.node, end)) {
      begun.node.remove();
      if (!link.textContent) link.append(href);
      brackets.length = 0;  // a link holds no links
    }
  };
  const angle = () => {
    const found = matched(BREAK, text, at);
    if (found) { breakLine(found[0].length); return; }
    const link = matched(ANGLED, text, at);
    const href = link && address(link[1]);
    if (href) add(linkTo(href, link[1]), link[0].length);
    else say("<");
  };
  const entity = () => {
    const found = matched(ENTITY, text, at);
    if (!found) { say("&"); return; }
    const number = found[1] ? Number(found[1]) : parseInt(found[2] ?? "0", 16);
    const valid = number && number <= 0x10ffff && !(number >= 0xd800 && number < 0xe000);
    say(NAMED[found[3]] ?? (valid ? String.fromCodePoint(number) : "\ufffd"), found[0].length);
  };
  const bare = () => {
    const found = /\w/.test(text[at - 1] ?? "") || brackets.length ? null : matched(ADDRESS, text, at);
    const words = found ? withoutEnd(found[0]) : "";
    const href = words && address(words);
    if (href) add(linkTo(href, words), words.length);
    else say("h");
  };
  while (at < text.length) {
    const char = text[at];
    const words = matched(PLAIN, text, at);
    if (words) say(words[0]);
    else if (char === "\\") escape();
    else if (char === "`") code();
    else if (char === "\n") breakLine(1);
    else if (char === "[") bracket("[");
    else if (char === "!" && text[at + 1] === "[") bracket("![");
    else if (char === "]") endLink();
    else if (char === "<") angle();
    else if (char === "&") entity();
    else if (char === "h") bare();
    else if (char === "!") say(char);
    else if (char === "$") say(formula() ? "" : char);
    else {
      let end = at;
      while (text[end] === char) end += 1;
      const [before, after] = [text[at - 1] ?? " ", text[end] ?? " "];
      marks.push(add(document.createTextNode(text.slice(at, end)), end - at), char, before, after);
    }
  }
  marks.close(null);
  made.append(said);
  return made;
};

// Lines with spaces for the tabs in front of them, but those of code, which may need them.
const linesOf = (text) => {
  let fence = null;
  return text.replace(/\r\n?/g, "\n").replaceAll("\0", "\ufffd").split("\n").map((line) => {
    const found = fenceOf(line.trimStart());
    const inside = fence !== null;
    if (!inside) fence = found;
    else if (found && found[2].startsWith(fence[2]) && !found[3]) fence = null;
    return inside && fence ? line : line.replace(/^[ \t]+/, (space) => space.replaceAll("\t", "    "));
  });
};

// Shows a text that grows. Blocks that stay as they are keep their elements, and so what is selected or scrolled in them.
export class Markdown {
  constructor(element) {
    this.element = element;
    this.shown = [];  // of each block its source, and the level of the last heading up to its end
  }

  show(text) {
    const lines = linesOf(text);
    const blocks = [...blocksOf(lines, 0)];
    const sources = blocks.map(({ start, end }) => lines.slice(start, end).join("\n"));
    let same = 0;
    while (same < sources.length && sources[same] === this.shown[same]?.source) same += 1;
    this.shown.length = same;
    while (this.element.childNodes.length > same) this.element.lastChild.remove();
    const outline = { level: this.shown.at(-1)?.level ?? TITLE };
    for (let at = same; at < blocks.length; at += 1) {
      this.element.append(elementOf(blocks[at], 0, outline));
      this.shown.push({ source: sources[at], level: outline.level });
    }
  }
}
