// The status page: draws what /api/events says, about once a second, and says so when it stops.
//
// Names and reasons come from strangers. They enter the document as text nodes and attributes that
// hold text, never as markup: nothing in this file parses a string as HTML.
"use strict";

const byId = (id) => document.getElementById(id);

const LOST_AFTER_MS = 4000;
const RETRY_MS = 2000;

// ---------------------------------------------------------------------------------------- words

const STATES = {
  starting: "Starting",
  fetching: "Catching up",
  training: "Training",
  isolated: "Isolated, training locally",
  paused: "Paused",
  settled: "Settled",
  stopping: "Stopping",
  error: "Needs attention",
};

const ADVICE = {
  isolated: "Nothing is lost: this node goes on by itself, and merging resumes as soon as another "
    + "node answers. If it stays like this, check this machine’s internet connection.",
  error: "Starting the node again is safe: it continues from its last checkpoint.",
};

const SYNC = {
  in_sync: { sign: "✓", words: () => "in sync" },
  behind: { sign: "↓", words: (f) => `${f.head_version - f.version} behind` },
  diverged: { sign: "!", words: () => "diverged" },
  fetching: { sign: "⋯", words: () => "fetching" },
  empty: { sign: "○", words: () => "empty" },
};

const FATES = [
  ["merged", "merged", "Merged into the model"],
  ["pending", "pending", "Waiting to be merged"],
  ["rejected", "rejected", "Not taken"],
  ["lost", "lost-part", "Lost"],
];

// -------------------------------------------------------------------------------------- numbers

const whole = new Intl.NumberFormat("en");
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
const NONE = "–";

const count = (n) => (n === null ? NONE : n < 10000 ? whole.format(Math.round(n)) : compact.format(n));
const decimals = (x, digits) => (x === null ? NONE : x.toFixed(digits));
const plural = (n, word) => `${count(n)} ${word}${n === 1 ? "" : "s"}`;

function bytes(n) {
  for (const [unit, size] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (n >= size) return `${(n / size).toFixed(n / size < 10 ? 2 : n / size < 100 ? 1 : 0)} ${unit}`;
  }
  return `${Math.round(n)} B`;
}

function span(s) {
  if (s === null) return NONE;
  if (s < 0.0995) return `${(s * 1000).toFixed(0)} ms`;
  if (s < 9.95) return `${s.toFixed(s < 1 ? 2 : 1)} s`;
  if (s < 60) return `${Math.floor(s)} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}

const ago = (s) => (s === null ? NONE : s < 1 ? "now" : `${span(Math.floor(s)).replace(/\.0 /, " ")} ago`);

function share(part, total) {
  if (!total || !part) return "0 %";
  const percent = (100 * part) / total;
  return percent < 0.1 ? "< 0.1 %" : percent > 99.9 && part < total ? "> 99.9 %" : `${percent.toFixed(1)} %`;
}

// ------------------------------------------------------------------------------------- document

/** An element with text and child elements; a false child is left out. */
function el(tag, className, ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children.filter((child) => child !== false && child !== null));
  return made;
}

function withAttributes(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

/** Make `old` look like `fresh`, touching only what differs: selection, scroll and focus stay. */
function morph(old, fresh) {
  if (old.nodeName !== fresh.nodeName) return old.replaceWith(fresh);
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== fresh.data) old.data = fresh.data;
    return undefined;
  }
  for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of fresh.attributes) {
    if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  return fill(old, [...fresh.childNodes]);
}

function fill(parent, children) {
  while (parent.childNodes.length > children.length) parent.lastChild.remove();
  children.forEach((child, i) => {
    if (i < parent.childNodes.length) morph(parent.childNodes[i], child);
    else parent.append(child);
  });
}

function setText(id, text) {
  const element = byId(id);
  if (element.textContent !== text) element.textContent = text;
}

/** A stranger's text without control, bidirectional-override and other invisible characters. */
function clean(text) {
  const visible = String(text).replace(/[\p{Cc}\p{Cf}\p{Co}\p{Cs}\p{Zl}\p{Zp}]/gu, "").trim();
  return visible.length > 60 ? `${visible.slice(0, 60)}…` : visible;
}

const shortPeer = (peer) => `…${peer.slice(-6)}`;

function namer(members) {
  const names = new Map(members.map((m) => [m.peer, clean(m.name)]));
  return (peer) => names.get(peer) || shortPeer(peer);
}

// --------------------------------------------------------------------------------------- pieces

function drawHero(status) {
  byId("hero").dataset.state = status.state;
  setText("state", STATES[status.state] || status.state);
  setText("sentence", status.sentence);
  const advice = ADVICE[status.state];
  byId("advice").hidden = !advice;
  setText("advice", advice || "");
  fill(byId("problems"), problems(status).map((text) => el("li", "", text)));
  document.title = `${STATES[status.state] || status.state} · ${clean(status.run.name)}`;
}

function problems(status) {
  const { learner, checkpoint, tokens, rollouts } = status;
  const found = [];
  const learnerIsDown = ["restarting", "stopped"].includes(learner.state) || status.state === "error";
  if (learner.last_error && learnerIsDown) found.push(`Learner: ${learner.last_error}`);
  if (rollouts && rollouts.last_error && rollouts.state !== "serving") {
    found.push(`Rollouts: ${rollouts.last_error}`);
  }
  if (checkpoint.error) found.push(`Checkpoint not saved, training goes on: ${checkpoint.error}`);
  if (!tokens.adds_up) found.push("The token ledger does not add up. Please report this as a bug.");
  return found;
}

function drawFigures(status) {
  const { learner, synchronizer } = status;
  const lead = synchronizer && (synchronizer.is_self ? "this node" : namer(status.members)(synchronizer.peer));
  const figures = [
    learntFigure(status),
    ["Tokens per second", count(learner.tokens_per_s), learner.step_s === null ? "" : `${span(learner.step_s)} per step`],
    ["Merges", count(status.merges_total), status.first_merge_s === null ? "none yet" : `first after ${span(status.first_merge_s)}`],
    ["Learners here", count(learnersHere(status)), lead ? `synchronizer: ${lead}` : "no synchronizer"],
    ...apartFigures(status.disagreement),
    ["Running for", span(status.uptime_s), `step ${whole.format(learner.step)}`],
  ];
  fill(byId("figures"), figures.map(([term, value, note]) => (
    el("div", "", el("dt", "", term), el("dd", "", value), el("dd", "note", note)))));
}

/** The figure that says how well the model has learnt so far. */
function learntFigure({ learner, learning }) {
  if (!learning) return ["Held-out loss", decimals(learner.held_out_loss, 3), "nats per byte"];
  const note = learning.step === null
    ? "no rollouts yet" : `step ${whole.format(learning.step)}, drift ${decimals(learning.drift, 4)}`;
  return ["Reward", decimals(learning.reward, 3), note];
}

/** How far the nodes that mix are apart; nothing in a run with synchronizers. */
function apartFigures(apart) {
  if (!apart) return [];
  const parameters = apart.parameters_share === null
    ? "not mixed yet" : `parameters differ by ${share(apart.parameters_share, 1)}`;
  return [["Disagreement", decimals(apart.outputs, 3), parameters]];
}

function learnersHere(status) {
  return status.members.filter((m) => m.alive && m.role === "learner").length;
}

function drawMembers(status) {
  const silent = status.members.filter((m) => !m.alive).length;
  const here = plural(learnersHere(status), "learner");
  setText("members-why", status.disagreement
    ? "Every node mixes with partners; there is no synchronizer."
    : "The synchronizer gathers and merges; the job moves on by itself.");
  setText("members-sum", silent ? `${here}, ${count(silent)} silent` : here);
  const order = (m) => `${[!m.is_self, !m.alive, !m.ready].map(Number).join("")}${clean(m.name)} ${m.peer}`;
  const sorted = [...status.members].sort((a, b) => (order(a) < order(b) ? -1 : 1));
  const rows = sorted.map(memberRow);
  const unlisted = status.num_members - sorted.length;
  if (unlisted > 0) rows.push(el("li", "empty", `and ${count(unlisted)} more`));
  if (!sorted.some((m) => !m.is_self)) rows.push(el("li", "empty", "Nobody else has been found yet."));
  fill(byId("members"), rows);
}

function memberRow(member) {
  const [tone, standing] = memberStanding(member);
  const speed = !member.alive || member.tokens_per_s === null ? "" : `${count(member.tokens_per_s)} tokens/s`;
  const heard = member.is_self || member.last_heard_s === null ? "" : ` · heard ${ago(member.last_heard_s)}`;
  const role = member.role === "bootstrap" ? "bootstrap · " : "";
  const row = el("li", member.alive ? "" : "away",
    el("span", "name",
      el("bdi", "", clean(member.name) || shortPeer(member.peer)),
      member.is_self && el("span", "tag", "this node"),
      member.is_synchronizer && el("span", "tag accent", "synchronizer")),
    el("span", "right", el("span", `tag ${tone}`, standing)),
    el("span", "soft", `${role}${shortPeer(member.peer)}${heard}`),
    el("span", "right soft", speed));
  return withAttributes(row, { title: member.peer });
}

function memberStanding(member) {
  if (!member.alive) return ["", "silent"];
  if (member.role === "bootstrap") return ["", "helping"];
  if (!member.ready) return ["warn", "not ready"];
  if (member.versions_behind === null) return ["", "unknown"];
  if (member.versions_behind > 0) return ["warn", `${count(member.versions_behind)} behind`];
  return ["good", "in sync"];
}

function damageOf(fragment) {
  const what = `damaged in memory ${plural(fragment.damaged_times, "time")}`;
  return fragment.mended_s_ago === null ? what : `${what}, replaced ${ago(fragment.mended_s_ago)}`;
}

function drawFragments(status) {
  const inSync = status.fragments.filter((f) => f.state === "in_sync").length;
  const all = status.fragments.length;
  setText("fragments-sum", all ? `${inSync} of ${all} in sync` : "");
  byId("fragments-sum").className = `sum ${all && inSync === all ? "good" : "warn"}`;
  fill(byId("fragments"), status.fragments.map((fragment) => {
    const sync = SYNC[fragment.state];
    const cell = el("li", "",
      el("div", "head", el("span", "", `fragment ${fragment.index}`), el("span", "sign", sync.sign)),
      el("div", "version", fragment.state === "empty" ? NONE : `v${fragment.version}`),
      el("div", "words", sync.words(fragment)),
      ...(fragment.damaged_times ? [el("div", "words", damageOf(fragment))] : []),
      el("code", "", fragment.digest === null ? NONE : fragment.digest.slice(0, 10)));
    return withAttributes(cell, {
      "data-state": fragment.state,
      "title": `${whole.format(fragment.num_values)} values, ${plural(fragment.local_steps, "local step")} `
        + `since version ${fragment.version}; newest known version ${fragment.head_version}`,
    });
  }));
}

function drawRounds(status) {
  const name = namer(status.members);
  const rows = status.rounds.map((round) => {
    const took = round.duration_s === null ? "" : ` · took ${span(round.duration_s)}`;
    const who = round.contributors.map(name).join(", ") || "nobody";
    return el("li", "",
      el("div", "line",
        el("span", `tag ${["merged", "mixed"].includes(round.outcome) ? "good" : "warn"}`, round.outcome),
        el("b", "", `Fragment ${round.fragment}, v${round.version}`),
        el("span", "soft", ago(round.seconds_ago))),
      el("div", "", round.reason),
      el("div", "soft", `from ${who} · by ${name(round.synchronizer)}${took} · term ${round.term}.${round.attempt}`));
  });
  fill(byId("rounds"), rows.length ? rows : [el("li", "empty", "No round has closed yet.")]);
}

function drawPacing(status) {
  const { pacing } = status;
  byId("pacing-card").hidden = pacing === null;
  if (pacing === null) return;
  setText("pacing-policy", pacing.policy);
  setText("pacing-sentence", pacing.sentence);
  const percent = (x) => (x === null ? NONE : `${(100 * x).toFixed(0)} %`);
  const bound = (b) => `${span(b.bound_s)} for 95 % (held for ${percent(b.coverage)}), ${percent(b.late)} late`;
  const served = pacing.target_s === null
    ? [["Served here", "nothing that tells of it"]]
    : [["Answers, at most", span(pacing.target_s)],
       ["Without a merge", bound(pacing.quiet)],
       ["During a merge", bound(pacing.syncing)],
       ["Learnt from", `${plural(pacing.answers_total, "answer")}, anew ${plural(pacing.relearned, "time")}`]];
  const pressure = Object.entries(pacing.pressure).map(([name, x]) => `${name} ${percent(x)}`).join(" · ");
  fill(byId("pacing"), [["Pressure", pressure], ...served].flatMap(
    ([term, words]) => [el("dt", "", term), el("dd", "", words)]));
}

function drawLedger(status) {
  const { tokens } = status;
  const amounts = {
    merged: tokens.merged, pending: tokens.pending, rejected: tokens.rejected_total, lost: tokens.lost_total,
  };
  setText("ledger-sum", tokens.adds_up ? "✓ adds up" : "! does not add up");
  byId("ledger-sum").className = `sum ${tokens.adds_up ? "good" : "bad"}`;
  const bar = byId("ledger-bar");
  if (!bar.childElementCount) bar.append(...FATES.map(([, className]) => el("i", className)));
  FATES.forEach(([fate], i) => {
    bar.children[i].style.width = `${tokens.processed ? (100 * amounts[fate]) / tokens.processed : 0}%`;
    bar.children[i].hidden = !amounts[fate];
  });
  const lines = FATES.map(([fate, className, words]) => el("div", className,
    el("i", ""), el("dt", "", words),
    el("dd", "", count(amounts[fate])), el("dd", "soft", share(amounts[fate], tokens.processed)),
    ...Object.entries(fate in { rejected: 1, lost: 1 } ? tokens[fate] : {}).map(([reason, n]) => (
      el("dd", "reason soft", `${count(n)} ${reason}`)))));
  fill(byId("ledger"), lines);
}

const speedSamples = [];

function drawRollouts({ rollouts }) {
  byId("rollouts-card").hidden = !rollouts;
  if (!rollouts) return;
  setText("rollouts-sum", rollouts.state === "serving" ? "" : rollouts.state);
  const figures = [
    ["Answers given", count(rollouts.served), rollouts.refused ? `${count(rollouts.refused)} refused` : ""],
    ["Tokens per second", count(rollouts.tokens_per_s), `${count(rollouts.tokens)} in all`],
    ["Drafts confirmed", rollouts.draft_acceptance === null ? NONE : share(rollouts.draft_acceptance, 1), "of the tokens guessed ahead"],
    ["In work", count(rollouts.running), `${count(rollouts.waiting)} waiting`],
    ["Policy version", count(rollouts.policy_version), "merges in its weights"],
  ];
  fill(byId("rollouts"), figures.map(([term, value, note]) => (
    el("div", "", el("dt", "", term), el("dd", "", value), el("dd", "note", note)))));
}

/** In a run that learns from rollouts: the step that this node hands out, and who gave what. */
function drawDispatching({ dispatching, learning, members }) {
  byId("dispatching-card").hidden = !dispatching;
  if (!dispatching) return;
  const { step, trajectories, workers } = dispatching;
  const nameOf = namer(members);
  setText("dispatching-sum", step === null ? "" : `step ${whole.format(step)}, ${dispatching.phase}`);
  setText("dispatching-why", step === null
    ? "Another node hands out the turns of this step; it is the synchronizer's job."
    : "This node hands out the turns of this step, checks what comes back, and shares it out.");
  const total = Object.values(trajectories).reduce((sum, n) => sum + n, 0);
  const figures = [
    ["Episodes learnt from", count(learning.learnt_from), `of ${count(learning.episodes)}, ${count(learning.dropped)} too old`],
    ["Trajectories at an end", total ? `${count(trajectories.ended || 0)} of ${count(total)}` : NONE,
      total ? `${count(trajectories.generating || 0)} generating, ${count(trajectories.waiting || 0)} waiting` : ""],
  ];
  fill(byId("dispatching"), figures.map(([term, value, note]) => (
    el("div", "", el("dt", "", term), el("dd", "", value), el("dd", "note", note)))));
  fill(byId("dispatched"), workers.map((worker) => el("li", "",
    el("span", "name", el("bdi", "", nameOf(worker.peer))),
    el("span", "soft", dispatchedWords(worker)))));
}

function dispatchedWords(worker) {
  const words = [`${plural(worker.turns, "turn")}, ${plural(worker.tokens, "token")}`];
  if (worker.cached_share !== null) words.push(`${share(worker.cached_share, 1)} of prompts cached`);
  if (worker.lies) words.push(`not true ${plural(worker.lies, "time")}`);
  if (worker.last_problem) words.push(clean(worker.last_problem));
  return words.join(" · ");
}

function drawTraffic(status) {
  const { traffic } = status;
  const limit = traffic.upload_limit_bytes_per_s;
  const up = rate("sent_bytes", traffic) + (limit === null ? "" : `, bodies at most ${bytes(limit)}/s`);
  const down = rate("received_bytes", traffic);
  speedSamples.push({ at: performance.now(), ...traffic });
  while (speedSamples.length > 6) speedSamples.shift();
  fill(byId("traffic"), [["↑ Sent", traffic.sent_bytes, up], ["↓ Received", traffic.received_bytes, down]].map(
    ([term, total, now]) => el("div", "", el("dt", "", term), el("dd", "", bytes(total)), el("dd", "note", now))));
  const kinds = Object.entries(traffic.by_kind).sort(
    ([, a], [, b]) => b.sent_bytes + b.received_bytes - a.sent_bytes - a.received_bytes);
  byId("kinds").parentElement.hidden = !kinds.length;
  fill(byId("kinds"), kinds.map(([kind, n]) => el("tr", "",
    el("td", "", kind), el("td", "", bytes(n.sent_bytes)), el("td", "", bytes(n.received_bytes)))));
}

function rate(direction, traffic) {
  const first = speedSamples[0];
  if (!first || traffic[direction] < first[direction]) {
    speedSamples.length = 0;
    return "measuring";
  }
  const seconds = (performance.now() - first.at) / 1000;
  return `${bytes((traffic[direction] - first[direction]) / Math.max(seconds, 0.5))}/s now`;
}

function drawMachine(status) {
  const { learner, loop_lag: lag, checkpoint } = status;
  const refused = Object.entries(status.refusals);
  const refusedTotal = refused.reduce((sum, [, n]) => sum + n, 0);
  const facts = [
    ["Learner", [learner.state, learner.device].filter(Boolean).join(" on "), ""],
    ["Parameters", count(learner.num_parameters), ""],
    ["Time stalled", share(learner.stall_share, 1), learner.stall_share > 0.01 ? "warn" : ""],
    ["Restarts", count(learner.restarts), ""],
    ["Event-loop lag", `p99 ${lag.p99_ms.toFixed(1)} ms, max ${lag.max_ms.toFixed(0)} ms`,
      lag.p99_ms > 250 ? "bad" : lag.p99_ms > 50 ? "warn" : ""],
    ["Checkpoint", checkpoint.error ? "failed" : ago(checkpoint.last_saved_s_ago), checkpoint.error ? "bad" : ""],
    ["On disk", bytes(checkpoint.bytes_on_disk), ""],
    ["Refused from others", count(refusedTotal), "", refused.map(([reason, n]) => `${n}: ${reason}`).join("\n")],
  ];
  if (status.network.reach) facts.push(["Reached by others", status.network.reach, ""]);
  if (learner.last_error) facts.push(["Last error", learner.last_error, ""]);
  fill(byId("machine"), facts.map(([term, value, tone, title]) => {
    const row = el("div", "", el("dt", "", term), el("dd", tone, value));
    return title ? withAttributes(row, { title }) : row;
  }));
}

function drawEvents(status) {
  const rows = status.events.map((event) => (
    el("li", "", el("span", "soft", ago(event.seconds_ago)), el("span", "", event.text))));
  fill(byId("events"), rows.length ? rows : [el("li", "empty", "Nothing yet.")]);
}

function drawFrame(status) {
  setText("run-name", clean(status.run.name));
  setText("node-name", clean(status.node_name));
  setText("versions", `p2pdiloco ${status.app_version}, protocol ${status.protocol_version}`);
  setText("peer-id", status.peer_id);
  setText("run-id", status.run.id.slice(0, 16));
}

// ---------------------------------------------------------------------------------------- chart

const MARGIN = { left: 46, right: 14, top: 10, bottom: 40 };

const LOSS_CHART = {
  title: "Loss",
  why: "Lower is better: how surprised the model is by the next piece of text.",
  training: "training",
  heldOut: "held out",
  unit: "nats",
  over: "inner steps of this node",
};
const REWARD_CHART = {
  title: "Reward",
  why: "Higher is better: how well the tasks are done that this node learns from, 1 at best.",
  training: null,
  heldOut: "reward",
  unit: "reward",
  over: "steps of the swarm",
};

/** Curves over steps; hover, touch or arrow keys read a point. */
const chart = {
  words: LOSS_CHART,
  training: [],
  heldOut: [],
  cursor: null,

  start() {
    this.legend = el("div", "legend");
    this.svg = withAttributes(svg("svg"), { role: "img", tabindex: "0" });
    byId("chart").append(this.legend, this.svg);
    this.svg.addEventListener("pointermove", (event) => this.point(event.offsetX));
    this.svg.addEventListener("pointerleave", () => this.point(null));
    this.svg.addEventListener("keydown", (event) => this.key(event));
    this.svg.addEventListener("blur", () => this.point(null));
    new ResizeObserver(() => this.draw()).observe(this.svg);
  },

  show(status) {
    const known = (points) => points.filter(([, value]) => value !== null);
    this.words = status.learning ? REWARD_CHART : LOSS_CHART;
    setText("chart-title", this.words.title);
    setText("chart-why", this.words.why);
    this.training = status.learning ? [] : known(status.loss_curve);
    this.heldOut = known(status.learning ? status.reward_curve : status.held_out_curve);
    this.draw();
  },

  /** Put the cursor at the training or held-out step nearest to pixel `x`, or take it away. */
  point(x) {
    this.cursor = x === null || !this.scale ? null : this.nearest(this.steps(), this.scale.stepAt(x));
    this.draw();
  },

  key(event) {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const steps = this.steps();
    if (!move || !steps.length) return;
    event.preventDefault();
    const at = this.cursor === null ? steps.length - 1 : steps.indexOf(this.cursor) + move;
    this.cursor = steps[Math.min(Math.max(at, 0), steps.length - 1)];
    this.draw();
  },

  steps() {
    return [...new Set([...this.training, ...this.heldOut].map(([step]) => step))].sort((a, b) => a - b);
  },

  nearest(steps, wanted) {
    return steps.reduce((best, step) => (
      best === null || Math.abs(step - wanted) < Math.abs(best - wanted) ? step : best), null);
  },

  draw() {
    const width = this.svg.clientWidth;
    const height = this.svg.clientHeight;
    if (!width || !height) return;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.drawLegend();
    const all = [...this.training, ...this.heldOut];
    if (all.length < 2) {
      this.scale = null;
      fill(this.svg, [label(width / 2, height / 2, "middle", "The curve begins with the first steps.")]);
      return;
    }
    this.scale = scaleFor(all, width, height);
    fill(this.svg, [
      ...axes(this.scale, width, height, this.words),
      curve(this.training, this.scale, "training"),
      curve(this.heldOut, this.scale, "held-out"),
      ...(this.heldOut.length <= 40 ? this.heldOut : this.heldOut.slice(-1)).map(
        (p) => dot(p, this.scale, "", 3.2)),
      ...this.drawCursor(height),
    ]);
  },

  drawLegend() {
    const at = (points, step) => {
      if (!points.length) return null;
      if (step === null) return points[points.length - 1];
      return points.find(([s]) => s === this.nearest(points.map(([p]) => p), step));
    };
    const held = at(this.heldOut, this.cursor);
    const training = at(this.training, this.cursor);
    const text = (name, point) => `${name} ${point ? point[1].toFixed(3) : NONE}`;
    const named = [["held-out", this.words.heldOut, held], ["training", this.words.training, training]]
      .filter(([, name]) => name);
    fill(this.legend, [
      ...named.map(([className, name, point]) => el("span", className, el("i", ""), text(name, point))),
      el("span", "at", this.cursor === null ? "latest" : `at step ${whole.format(this.cursor)}`),
    ]);
    this.svg.setAttribute("aria-label",
      `${this.words.title} over ${this.words.over}. ${named.map(([, name, p]) => text(name, p)).join(", ")}`
      + `${this.cursor === null ? "" : ` at step ${this.cursor}`}.`);
  },

  drawCursor(height) {
    if (this.cursor === null) return [];
    const x = this.scale.x(this.cursor);
    const line = withAttributes(svg("line"), {
      class: "cross", x1: x, x2: x, y1: MARGIN.top, y2: height - MARGIN.bottom,
    });
    const dots = [[this.training, "training"], [this.heldOut, ""]].map(([points, className]) => {
      const step = this.nearest(points.map(([p]) => p), this.cursor);
      return step === null ? null : dot(points.find(([p]) => p === step), this.scale, className, 4.5);
    });
    return [line, ...dots.filter((d) => d !== null)];
  },
};

/** How far apart the nodes are, where they mix with partners. */
const apart = {
  points: [],

  start() {
    this.svg = withAttributes(svg("svg"), { role: "img" });
    byId("apart").append(this.svg);
    new ResizeObserver(() => this.draw()).observe(this.svg);
  },

  show(status) {
    const told = status.disagreement;
    byId("apart-card").hidden = told === null;
    this.points = (told ? told.curve : []).filter(([, value]) => value !== null);
    setText("apart-sum", told && told.outputs !== null ? told.outputs.toFixed(3) : "");
    this.draw();
  },

  draw() {
    const [width, height] = [this.svg.clientWidth, this.svg.clientHeight];
    if (!width || !height) return;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.setAttribute("aria-label", `Distance over inner steps, ${this.points.length} points.`);
    if (this.points.length < 2) {
      fill(this.svg, [label(width / 2, height / 2, "middle", "Two evaluations are needed.")]);
      return;
    }
    const scale = scaleFor(this.points, width, height);
    fill(this.svg, [
      ...axes(scale, width, height, { unit: "", over: "inner steps of this node" }),
      curve(this.points, scale, "held-out"),
      dot(this.points[this.points.length - 1], scale, "", 3.2),
    ]);
  },
};

const svg = (tag) => document.createElementNS("http://www.w3.org/2000/svg", tag);

function label(x, y, anchor, text) {
  const made = withAttributes(svg("text"), { x, y, "text-anchor": anchor });
  made.append(text);
  return made;
}

function dot([step, value], scale, className, radius) {
  return withAttributes(svg("circle"), { class: className, cx: scale.x(step), cy: scale.y(value), r: radius });
}

function curve(points, scale, className) {
  const path = points.map(([step, value], i) => (
    `${i ? "L" : "M"}${scale.x(step).toFixed(1)} ${scale.y(value).toFixed(1)}`)).join("");
  return withAttributes(svg("path"), { class: `curve ${className}`, d: path });
}

function scaleFor(points, width, height) {
  const steps = points.map(([step]) => step);
  const values = points.map(([, value]) => value);
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const pad = Math.max((high - low) * 0.06, 0.01);
  const [bottom, top] = [Math.max(low - pad, 0), high + pad];
  const [first, last] = [Math.min(...steps), Math.max(...steps)];
  const [w, h] = [width - MARGIN.left - MARGIN.right, height - MARGIN.top - MARGIN.bottom];
  const extent = Math.max(last - first, 1);
  return {
    x: (step) => MARGIN.left + (w * (step - first)) / extent,
    y: (value) => MARGIN.top + (h * (top - value)) / (top - bottom),
    stepAt: (x) => first + ((x - MARGIN.left) * extent) / w,
    xTicks: ticks(first, last, Math.max(2, Math.round(width / 110))),
    yTicks: ticks(bottom, top, Math.max(3, Math.round(height / 50))),
  };
}

/** Round numbers (steps of 1, 2 or 5 times a power of ten) between `low` and `high`. */
function ticks(low, high, wanted) {
  const raw = Math.max((high - low) / wanted, 1e-6);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].find((m) => m * power >= raw) * power;
  const from = Math.ceil(low / step - 1e-9);
  const to = Math.floor(high / step + 1e-9);
  return Array.from({ length: to - from + 1 }, (_, i) => Number(((from + i) * step).toPrecision(10)));
}

function axes(scale, width, height, words) {
  const right = width - MARGIN.right;
  const bottom = height - MARGIN.bottom;
  const middle = (MARGIN.top + bottom) / 2;
  const upright = label(12, middle, "middle", words.unit);
  upright.setAttribute("transform", `rotate(-90 12 ${middle})`);
  return [
    ...[...scale.yTicks.map(scale.y), bottom].map((y) => withAttributes(svg("line"), {
      class: "rule", x1: MARGIN.left, x2: right, y1: y, y2: y,
    })),
    ...scale.yTicks.map((tick) => label(MARGIN.left - 8, scale.y(tick) + 4, "end", String(tick))),
    ...scale.xTicks.map((tick) => label(scale.x(tick), bottom + 17, "middle", count(tick))),
    upright,
    label((MARGIN.left + right) / 2, height - 4, "middle", words.over),
  ];
}

// ----------------------------------------------------------------------------------- connection

function draw(status) {
  drawFrame(status);
  drawHero(status);
  drawFigures(status);
  chart.show(status);
  apart.show(status);
  drawMembers(status);
  drawFragments(status);
  drawRounds(status);
  drawPacing(status);
  drawLedger(status);
  drawRollouts(status);
  drawDispatching(status);
  drawTraffic(status);
  drawMachine(status);
  drawEvents(status);
}

/** The event stream; hidden tabs give their place up, a lost one is tried again for ever. */
const connection = {
  source: null,
  heardAt: performance.now(),
  isLive: false,

  open() {
    this.close();
    this.source = new EventSource("/api/events");
    this.source.addEventListener("message", (event) => this.heard(JSON.parse(event.data)));
    this.source.addEventListener("bye", () => this.lost("The node has stopped."));
  },

  close() {
    if (this.source) this.source.close();
    this.source = null;
  },

  heard(status) {
    this.heardAt = performance.now();
    this.isLive = true;
    this.show("live", "");
    draw(status);
  },

  lost(why) {
    this.close();
    if (!this.isLive && !byId("lost").hidden) return;
    this.isLive = false;
    speedSamples.length = 0;
    const time = new Date().toLocaleTimeString("en-GB");
    this.show("lost", `${why} This is what it said last, at ${time}. Trying to reach it again.`);
    document.title = "Connection lost · p2pdiloco";
  },

  show(word, banner) {
    byId("live").dataset.live = banner ? "no" : "yes";
    byId("live").lastElementChild.textContent = word;
    byId("page").classList.toggle("stale", Boolean(banner));
    byId("lost").hidden = !banner;
    if (byId("lost").textContent !== banner) byId("lost").textContent = banner;
  },

  watch() {
    if (document.hidden) return;
    if (performance.now() - this.heardAt > LOST_AFTER_MS) {
      this.lost("The connection to the node is lost.");
    }
    if (!this.source || this.source.readyState === EventSource.CLOSED) this.open();
  },

  turn() {
    this.heardAt = performance.now();
    if (document.hidden) this.close();
    else this.open();
  },
};

chart.start();
apart.start();
connection.open();
setInterval(() => connection.watch(), RETRY_MS);
document.addEventListener("visibilitychange", () => connection.turn());
