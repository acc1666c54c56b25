// On a pair's page: n and p go to the next and the previous change. Tab does it, too.
document.addEventListener("keydown", (event) => {
  const step = { n: 1, p: -1 }[event.key];
  const typing = event.target.closest("input, textarea, select");
  if (!step || typing || event.ctrlKey || event.metaKey || event.altKey) return;
  const changes = [...document.querySelectorAll(".pair .change")];
  const at = changes.indexOf(document.activeElement.closest(".change"));
  const next = at < 0 ? (step > 0 ? 0 : changes.length - 1) : at + step;
  changes[next]?.focus();
});
