// Draws the median step on a canvas: as measured above, with equal work below, on one time axis.
// The data is packed by reports/timeline.py. Text of the record is only ever set as textContent or drawn as pixels.
"use strict";
(() => {
  const LEFT = 96, TITLE = 26, AXIS = 26, GAP = 14, MAX_PANEL = 340, ROW = 28, MIN_NUMBER_ROW = 11, LABEL_ROW = 15;
  const canvas = document.getElementById("timeline"), tip = document.getElementById("tip");
  const context = canvas.getContext("2d");
  const facts = JSON.parse(document.getElementById("timeline-facts").textContent);
  const rows = facts.ranks.length, quantum = facts.quantum_s;
  const end = Math.max(facts.step_s, facts.equal_work_step_s);
  const view = { from: 0, to: end, top: 0, bottom: rows };
  let panels = [], colours = {}, hover = null, pending = false;

  async function unpack() {
    const text = atob(document.getElementById("timeline-intervals").textContent.trim());
    const bytes = new Uint8Array(text.length);
    for (let i = 0; i < bytes.length; i++) bytes[i] = text.charCodeAt(i);
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    const data = new Uint8Array(await new Response(stream).arrayBuffer());
    let offset = 0;
    const raw = (count) => data.subarray(offset, (offset += count));
    const numbers = (count) => {
      const [a, b, c, d] = [raw(count), raw(count), raw(count), raw(count)], values = new Int32Array(count);
      for (let i = 0; i < count; i++) values[i] = a[i] | b[i] << 8 | c[i] << 16 | d[i] << 24;
      return values;
    };
    return facts.counts.map((count, track) => {
      const counts = numbers(rows), starts = numbers(count), ends = numbers(count), kinds = raw(count);
      const first = new Int32Array(rows + 1);
      for (let row = 0, i = 0; row < rows; row++) {
        for (let last = 0, n = counts[row]; n > 0; n--, i++) {
          starts[i] += last;
          last = ends[i] += starts[i];
        }
        first[row + 1] = i;
      }
      const ops = track !== 1;
      return { first, starts, ends, kinds, ops, stages: ops ? numbers(count) : null, microbatches: ops ? numbers(count) : null };
    });
  }

  function readColours() {
    const style = getComputedStyle(document.documentElement);
    const get = (name) => {
      const text = style.getPropertyValue(name).trim();
      return { text, rgb: [1, 3, 5].map((i) => parseInt(text.slice(i, i + 2), 16)) };
    };
    colours = { ink: get("--ink"), soft: get("--soft"), line: get("--line"), card: get("--card"), track: get("--track") };
    colours.kinds = [];
    for (const kind of Object.keys(facts.kinds)) colours.kinds[kind] = get(`--kind-${kind}`);
    colours.places = facts.places.map(([name]) => get(`--place-${name}`));
    colours.bubble = get("--cause-bubble");
  }

  // First interval of a row that ends after the time (in quanta). Ends of one row never go down but for overlaps.
  function firstAfter(track, row, time) {
    let low = track.first[row], high = track.first[row + 1];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (track.ends[middle] > time) high = middle; else low = middle + 1;
    }
    return low;
  }

  // Adds a row's intervals to a line of pixels: each pixel gets each colour by the share of it that is covered.
  function paint(line, track, row, width) {
    const scale = quantum * width / (view.to - view.from), shift = view.from / quantum;
    const palette = track.ops ? colours.kinds : colours.places, last = track.first[row + 1];
    const { cover, red, green, blue } = line;
    for (let i = firstAfter(track, row, shift); i < last; i++) {
      let x0 = (track.starts[i] - shift) * scale, x1 = (track.ends[i] - shift) * scale;
      if (x0 >= width) break;
      if (track.ops && x1 - x0 > 6) x1 -= 1; // a hairline between neighbours of one colour
      x0 = Math.max(x0, 0);
      x1 = Math.min(x1, width);
      const rgb = (palette[track.kinds[i]] || colours.soft).rgb, r = rgb[0], g = rgb[1], b = rgb[2];
      for (let pixel = Math.floor(x0); pixel < x1; pixel++) {
        const share = Math.min(x1, pixel + 1) - Math.max(x0, pixel);
        cover[pixel] += share;
        red[pixel] += share * r;
        green[pixel] += share * g;
        blue[pixel] += share * b;
      }
    }
  }

  function drawRows(panel, ratio) {
    const width = Math.max(1, Math.round((canvas.clientWidth - LEFT) * ratio));
    const height = Math.round(panel.height * ratio), rowPixels = height / (view.bottom - view.top);
    const image = context.createImageData(width, height), pixels = new Uint32Array(image.data.buffer);
    const [cover, red, green, blue] = [0, 1, 2, 3].map(() => new Float32Array(width));
    const line = { cover, red, green, blue }, colour = new Uint32Array(width);
    const ground = colours[panel.ground].rgb, beyond = colours.card.rgb;
    const stepEnd = (panel.step - view.from) / (view.to - view.from) * width;
    let drawn = -1;
    for (let y = 0; y < height; y++) {
      const row = Math.min(rows - 1, Math.floor(view.top + (y + 0.5) / rowPixels));
      if (rowPixels > 8 && Math.floor(view.top + (y + 1.5) / rowPixels) !== row) continue; // a gap between rows
      if (row !== drawn) {
        drawn = row;
        for (const part of [cover, red, green, blue]) part.fill(0);
        panel.tracks.forEach((track) => paint(line, track, row, width));
        for (let x = 0; x < width; x++) {
          const most = Math.max(cover[x], 1), rest = Math.max(0, 1 - cover[x]);
          const back = x < stepEnd ? ground : beyond;
          colour[x] = 0xff000000 | blue[x] / most + rest * back[2] << 16 |
            green[x] / most + rest * back[1] << 8 | red[x] / most + rest * back[0];
        }
      }
      pixels.set(colour, y * width);
    }
    context.putImageData(image, Math.round(LEFT * ratio), Math.round(panel.y * ratio));
  }

  const xOf = (time) => LEFT + (time - view.from) / (view.to - view.from) * (canvas.clientWidth - LEFT);
  const rowHeight = (panel) => panel.height / (view.bottom - view.top);

  function drawLabels(panel) {
    const high = rowHeight(panel), width = canvas.clientWidth;
    context.save();
    context.beginPath();
    context.rect(0, panel.y, width, panel.height);
    context.clip();
    context.textBaseline = "middle";
    const every = Math.max(1, Math.ceil(LABEL_ROW / high));
    for (let row = Math.floor(view.top); row < Math.min(rows, view.bottom); row++) {
      if (row % every !== every >> 1) continue;
      const middle = panel.y + (row + 0.5 - view.top) * high;
      context.fillStyle = colours.soft.text;
      context.font = "12px system-ui, sans-serif";
      context.textAlign = "right";
      const stages = facts.stages[row];
      const text = stages.length > 2 ? `rank ${facts.ranks[row]}` : `rank ${facts.ranks[row]}, st. ${stages.join(" ")}`;
      context.fillText(text, LEFT - 8, middle, LEFT - 12);
      if (high >= MIN_NUMBER_ROW) drawNumbers(panel.tracks[0], row, middle, high);
    }
    context.restore();
  }

  function drawNumbers(track, row, middle, high) {
    context.font = `${Math.min(12, Math.floor(high - 2))}px system-ui, sans-serif`;
    context.textAlign = "center";
    const lit = hover && hover.microbatch >= 0 ? hover.microbatch : null;
    for (let i = firstAfter(track, row, view.from / quantum); i < track.first[row + 1]; i++) {
      const x0 = Math.max(LEFT, xOf(track.starts[i] * quantum)), x1 = Math.min(canvas.clientWidth, xOf(track.ends[i] * quantum));
      if (x0 >= canvas.clientWidth) break;
      const number = track.microbatches[i];
      if (lit !== null && number === lit) {
        context.strokeStyle = colours.ink.text;
        context.lineWidth = 2;
        context.strokeRect(x0 + 0.5, middle - high / 2 + 1, Math.max(1, x1 - x0 - 2), high - 3);
      }
      if (number < 0 || x1 - x0 < 8 + 7 * String(number).length) continue;
      const [r, g, b] = (colours.kinds[track.kinds[i]] || colours.soft).rgb;
      context.fillStyle = 0.299 * r + 0.587 * g + 0.114 * b > 125 ? "#10151c" : "#ffffff";
      context.fillText(String(number), (x0 + x1) / 2, middle + 0.5);
    }
  }

  function format(seconds) {
    const [factor, unit] = [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]].find(([f]) => Math.abs(seconds) >= 0.9995 * f) || [1e-9, "ns"];
    return seconds === 0 ? "0 s" : `${(seconds / factor).toPrecision(3)} ${unit}`;
  }

  function drawAxis(height) {
    const width = canvas.clientWidth, room = Math.max(2, Math.floor((width - LEFT) / 110));
    const rough = (view.to - view.from) / room, power = 10 ** Math.floor(Math.log10(rough));
    const tick = power * [1, 2, 5, 10].find((f) => f * power >= rough);
    const unit = tick * room >= 1 ? [1, "s"] : tick * room >= 1e-3 ? [1e-3, "ms"] : tick * room >= 1e-6 ? [1e-6, "µs"] : [1e-9, "ns"];
    const digits = Math.max(0, -Math.floor(Math.log10(tick / unit[0]) + 1e-9));
    context.font = "12px system-ui, sans-serif";
    context.textBaseline = "alphabetic";
    for (let i = Math.ceil(view.from / tick); i * tick <= view.to; i++) {
      const x = Math.round(xOf(i * tick)) + 0.5, text = `${(i * tick / unit[0]).toFixed(digits)} ${unit[1]}`;
      context.strokeStyle = colours.line.text;
      context.lineWidth = 1;
      context.beginPath();
      context.moveTo(x, height - AXIS);
      context.lineTo(x, height - AXIS + 5);
      context.stroke();
      context.fillStyle = colours.soft.text;
      const half = context.measureText(text).width / 2;
      context.textAlign = x + half > width ? "right" : "center";
      context.fillText(text, Math.min(x, width), height - 6);
    }
  }

  function drawTitle(panel) {
    context.textBaseline = "alphabetic";
    context.textAlign = "left";
    context.font = "600 13px system-ui, sans-serif";
    context.fillStyle = colours.ink.text;
    context.fillText(panel.title, LEFT, panel.y - 9);
    const x = LEFT + context.measureText(panel.title).width + 12;
    context.font = "12.5px system-ui, sans-serif";
    context.fillStyle = colours.soft.text;
    const skipped = Math.round((view.bottom - view.top) / (panel.height * (window.devicePixelRatio || 1)));
    context.fillText(panel.note + (skipped > 1 ? `; one row in ${skipped} fits: zoom in to ranks for all` : ""), x, panel.y - 9);
  }

  function drawStepEnd(panel) {
    const x = Math.round(xOf(panel.step));
    if (x <= LEFT || x > canvas.clientWidth) return;
    context.fillStyle = colours.ink.text;
    context.fillRect(Math.min(x, canvas.clientWidth - 2), panel.y - 4, 2, panel.height + 8);
  }

  function draw() {
    pending = false;
    const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth;
    const high = Math.min(MAX_PANEL, Math.max(ROW, rows * ROW)), height = 2 * (TITLE + high) + GAP + AXIS;
    canvas.style.height = `${height}px`;
    if (canvas.width !== Math.round(width * ratio)) canvas.width = Math.round(width * ratio);
    if (canvas.height !== Math.round(height * ratio)) canvas.height = Math.round(height * ratio);
    panels[0].y = TITLE;
    panels[1].y = 2 * TITLE + high + GAP;
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.fillStyle = colours.card.text;
    context.fillRect(0, 0, canvas.width, canvas.height);
    for (const panel of panels) {
      panel.height = high;
      drawRows(panel, ratio);
    }
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    for (const panel of panels) {
      drawLabels(panel);
      drawTitle(panel);
      drawStepEnd(panel);
    }
    drawAxis(height);
  }

  function redraw() {
    if (!pending) requestAnimationFrame(draw);
    pending = true;
  }

  // Keeps a window of a given length inside [least, most].
  function within(from, to, least, most, shortest) {
    const length = Math.min(most - least, Math.max(shortest, to - from));
    const start = Math.min(most - length, Math.max(least, (from + to - length) / 2));
    return [start, start + length];
  }

  function look(from, to, top = view.top, bottom = view.bottom) {
    [view.from, view.to] = within(from, to, 0, end, end / 2e4);
    [view.top, view.bottom] = within(top, bottom, 0, rows, Math.min(rows, 2));
    redraw();
  }

  function zoom(factor, time = (view.from + view.to) / 2) {
    look(time - (time - view.from) * factor, time + (view.to - time) * factor);
  }

  function zoomRanks(factor, row = (view.top + view.bottom) / 2) {
    look(view.from, view.to, row - (row - view.top) * factor, row + (view.bottom - row) * factor);
  }

  function pan(share, rowShare = 0) {
    const dx = share * (view.to - view.from), dy = rowShare * (view.bottom - view.top);
    // Moves as far as the ends allow: a pan must never change the zoom.
    const x = Math.min(end - view.to, Math.max(-view.from, dx)), y = Math.min(rows - view.bottom, Math.max(-view.top, dy));
    look(view.from + x, view.to + x, view.top + y, view.bottom + y);
  }

  function under(event) {
    const box = canvas.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
    const panel = panels.find((p) => y >= p.y && y < p.y + p.height);
    const time = view.from + (x - LEFT) / (canvas.clientWidth - LEFT) * (view.to - view.from);
    const row = panel ? Math.min(rows - 1, Math.floor(view.top + (y - panel.y) / rowHeight(panel))) : -1;
    return { x, y, panel, time, row };
  }

  function find(at) {
    if (!at.panel || at.x < LEFT) return null;
    for (const track of at.panel.tracks) {
      const i = firstAfter(track, at.row, at.time / quantum);
      if (i < track.first[at.row + 1] && track.starts[i] * quantum <= at.time) {
        return { track, i, microbatch: track.ops ? track.microbatches[i] : -1 };
      }
    }
    return null;
  }

  function describe(at, found) {
    const { track, i } = found, from = track.starts[i] * quantum, to = track.ends[i] * quantum;
    let what = track.ops ? facts.kinds[track.kinds[i]] || "other work" : `idle: ${facts.places[track.kinds[i]][1]}`;
    if (track.ops && track.microbatches[i] >= 0) what += `, microbatch ${track.microbatches[i]}`;
    if (track.ops && track.stages[i] >= 0) what += `, stage ${track.stages[i]}`;
    const host = facts.hosts[at.row];
    return [what, `${format(to - from)}, from ${format(from)} to ${format(to)}`, `rank ${facts.ranks[at.row]}${host ? ` on ${host}` : ""}`];
  }

  function point(event) {
    const at = under(event), found = find(at), lit = found ? found.microbatch : -1;
    if (lit !== (hover ? hover.microbatch : -1)) redraw();
    hover = found;
    tip.hidden = !found;
    if (!found) return;
    tip.replaceChildren(...describe(at, found).map((text) => {
      const line = document.createElement("div");
      line.textContent = text;
      return line;
    }));
    tip.style.left = `${Math.max(0, Math.min(at.x + 14, canvas.clientWidth - tip.offsetWidth))}px`;
    tip.style.top = `${at.y + 18}px`;
  }

  const KEYS = {
    ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2), ArrowUp: () => pan(0, -0.2), ArrowDown: () => pan(0, 0.2),
    "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6), 0: () => look(0, end, 0, rows),
    Home: () => look(0, end, 0, rows), PageUp: () => zoomRanks(0.6), PageDown: () => zoomRanks(1 / 0.6),
  };

  function listen() {
    let grip = null;
    canvas.addEventListener("pointerdown", (event) => {
      grip = event;
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (grip) {
        pan((grip.clientX - event.clientX) / (canvas.clientWidth - LEFT), (grip.clientY - event.clientY) / panels[0].height);
        grip = event;
      }
      point(event);
    });
    canvas.addEventListener("pointerup", () => { grip = null; });
    canvas.addEventListener("pointercancel", () => { grip = null; });
    canvas.addEventListener("pointerleave", () => { tip.hidden = true; if (hover) redraw(); hover = null; });
    canvas.addEventListener("dblclick", (event) => zoom(0.4, under(event).time));
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey && !event.shiftKey) return; // the page scrolls
      event.preventDefault();
      const at = under(event), factor = 1.0015 ** (event.deltaY || event.deltaX);
      if (event.shiftKey && at.row >= 0) zoomRanks(factor, view.top + (at.y - at.panel.y) / rowHeight(at.panel));
      else if (!event.shiftKey) zoom(factor, Math.max(view.from, at.time));
    }, { passive: false });
    canvas.addEventListener("keydown", (event) => {
      if (!KEYS[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      KEYS[event.key]();
    });
    document.getElementById("zoom-in").addEventListener("click", () => zoom(0.6));
    document.getElementById("zoom-out").addEventListener("click", () => zoom(1 / 0.6));
    document.getElementById("zoom-all").addEventListener("click", () => look(0, end, 0, rows));
    new ResizeObserver(redraw).observe(canvas.parentElement);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readColours(); redraw(); });
    const print = (on) => {
      document.documentElement.classList.toggle("print", on);
      if (on) document.querySelectorAll("details").forEach((part) => { part.open = true; });
      readColours();
      draw();
    };
    addEventListener("beforeprint", () => print(true));
    addEventListener("afterprint", () => print(false));
  }

  async function start() {
    const [measured, idle, equal] = await unpack();
    readColours();
    panels = [
      { title: "As measured", note: `${format(facts.step_s)} a step`, step: facts.step_s, tracks: [measured, idle], ground: "track" },
      { title: "Equal work", note: `${format(facts.equal_work_step_s)}; what is idle here is the bubble`, step: facts.equal_work_step_s, tracks: [equal], ground: "bubble" },
    ];
    draw();
    listen();
    document.documentElement.dataset.timeline = "drawn";
    performance.mark("timeline drawn");
  }

  start().catch((error) => {
    const place = document.getElementById("timeline-error");
    place.hidden = false;
    place.textContent = `The timeline could not be drawn: ${error}`;
    document.documentElement.dataset.timeline = "failed";
  });
})();
