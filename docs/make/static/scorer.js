// Ranks what the search finds: a page whose title has a word of the query, then how-tos, then others.
var Scorer = {
  score: ([page, title, , , score]) => {
    const query = new URLSearchParams(window.location.search).get("q").toLowerCase();
    const words = query.split(/\W+/).filter((word) => word.length > 3).map((word) => word.slice(0, 5));
    const own = title.split(" > ")[0].toLowerCase(); // behind it stands a heading of the page
    const sections = { "docs/howto/": 30, "docs/learn/": 20, "docs/techniques/": 25, "docs/": 10 };
    const found = Object.keys(sections).find((folder) => page.startsWith(folder));
    const listed = page.startsWith("docs/diffs/") ? 0 : sections[found] ?? 0;
    return score + listed + 50 * words.some((word) => own.includes(word));
  },
  // Sphinx's own numbers:
  objNameMatch: 11, objPartialMatch: 6, objPrio: {}, objPrioDefault: 0,
  title: 15, partialTitle: 7, term: 5, partialTerm: 2,
};
