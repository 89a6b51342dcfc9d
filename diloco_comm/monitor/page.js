// Shows status.json, and asks for it again every two seconds. All texts become text nodes.
"use strict";

const PERIOD_MS = 2000;
const LIMIT_MS = 5000;
// Seconds after which the last status counts as old.
const OLD_S = 10;
// Seconds without a message after which a process that is no member has ended.
const SILENT_S = 12;
const SVG = "http://www.w3.org/2000/svg";
const NONE = "–";
// The columns of a table: title, and the cell's text, or its text and class, for a row.
const MEMBERS = [
  ["replica", (row) => (row.is_member ? String(row.id) : `${row.id} (process ${row.process})`)],
  ["state", state],
  ["work", (row) => row.phase || NONE],
  ["inner step", (row) => row.inner_step.toLocaleString("en")],
  ["steps/s", (row) => number(row.speed)],
  ["last message", (row) => (row.silent_s === null ? NONE : `${seconds(Math.round(row.silent_s))} ago`)],
  ["notes", (row) => row.words.join("; ")],
];
const LINKS = [
  ["replica", (row) => String(row.id)],
  ["round trip", (row) => seconds(row.figures.round_trip_s)],
  ["last rate", (row) => rate(row.figures.rate)],
  ["sent", (row) => bytes(row.figures.sent_bytes)],
  ["received", (row) => bytes(row.figures.received_bytes)],
  ["sent again", (row) => `${row.figures.retransmits} segments`],
  ["rounds", (row) => String(row.figures.rounds)],
  ["waited", (row) => seconds(row.figures.waited_s)],
  ["hidden", (row) => percent(row.figures.hidden)],
  ["goodput", (row) => percent(row.figures.goodput)],
];
const WORKERS = [
  ["worker", ([name]) => name],
  ["connected", ([, row]) => (row.connected === undefined ? NONE : row.connected ? "yes" : "no")],
  ["updates", ([, row]) => String(row.applied ?? row.merged ?? NONE)],
  ["steps/s", ([, row]) => number(row.speed ?? (row.step_s ? 1 / row.step_s : null))],
];

let heardAt = 0;
let lastAt = 0;
let isAway = false;
let reason = "";

function state(row) {
  if (row.marks.includes("silent") || row.marks.includes("cut off")) return [row.marks.join(", "), "bad"];
  if (row.marks.length) return [row.marks.join(", "), "warn"];
  if (!row.is_member && row.silent_s > SILENT_S) return ["gone", ""];
  if (row.waits_for.length) return ["waits", ""];
  if (row.stage === "ended" || row.stage === "not heard") return [row.stage, ""];
  return [row.stage || (row.is_member ? "training" : "newcomer"), row.is_member ? "good" : ""];
}

function number(value) {
  if (value === null || value === undefined) return NONE;
  return (Math.abs(value) < 100 ? Number(value.toPrecision(3)) : Math.round(value)).toLocaleString("en");
}

function seconds(value) {
  if (value === null) return NONE;
  if (value === 0) return "0 s";
  if (value < 1) return `${(1000 * value).toFixed(value < 0.01 ? 1 : 0)} ms`;
  if (value < 120) return `${value.toFixed(0)} s`;
  return value < 7200 ? `${(value / 60).toFixed(0)} min` : `${(value / 3600).toFixed(1)} h`;
}

function bytes(value) {
  if (value === null) return NONE;
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${unit && value < 100 ? value.toFixed(1) : value.toFixed(0)} ${units[unit]}`;
}

function rate(value) {
  return value === null ? NONE : `${bytes(value)}/s`;
}

function percent(value) {
  return value === null ? NONE : `${(100 * value).toFixed(0)} %`;
}

function clock(at) {
  return new Date(1000 * at).toLocaleTimeString("en-GB");
}

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// A text that stays is not written again, so that a selection in it stays too.
function put(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function fill(parent, items, make, update) {
  while (parent.children.length > items.length) parent.lastElementChild.remove();
  while (parent.children.length < items.length) parent.append(make());
  items.forEach((item, index) => update(parent.children[index], item));
}

function table(parent, title, columns, rows) {
  if (!parent.firstElementChild) {
    const heads = columns.map(([name]) => element("th", { scope: "col", role: "columnheader" }, name));
    const head = element("thead", { role: "rowgroup" }, element("tr", { role: "row" }, ...heads));
    const body = element("tbody", { role: "rowgroup" });
    parent.append(element("table", { role: "table", "aria-label": title }, head, body));
  }
  const makeCell = () => element("td", { role: "cell" });
  fill(parent.querySelector("tbody"), rows, () => element("tr", { role: "row" }), (line, row) =>
    fill(line, columns, makeCell, (cell, [name, textOf]) => {
      const found = textOf(row);
      const [text, kind] = Array.isArray(found) ? found : [found, ""];
      put(cell, text);
      cell.className = kind;
      cell.dataset.label = name;
    }),
  );
}

function chart(parent, points) {
  parent.hidden = points.length < 2;
  if (parent.hidden) return;
  const [first, last] = [points[0], points[points.length - 1]];
  const width = Math.max(last[0] - first[0], 1);
  const height = Math.max(last[1] - first[1], 1);
  const places = points.map(([at, rounds]) => {
    const x = (600 * (at - first[0])) / width;
    return `${x.toFixed(1)},${(78 - (72 * (rounds - first[1])) / height).toFixed(1)}`;
  });
  parent.querySelector("polyline").setAttribute("points", places.join(" "));
  const words = points.map(([at, rounds]) => `${rounds} at ${clock(at)}`);
  put(parent.querySelector("title"), `Rounds: ${words[0]}, ${words[words.length - 1]}`);
  put(parent.querySelector(".ends").firstElementChild, words[0]);
  put(parent.querySelector(".ends").lastElementChild, words[words.length - 1]);
}

function makeRun(name) {
  const line = document.createElementNS(SVG, "svg");
  line.setAttribute("viewBox", "0 0 600 80");
  line.setAttribute("preserveAspectRatio", "none");
  line.setAttribute("role", "img");
  line.append(document.createElementNS(SVG, "title"), document.createElementNS(SVG, "polyline"));
  const ends = element("div", { class: "ends" }, element("span"), element("span"));
  const made = element(
    "section",
    {},
    element("h2", {}, name),
    element("p", { class: "soft summary" }),
    element("ul", { class: "alerts" }),
    // Read aloud, in place of the alerts with their seconds.
    element("p", { class: "newest", role: "status" }),
    element("div", { class: "members" }),
    element("div", { class: "rounds" }, element("h3", {}, "Rounds over time"), line, ends),
    element("h3", {}, "Links and time"),
    element("div", { class: "links" }),
    element("h3", {}, "Events"),
    element("ul", { class: "events", tabindex: "0", "aria-label": "Events, the newest first" }),
  );
  made.dataset.run = name;
  return made;
}

function summary(run) {
  const { view } = run;
  const members = run.members.filter((row) => row.is_member);
  const steps = Math.max(0, ...members.map((row) => row.inner_step));
  const words = [`${members.length} members`, `inner step ${steps.toLocaleString("en")}`];
  if (run.has_ended) words.push(run.events.length ? run.events[0].text : "the run has ended");
  if (view === null) return ["fixed group", ...words].join(", ");
  if (view.is_finished) words.push("all steps are taken");
  return [`view ${view.number} (${view.cause})`, ...words].join(", ");
}

function showRun(section, run) {
  put(section.querySelector(".summary"), summary(run));
  fill(section.querySelector(".alerts"), run.alerts, () => element("li"), (item, text) => {
    item.className = `alert ${/: (silent|cut off)/.test(text) ? "bad" : "warn"}`;
    put(item, text);
  });
  put(section.querySelector(".newest"), run.events.length ? run.events[0].text : "");
  table(section.querySelector(".members"), "Replicas", MEMBERS, run.members);
  chart(section.querySelector(".rounds"), run.rounds_over_time);
  table(section.querySelector(".links"), "Links", LINKS, run.members.filter((row) => row.figures && row.is_member));
  const makeEvent = () => element("li", {}, element("time"), element("span"));
  fill(section.querySelector(".events"), run.events, makeEvent, (item, event) => {
    put(item.firstElementChild, clock(event.at));
    put(item.lastElementChild, event.text);
  });
}

function showServer(report) {
  document.getElementById("server").hidden = report === null;
  if (report === null) return;
  const done = report.updates === undefined ? `${report.commits} merges` : `${report.updates} updates`;
  const refused = Object.values(report.refused).reduce((sum, count) => sum + count, 0);
  put(
    document.getElementById("server-line"),
    `${report.parameters.toLocaleString("en")} parameters, ${done}, ${refused} refused, ` +
      `${report.lost} lost, up ${seconds(report.uptime_s)}`,
  );
  const rows = Object.entries(report.workers ?? report.learners ?? {});
  table(document.getElementById("server-table"), "Workers", WORKERS, rows);
}

function show(status) {
  const main = document.getElementById("main");
  const sections = new Map();
  for (const section of main.querySelectorAll("section[data-run]")) sections.set(section.dataset.run, section);
  for (const run of status.runs) {
    const section = sections.get(run.run) ?? makeRun(run.run);
    if (!sections.delete(run.run)) main.append(section);
    showRun(section, run);
  }
  for (const gone of sections.values()) gone.remove();
  showServer(status.report);
  const facts = Object.entries(status.facts);
  const hosts = facts.some(([name]) => name.startsWith("host_"));
  document.getElementById("empty").hidden = status.num_runs > 0 || !hosts;
  const makeFact = () => element("div", {}, element("dt"), element("dd"));
  fill(document.getElementById("facts"), facts, makeFact, (item, [name, value]) => {
    put(item.firstElementChild, name.replace(/_bytes$/, "").replaceAll("_", " "));
    put(item.lastElementChild, name.endsWith("_bytes") ? bytes(value) : number(value));
  });
  const more = status.num_runs - status.runs.length;
  document.getElementById("more").hidden = more === 0;
  put(document.getElementById("more-line"), more === 1 ? "1 more run is in" : `${more} more runs are in`);
  put(document.getElementById("version"), `version ${status.version}`);
}

function showConnection() {
  const old = heardAt === 0 ? 0 : (performance.now() - heardAt) / 1000;
  const away = isAway || old > OLD_S;
  document.body.classList.toggle("away", away);
  put(
    document.getElementById("connection"),
    away ? `No answer from the server${reason}: all below is old.` : "The server answers.",
  );
  put(document.getElementById("age"), lastAt ? `Status of ${clock(lastAt)}${away ? `, ${seconds(old)} ago` : ""}` : "");
}

async function ask() {
  try {
    const answer = await fetch("status.json", { cache: "no-store", signal: AbortSignal.timeout(LIMIT_MS) });
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    const status = await answer.json();
    if (status.schema !== 1) throw new Error("another version: load the page again");
    show(status);
    if (status.at !== lastAt) heardAt = performance.now();
    lastAt = status.at;
    isAway = false;
    reason = "";
  } catch (error) {
    isAway = true;
    reason = /^(status|another)/.test(error.message) ? ` (${error.message})` : "";
  }
  showConnection();
  setTimeout(ask, PERIOD_MS);
}

ask();
