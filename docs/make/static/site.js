// A pair's page opens at main(), below its head.
window.addEventListener("load", () => {
  if (!window.location.hash) document.querySelector(".pair #main")?.scrollIntoView({ behavior: "instant" });
});

// There, n and p go to the next and the previous change. Tab does it, too.
document.addEventListener("keydown", (event) => {
  const step = { n: 1, p: -1 }[event.key];
  const typing = event.target.closest("input[type=search], input[type=text], textarea, select");
  if (!step || typing || event.ctrlKey || event.metaKey || event.altKey) return;
  const changes = [...document.querySelectorAll(".pair .change")];
  const at = changes.indexOf(document.activeElement.closest(".change"));
  const next = at < 0 ? (step > 0 ? 0 : changes.length - 1) : at + step;
  changes[next]?.focus();
});
