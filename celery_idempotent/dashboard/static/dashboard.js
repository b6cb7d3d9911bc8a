// Live updates: the server announces changes of the page by server-sent events, and the page then
// requests itself again and replaces its regions. Everything else works without this file.

const RETRY_MS = 2000;
const { live } = document.body.dataset;
const indicator = document.getElementById("connection");
const announcement = document.getElementById("announcement");
const TEXTS = { on: "live", connecting: "reconnecting…", off: "not live" };

let source = null;
let retry = 0;
let loading = false;
let again = false;
let clockOffset = 0;

function show(state) {
  if (indicator && indicator.dataset.state !== state) {
    indicator.dataset.state = state;
    indicator.textContent = TEXTS[state];
  }
}

function connect() {
  clearTimeout(retry);
  source?.close();
  show("connecting");
  source = new EventSource(live);
  source.addEventListener("open", () => show("on"));
  source.addEventListener("changed", update);
  source.addEventListener("error", () => {
    show("connecting");
    // A refused connection is not repeated by the browser.
    if (source?.readyState === EventSource.CLOSED) retry = setTimeout(connect, RETRY_MS);
  });
}

// Browsers open six connections to a server at most: a page that nobody sees has none.
function disconnect() {
  clearTimeout(retry);
  source?.close();
  source = null;
  show("off");
}

function update() {
  if (loading) {
    again = true;
    return;
  }
  loading = true;
  const request = new XMLHttpRequest();
  request.open("GET", location.href);
  request.responseType = "document";
  request.timeout = 10000;
  request.addEventListener("load", () => request.response && replaceRegions(request.response));
  request.addEventListener("loadend", () => {
    loading = false;
    if (again) {
      again = false;
      update();
    }
  });
  request.send();
}

function replaceRegions(page) {
  const region = document.querySelector("[data-region]");
  const next = page.querySelector("[data-region]");
  if (!region || !next || region.isEqualNode(next)) return;
  // The rows under a person's choice must not become others.
  if (region.querySelector("input:checked")) return;
  const before = region.querySelector("h1")?.textContent;
  replaceChildren(region, next);
  setClock();
  tick();
  const after = region.querySelector("h1")?.textContent;
  if (before !== after) announcement.textContent = after;
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

// Leases end by the clock of Redis, which the page has; this machine's may differ.
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
  // Without TLS, a browser has no clipboard for other hosts than this one: the link opens.
  if (!link || !navigator.clipboard) return;
  event.preventDefault();
  await navigator.clipboard.writeText(link.href);
  announcement.textContent = link.textContent = "Copied";
});

setClock();
tick();
setInterval(tick, 1000);
if (live) {
  connect();
  document.addEventListener("visibilitychange", () => (document.hidden ? disconnect() : connect()));
}
