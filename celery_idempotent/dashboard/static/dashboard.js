// Live updates: the page requests itself again and again, and replaces its region with the new one.
// Everything else works without this file.

const POLL_MS = 1000;
// Pause after a request, as a multiple of its duration: a slow server is asked less often.
const PAUSE = 10;
const indicator = document.getElementById("connection");
const announcement = document.getElementById("announcement");
const TEXTS = { on: "live", connecting: "reconnecting…", off: "not live" };

let request = null;
let timer = 0;
let clockOffset = 0;

function show(state) {
  if (indicator.dataset.state !== state) {
    indicator.dataset.state = state;
    indicator.textContent = TEXTS[state];
  }
}

function poll() {
  stop();
  const began = performance.now();
  const current = new XMLHttpRequest();
  current.open("GET", location.href);
  current.responseType = "document";
  current.timeout = 10000;
  current.addEventListener("loadend", () => {
    if (request !== current) return;
    show(replaceRegion(current.response) ? "on" : "connecting");
    timer = setTimeout(poll, Math.max(POLL_MS, PAUSE * (performance.now() - began)));
  });
  request = current;
  request.send();
}

function stop() {
  clearTimeout(timer);
  const current = request;
  request = null;
  current?.abort();
}

// A page that nobody sees is not updated.
function changeVisibility() {
  if (document.hidden) {
    stop();
    show("off");
  } else poll();
}

// Returns whether the page has a region; an error page has none.
function replaceRegion(page) {
  const region = document.querySelector("[data-region]");
  const next = page?.querySelector("[data-region]");
  if (!next) return false;
  // While rows are selected, they must not change.
  if (region.isEqualNode(next) || region.querySelector("input:checked")) return true;
  const before = region.querySelector("h1")?.textContent;
  replaceChildren(region, next);
  setClock();
  tick();
  const after = region.querySelector("h1")?.textContent;
  if (before !== after) announcement.textContent = after;
  return true;
}

// Replaces what differs, so that the focus, an open part and a selected text stay where they are.
function replaceChildren(old, fresh) {
  const olds = [...old.childNodes];
  const fresher = [...fresh.childNodes];
  fresher.forEach((node, position) => {
    const present = olds[position];
    if (!present) old.append(document.adoptNode(node));
    else if (present.isEqualNode(node)) return;
    else if (present.nodeType !== node.nodeType || present.nodeName !== node.nodeName) {
      present.replaceWith(document.adoptNode(node));
    } else if (node.nodeType === Node.ELEMENT_NODE) {
      replaceAttributes(present, node);
      replaceChildren(present, node);
    } else present.nodeValue = node.nodeValue;
  });
  olds.slice(fresher.length).forEach((node) => node.remove());
}

function replaceAttributes(old, fresh) {
  for (const { name } of [...old.attributes]) {
    if (!fresh.hasAttribute(name) && name !== "open") old.removeAttribute(name);
  }
  for (const { name, value } of fresh.attributes) {
    if (name !== "open" && old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
}

// Leases end by the clock of Redis, whose time the page contains; this machine's may differ.
function setClock() {
  const nows = [...document.querySelectorAll("[data-now]")].map((part) => Number(part.dataset.now));
  if (nows.length) clockOffset = Math.max(...nows) - Date.now();
}

function tick() {
  for (const part of document.querySelectorAll("[data-deadline]")) {
    const text = remaining(Number(part.dataset.deadline) - Date.now() - clockOffset);
    if (part.textContent !== text) part.textContent = text;
  }
}

function remaining(milliseconds) {
  const seconds = Math.round(Math.abs(milliseconds) / 1000);
  const parts = [
    [Math.floor(seconds / 86400), "d"],
    [Math.floor(seconds / 3600) % 24, "h"],
    [Math.floor(seconds / 60) % 60, "min"],
    [seconds % 60, "s"],
  ];
  const first = Math.max(0, parts.findIndex(([number]) => number));
  const shown = parts.slice(first, first + 2).filter(([number]) => number);
  const text = shown.map(([number, unit]) => `${number} ${unit}`).join(" ") || "0 s";
  return milliseconds < 0 ? `${text} ago` : `in ${text}`;
}

document.addEventListener("click", async (event) => {
  const link = event.target.closest?.("a.copy");
  // Without TLS, a browser offers the clipboard to localhost only; elsewhere the link opens.
  if (!link || !navigator.clipboard) return;
  event.preventDefault();
  await navigator.clipboard.writeText(link.href);
  announcement.textContent = link.textContent = "Copied";
});

setClock();
tick();
setInterval(tick, 1000);
if (document.querySelector("[data-region]")) {
  indicator.hidden = false;
  poll();
  document.addEventListener("visibilitychange", changeVisibility);
}
