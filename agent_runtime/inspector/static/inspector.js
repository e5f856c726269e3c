"use strict";
// Keeps the page current by asking for it again, and shows the figures of the bar that is pointed at.
// Without scripts the pages say the same, as they were when they were loaded.

const live = document.querySelector(".live");
const state = document.getElementById("live");
let tag = null;

function figures(event) {
  const bar = event.target.closest("a.bar");
  const line = document.getElementById("figures");
  if (bar && line) line.textContent = bar.getAttribute("aria-label");
}
document.addEventListener("mouseover", figures);
document.addEventListener("focusin", figures);

document.addEventListener("keydown", (event) => {
  const bar = event.target.closest("a.bar");
  const step = { ArrowLeft: "previousElementSibling", ArrowRight: "nextElementSibling" }[event.key];
  if (!bar || !step) return;
  const next = bar[step];
  if (next && next.matches("a.bar")) next.focus();
  event.preventDefault();
});

function put(fresh) {
  const old = document.querySelector("main");
  const said = document.getElementById("figures")?.textContent;
  const focused = document.activeElement?.closest("main a")?.getAttribute("href");
  const classes = document.activeElement?.getAttribute("class") ?? "";
  const scrolled = [...old.querySelectorAll(".scroll")].map((box) => box.scrollLeft);
  fresh.querySelectorAll(".scroll").forEach((box, place) => { box.dataset.scrolled = scrolled[place] ?? 0; });
  old.replaceWith(document.adoptNode(fresh));
  fresh.querySelectorAll(".scroll").forEach((box) => { box.scrollLeft = Number(box.dataset.scrolled); });
  const line = document.getElementById("figures");
  if (line && said) line.textContent = said;
  if (focused) {
    const same = [...fresh.querySelectorAll("a")].find(
      (link) => link.getAttribute("href") === focused && (link.getAttribute("class") ?? "") === classes);
    same?.focus({ preventScroll: true });
  }
}

async function refresh() {
  if (document.hidden) return;
  try {
    const answer = await fetch(location.href, { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
    live.classList.remove("lost");
    state.textContent = "live";
    if (answer.status === 304) return;
    if (!answer.ok) throw new Error(String(answer.status));
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html").querySelector("main");
    const known = tag !== null;
    tag = answer.headers.get("etag");
    if (fresh && (known || fresh.textContent !== document.querySelector("main").textContent)) put(fresh);
  } catch {
    live.classList.add("lost");
    state.textContent = "no answer";
  }
}

// The newest steps are at the right.
document.querySelectorAll(".plot .scroll").forEach((box) => { box.scrollLeft = box.scrollWidth; });

const every = Number(document.querySelector("main").dataset.every);
if (every) {
  live.hidden = false;
  refresh();
  setInterval(refresh, every * 1000);
  document.addEventListener("visibilitychange", refresh);
}
