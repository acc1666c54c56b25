"use strict";

const $ = (selector) => document.querySelector(selector);
const all = (selector, root = document) => [...root.querySelectorAll(selector)];

// The table comes fastest first: a column head sorts down, then up, then by the order of the ladder.

const rows = all("#speeds tbody tr");
const place = (row) => Number(row.dataset.place);

function sortBy(head) {
  const next = { none: "descending", descending: "ascending", ascending: "none" };
  const order = next[head.ariaSort];
  for (const other of all("#speeds thead th")) other.ariaSort = other === head ? order : "none";
  const text = (row) => row.cells[head.cellIndex]?.textContent ?? "";
  const number = (row) => parseFloat(text(row).replaceAll(",", ""));
  const numeric = head.classList.contains("number");
  // A row without a speed has its reason in place of numbers: it stays last.
  const blank = (row) =>
    Boolean(row.querySelector(".without")) || (numeric ? Number.isNaN(number(row)) : !text(row));
  const compare = (a, b) =>
    numeric ? number(a) - number(b) : text(a).localeCompare(text(b), "en", { numeric: true });
  const sign = order === "descending" ? -1 : 1;
  const sorted = (a, b) => blank(a) - blank(b) || (blank(a) ? 0 : sign * compare(a, b));
  const ladder = (a, b) => place(a) - place(b);
  $("#speeds tbody").append(...rows.toSorted(order === "none" ? ladder : sorted));
}

for (const head of all("#speeds thead th"))
  head.firstChild.addEventListener("click", () => sortBy(head));

// The plots open large, one after the other.

const dialog = $("dialog"), figures = all("#plots figure");
let shown = 0;

function enlarge(number) {
  shown = (number + figures.length) % figures.length;
  const figure = figures[shown];
  $("#large").replaceChildren(figure.querySelector("svg").cloneNode(true));
  $("#large-title").textContent = figure.querySelector("figcaption strong").textContent;
  $("#large-answer").textContent = figure.querySelector("figcaption").lastChild.textContent;
  if (!dialog.open) dialog.showModal();
}

for (const [number, figure] of figures.entries())
  figure.firstChild.addEventListener("click", () => enlarge(number));
$("#previous").addEventListener("click", () => enlarge(shown - 1));
$("#next").addEventListener("click", () => enlarge(shown + 1));
dialog.addEventListener("keydown", ({ key }) => {
  const steps = { ArrowLeft: -1, ArrowRight: 1 };
  if (steps[key]) enlarge(shown + steps[key]);
});
dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());

// The files: unpacked at the click, so that a page with many records still opens at once.

for (const button of all("[data-file]"))
  button.addEventListener("click", async () => {
    const packed = Uint8Array.from(atob(button.parentNode.querySelector("script").text), (c) =>
      c.charCodeAt(0),
    );
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    const href = URL.createObjectURL(await new Response(stream).blob());
    Object.assign(document.createElement("a"), { href, download: button.dataset.file }).click();
    setTimeout(() => URL.revokeObjectURL(href), 60_000);
  });

// The diffs.

const { files, changes } = JSON.parse($("#data").text);
const from = $("#old"), to = $("#new"), code = $("#code");
const CONTEXT = 3; // lines around a change, as in `diff -u`

// Pairs [i, j], both in order, whose scores add up to most; a score of 0 is never a pair.
function align(a, b, score) {
  const scores = a.map((x) => b.map((y) => score(x, y)));
  const best = Array.from({ length: a.length + 1 }, () => new Float64Array(b.length + 1));
  for (let i = a.length - 1; i >= 0; i--)
    for (let j = b.length - 1; j >= 0; j--) {
      const paired = scores[i][j] && scores[i][j] + best[i + 1][j + 1];
      best[i][j] = Math.max(best[i + 1][j], best[i][j + 1], paired);
    }
  const pairs = [];
  for (let i = 0, j = 0; i < a.length && j < b.length; )
    if (scores[i][j] && best[i][j] === scores[i][j] + best[i + 1][j + 1]) pairs.push([i++, j++]);
    else if (best[i + 1][j] >= best[i][j + 1]) i++;
    else j++;
  return pairs;
}

const words = (element) => element.textContent.match(/\w+|\s+|[^\w\s]/g) ?? [];
const weight = (word) => word.trim().length;
const length = (list) => list.reduce((sum, word) => sum + weight(word), 0);
const common = (a, b) => align(a, b, (x, y) => (x === y ? weight(x) || 0.1 : 0));

// How much of two lines is the same; 0 where it is less than half.
function likeness(a, b) {
  const [x, y] = [words(a), words(b)];
  const share = length(common(x, y).map(([i]) => x[i])) / Math.max(length(x), length(y), 1);
  return share < 0.5 ? 0 : share;
}

// Adds the words that are not kept to a highlight: ranges, so the line's elements stay as they are.
function mark(element, list, kept, highlight) {
  const changed = [];
  let end = 0;
  for (const [k, word] of list.entries()) {
    end += word.length;
    if (!kept.has(k)) changed.push([end - word.length, end]);
  }
  const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
  let begin = 0; // of the piece of text within the line
  for (let node; (node = walker.nextNode()); begin += node.length)
    for (const [start, stop] of changed) {
      const [a, b] = [Math.max(start - begin, 0), Math.min(stop - begin, node.length)];
      const ends = { startContainer: node, startOffset: a, endContainer: node, endOffset: b };
      if (a < b) highlight.add(new StaticRange(ends));
    }
}

function markPair(a, b) {
  if (!window.Highlight) return; // an older browser shows which lines changed, not which words
  const [x, y] = [words(a), words(b)];
  const pairs = common(x, y);
  mark(a, x, new Set(pairs.map(([i]) => i)), CSS.highlights.get("removed"));
  mark(b, y, new Set(pairs.map(([, j]) => j)), CSS.highlights.get("added"));
}

// The elements stand in the order of a unified diff, which narrow screens show; --row is a line's
// place where the files stand side by side.
function put(element, row) {
  element.style.setProperty("--row", row);
  return element;
}

function line(tag, side, number) {
  const element = document.createElement(tag);
  const name = (side.startsWith("old") ? from : to).value;
  element.className = side;
  element.dataset.line = number + 1;
  element.innerHTML = files[name][number];
  const indent = element.textContent.match(/^ */)[0].length; // kept where the line wraps
  element.style.setProperty("--indent", `${indent}ch`);
  return element;
}

function lines(tag, side, first, stop) {
  return Array.from({ length: stop - first }, (_, k) => line(tag, side, first + k));
}

// The button that opens and shuts a run of lines that are the same in both files.
function fold(hidden, count) {
  const element = document.createElement("button");
  element.type = "button";
  element.className = "fold";
  const label = (shut) => {
    element.ariaExpanded = String(!shut);
    element.textContent = `${shut ? "\u2026" : "fold"} ${count} lines`;
    for (const each of hidden) each.hidden = shut;
  };
  element.addEventListener("click", () => label(!hidden[0].hidden));
  label(true);
  return element;
}

// Lines that are the same in both files; returns the next free row.
function showSame(i, j, count, row) {
  const first = i === 0 ? 0 : CONTEXT;
  const stop = i + count === files[from.value].length ? count : count - CONTEXT;
  const olds = lines("code", "old same", i, i + count);
  const news = lines("code", "new same", j, j + count);
  const folds = $("#changed").checked && stop - first > 1;
  for (let k = 0; k < count; k++) {
    if (folds && k === first) {
      const hidden = [...olds.slice(first, stop), ...news.slice(first, stop)];
      code.append(put(fold(hidden, stop - first), row++));
    }
    olds[k].ariaHidden = "true"; // who listens hears them once
    code.append(put(olds[k], row), put(news[k], row++));
  }
  return row;
}

// A block that differs: lines that are alike face each other; returns the next free row.
function showChange([i1, i2, j1, j2], row) {
  const olds = lines("del", "old", i1, i2), news = lines("ins", "new", j1, j2);
  const gaps = [];
  let i = 0, j = 0;
  for (const [k, l] of [...align(olds, news, likeness), [olds.length, news.length]]) {
    for (const height = Math.max(k - i, l - j), end = row + height; row < end; row++) {
      for (const [side, next] of [["old", i < k && olds[i++]], ["new", j < l && news[j++]]]) {
        const gap = document.createElement("i");
        gap.className = `${side} gap`;
        if (!next) gaps.push(gap);
        put(next || gap, row);
      }
    }
    if (k === olds.length || l === news.length) continue;
    markPair(put(olds[i++], row), put(news[j++], row++));
  }
  code.append(...olds, ...news, ...gaps);
  return row;
}

function show() {
  for (const name of ["removed", "added"])
    if (window.Highlight) CSS.highlights.set(name, new Highlight());
  code.replaceChildren();
  const blocks = changes[from.value][to.value];
  const end = files[from.value].length;
  let i = 0, j = 0, row = 1, added = 0, removed = 0;
  for (const block of blocks) {
    row = showChange(block, showSame(i, j, block[0] - i, row));
    removed += block[1] - block[0];
    added += block[3] - block[2];
    [, i, , j] = block;
  }
  showSame(i, j, end - i, row);
  $("#counts").textContent = `+${added} \u2212${removed}`;
  for (const link of all(".ladder a"))
    link.ariaCurrent = link.getAttribute("href") === address() ? "true" : null;
}

const address = () => `#diff=${from.value}..${to.value}`;

// Shows the pair that the address names, if it names one; true where it did.
function follow() {
  const [, old, next] = location.hash.match(/^#diff=(.+)\.\.(.+)$/) ?? [];
  if (!Object.hasOwn(files, old) || !Object.hasOwn(files, next)) return false;
  [from.value, to.value] = [old, next];
  show();
  $("#diffs").scrollIntoView();
  $("#diffs-title").focus({ preventScroll: true });
  return true;
}

function choose() {
  history.replaceState(null, "", address());
  show();
}

for (const select of [from, to]) select.addEventListener("change", choose);
for (const radio of all("[name=lines]")) radio.addEventListener("change", show);
$("#swap").addEventListener("click", () => {
  [from.value, to.value] = [to.value, from.value];
  choose();
});
addEventListener("hashchange", follow);
addEventListener("click", (event) => {
  // The same link again, after one has scrolled away: the address does not change.
  if (event.target.closest?.("a[href^='#diff=']")?.hash === location.hash) follow();
});
if (!follow()) show();
