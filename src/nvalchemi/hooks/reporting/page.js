"use strict";
(() => {
  const report = JSON.parse(document.getElementById("data").textContent);
  const root = document.getElementById("report");
  const SVG = "http://www.w3.org/2000/svg";

  // ---------------------------------------------------------------- elements; text is always set as text
  function add(parent, tag, attributes = {}, text = null) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    if (text !== null) element.textContent = text;
    parent.append(element);
    return element;
  }
  function draw(parent, tag, attributes = {}, text = null) {
    const element = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    if (text !== null) element.textContent = text;
    parent.append(element);
    return element;
  }

  // ---------------------------------------------------------------- numbers
  function number(value, digits = 4) {
    if (value === null || value === undefined) return "–";
    if (typeof value !== "number") return String(value);
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (Number.isInteger(value) && size < 1e7) return minus(value.toLocaleString("en-US"));
    if (size >= 1e6 || size < 1e-4) {
      const [mantissa, exponent] = value.toExponential(Math.min(digits - 1, 2)).split("e");
      return minus(mantissa) + "·10" + superscript(exponent);
    }
    return minus(value.toLocaleString("en-US", { maximumSignificantDigits: digits }));
  }
  const minus = (text) => text.replace("-", "−");
  const superscript = (text) => [...String(Number(text))].map((c) => (c === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[c])).join("");
  function duration(seconds) {
    const s = Math.round(seconds);
    if (seconds < 10) return seconds.toFixed(1) + " s";
    if (s < 60) return s + " s";
    if (s < 3600) return Math.floor(s / 60) + " min " + String(s % 60).padStart(2, "0") + " s";
    if (s < 86400) return Math.floor(s / 3600) + " h " + String(Math.floor((s % 3600) / 60)).padStart(2, "0") + " min";
    return Math.floor(s / 86400) + " d " + String(Math.floor((s % 86400) / 3600)).padStart(2, "0") + " h";
  }

  // ---------------------------------------------------------------- top of the page
  function top() {
    const status = report.status;
    const header = add(root, "header");
    add(header, "h1", {}, report.title);
    const badge = add(header, "span", { class: "badge " + (status.warn ? "warn" : status.state.split(/[ :]/)[0]), role: "status" }, status.state);
    const words = ["ran for " + duration(status.elapsed_s)];
    if (status.eta_s !== null) words.push("about " + duration(status.eta_s) + " left");
    words.push("written " + status.written);
    const p = status.progress;
    const units = p && p.unit + (p.unit.endsWith("ch") ? "es" : "s");
    if (p) words.unshift(number(p.done) + (p.total ? " of " + number(p.total) : "") + " " + units);
    if (p && p.total && status.state === "running") {
      const share = Math.min(100, (100 * p.done) / p.total);
      const bar = add(root, "div", {
        class: "bar", role: "progressbar", "aria-valuemin": 0, "aria-valuemax": p.total, "aria-valuenow": p.done, "aria-label": "progress",
      });
      add(bar, "div", { style: "width:" + share + "%" });
    }
    const line = add(root, "div", { class: "sub" }, words.join(" · "));
    if (status.state === "running") {
      line.append(" · ");
      const button = add(line, "button", { "aria-pressed": "true" }, "reloads every 10 s");
      const pressed = () => button.getAttribute("aria-pressed") === "true";
      button.addEventListener("click", () => button.setAttribute("aria-pressed", !pressed()));
      // A run that was killed cannot say so: its page only gets no newer.
      const silence = () => Date.now() / 1000 - status.written_unix;
      const quiet = add(root, "div", { class: "sub" });
      const look = () => {
        const long = silence() > status.quiet_s;
        badge.textContent = long ? "no news for " + duration(silence()) + ": stopped or killed?" : status.state;
        badge.className = "badge " + (long ? "warn" : "running");
        quiet.textContent = long
          ? "Last written " + status.written + ". If the process was killed, no more will come."
          : "Written anew every few seconds.";
      };
      look();
      if (silence() > 3600) button.setAttribute("aria-pressed", "false");
      setInterval(look, 1000);
      setInterval(() => pressed() && location.reload(), 10000);
    }
    if (status.remark) add(root, "div", { class: "sub" }, status.remark);
    if (status.error) add(root, "div", { class: "error", role: "alert" }, status.error);
    const tiles = add(root, "div", { class: "tiles" });
    for (const tile of report.tiles) {
      const card = add(tiles, "div", { class: "card tile" });
      add(card, "div", { class: "label" }, tile.label);
      const value = add(card, "div", { class: "value" }, number(tile.value, 3));
      if (tile.unit) value.append(" ");
      if (tile.unit) add(value, "span", { class: "unit" }, tile.unit);
      if (tile.note) add(card, "div", { class: "note" }, tile.note);
    }
  }

  // ---------------------------------------------------------------- axes
  function ticks(low, high, count) {
    const rough = (high - low) / count;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999);
    const found = [];
    for (let k = Math.ceil(low / step - 1e-9); k * step <= high + 1e-9 * step; k++) found.push(k * step || 0); // no negative zero
    return found;
  }
  function logTicks(low, high) {
    const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high)), found = [];
    const every = Math.max(1, Math.ceil((last - first) / 6));
    const parts = last - first <= 1 ? [1, 2, 3, 5] : last - first <= 2 ? [1, 3] : [1];
    for (let e = first; e <= last; e += every) for (const m of parts) {
      const value = m * 10 ** e;
      if (value >= low * 0.999 && value <= high * 1.001) found.push(value);
    }
    return found.length > 1 ? found : [low, high];
  }
  // Ticks of one axis get the same number of decimals.
  function tickLabels(values) {
    const step = Math.min(...values.slice(1).map((v, i) => Math.abs(v - values[i])));
    const largest = Math.max(...values.map(Math.abs));
    if (!Number.isFinite(step) || largest >= 1e6 || step < 1e-5) return values.map((v) => number(v, 3));
    const decimals = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    return values.map((v) => minus(v.toLocaleString("en-US", { minimumFractionDigits: decimals, maximumFractionDigits: decimals })));
  }

  // ---------------------------------------------------------------- charts
  function chart(parent, spec) {
    const card = add(parent, "section", { class: "card", "aria-label": spec.title });
    const head = add(card, "div", { class: "head" });
    add(head, "h3", {}, spec.title + (spec.y ? " / " + spec.y : ""));
    const positive = spec.series.every((s) => s.y.every((v) => v === null || v > 0));
    let logarithmic = Boolean(spec.log) && positive;
    if (positive) {
      const toggle = add(head, "button", { "aria-pressed": logarithmic }, "log");
      toggle.addEventListener("click", () => {
        logarithmic = !logarithmic;
        toggle.setAttribute("aria-pressed", logarithmic);
        redraw();
      });
    }
    const plot = add(card, "div", { class: "plot" });
    const hidden = new Set();
    const legend = add(card, "div", { class: "legend" });
    if (spec.target) {
      const words = add(legend, "span", { class: "unit" });
      add(words, "span", { class: "swatch dashes" });
      words.append("criterion " + number(spec.target) + " " + spec.y);
    }
    if (spec.series.length > 1) {
      spec.series.forEach((series, i) => {
        const button = add(legend, "button", { "aria-pressed": "true", title: series.name });
        add(button, "span", { class: "swatch", style: "background:" + colour(i) + (series.faint ? ";opacity:.4" : "") });
        button.append(series.name);
        button.addEventListener("click", () => {
          hidden.has(i) ? hidden.delete(i) : hidden.add(i);
          button.setAttribute("aria-pressed", !hidden.has(i));
          redraw();
        });
      });
    }
    if (spec.note) add(card, "p", { class: "note" }, spec.note);
    function redraw() {
      plot.textContent = "";
      drawChart(plot, spec, logarithmic, hidden);
    }
    onResize(plot, redraw);
  }
  const colour = (i) => "var(--c" + (i % 12) + ")";
  function onResize(element, redraw) {
    let width = element.clientWidth;
    redraw();
    new ResizeObserver(() => {
      if (element.clientWidth === width) return;
      width = element.clientWidth;
      requestAnimationFrame(redraw); // not while sizes are being observed
    }).observe(element);
  }

  function drawChart(plot, spec, logarithmic, hidden) {
    const width = Math.max(plot.clientWidth, 280), height = 260;
    const box = { left: 64, right: width - 12, top: 10, bottom: height - 40 };
    const shown = spec.series.map((series, i) => ({ ...series, i })).filter((s) => !hidden.has(s.i));
    const usable = (v) => v !== null && (!logarithmic || v > 0);
    let [xLow, xHigh] = extent(shown.flatMap((s) => s.x));
    const inside = shown.some((s) => !s.outside) ? shown.filter((s) => !s.outside) : shown;
    let [yLow, yHigh] = spec.range ?? extent(
      inside.flatMap((s) => [...s.y, ...(s.low ?? []), ...(s.high ?? [])]).filter(usable).concat(spec.target ? [spec.target] : []));
    const one = xLow === xHigh;
    if (one) [xLow, xHigh] = [xLow - 1, xHigh + 1];
    if (yLow === yHigh) {
      const room = logarithmic ? 0 : Math.abs(yLow) * 0.01 || 1;
      [yLow, yHigh] = logarithmic ? [yLow / 2, yHigh * 2] : [yLow - room, yHigh + room];
    } else if (!spec.range) {
      if (logarithmic) [yLow, yHigh] = [yLow / 1.15, yHigh * 1.15];
      else { const room = 0.04 * (yHigh - yLow); yLow -= room; yHigh += room; }
    }
    const f = logarithmic ? Math.log : (v) => v;
    const X = (v) => box.left + ((v - xLow) / (xHigh - xLow)) * (box.right - box.left);
    const Y = (v) => box.bottom - ((f(v) - f(yLow)) / (f(yHigh) - f(yLow))) * (box.bottom - box.top);
    const svg = draw(plot, "svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": summary(spec, shown) });
    axes(svg, box, spec.x, X, Y, one ? [xLow + 1] : xTicks(xLow, xHigh, width > 420 ? 6 : 4, spec.x), logarithmic ? logTicks(yLow, yHigh) : ticks(yLow, yHigh, 5), logarithmic);
    if (spec.target) {
      draw(svg, "line", { class: "target", x1: box.left, x2: box.right, y1: Y(spec.target), y2: Y(spec.target) });
    }
    clips += 1;
    const clip = draw(draw(svg, "clipPath", { id: "clip" + clips }), "rect", { x: box.left - 4, y: box.top - 3, width: box.right - box.left + 8, height: box.bottom - box.top + 6 });
    const lines = draw(svg, "g", { "clip-path": "url(#" + clip.parentNode.id + ")" });
    for (const series of shown) {
      const stroke = colour(series.i);
      if (series.low) {
        const up = series.x.map((x, k) => [x, series.high[k]]), down = series.x.map((x, k) => [x, series.low[k]]).reverse();
        const points = [...up, ...down].filter(([, y]) => usable(y)).map(([x, y]) => X(x).toFixed(1) + "," + Y(y).toFixed(1));
        draw(lines, "polygon", { points: points.join(" "), fill: stroke, opacity: 0.18 });
      }
      const line = path(series, X, Y, usable);
      draw(lines, "path", {
        d: line, fill: "none", stroke, "stroke-width": series.faint ? 1 : 1.8, "stroke-linejoin": "round",
        opacity: series.faint ? 0.3 : 1, ...(series.dashed ? { "stroke-dasharray": "4 3" } : {}),
      });
      if (series.points || series.x.length < 3)
        series.x.forEach((x, k) => usable(series.y[k]) && draw(lines, "circle", { cx: X(x), cy: Y(series.y[k]), r: 2.8, fill: stroke }));
    }
    hover(plot, svg, box, spec, shown, X, Y, usable);
  }
  let clips = 0;
  // Steps are counted: there are none between two.
  const xTicks = (low, high, count, label) => ticks(low, high, count).filter((v) => label !== "step" || Number.isInteger(v));
  function extent(values) {
    let low = Infinity, high = -Infinity;
    for (const v of values) if (v !== null) { if (v < low) low = v; if (v > high) high = v; }
    return low <= high ? [low, high] : [0, 1];
  }
  function path(series, X, Y, usable) {
    let d = "", pen = "M";
    series.x.forEach((x, k) => {
      if (!usable(series.y[k])) { pen = "M"; return; }
      d += pen + X(x).toFixed(1) + " " + Y(series.y[k]).toFixed(1);
      pen = "L";
    });
    return d;
  }
  function axes(svg, box, label, X, Y, xTicks, yTicks, logarithmic) {
    const xWords = tickLabels(xTicks), yWords = logarithmic ? yTicks.map((v) => number(v, 2)) : tickLabels(yTicks);
    yTicks.forEach((v, k) => {
      draw(svg, "line", { class: "grid", x1: box.left, x2: box.right, y1: Y(v), y2: Y(v) });
      draw(svg, "text", { x: box.left - 7, y: Y(v) + 4, "text-anchor": "end" }, yWords[k]);
    });
    xTicks.forEach((v, k) => {
      draw(svg, "line", { class: "grid", x1: X(v), x2: X(v), y1: box.top, y2: box.bottom });
      draw(svg, "text", { x: X(v), y: box.bottom + 17, "text-anchor": "middle" }, xWords[k]);
    });
    draw(svg, "line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom });
    draw(svg, "text", { x: (box.left + box.right) / 2, y: box.bottom + 34, "text-anchor": "middle" }, label);
  }
  function summary(spec, shown) {
    const last = shown.slice(0, 3).map((s) => s.name + " ends at " + number(s.y[s.y.length - 1]));
    return spec.title + " over " + spec.x + ": " + last.join(", ");
  }
  function hover(plot, svg, box, spec, shown, X, Y, usable) {
    const cursor = draw(svg, "line", { class: "cursor", y1: box.top, y2: box.bottom, visibility: "hidden" });
    const tip = add(plot, "div", { class: "tip", hidden: "" });
    svg.addEventListener("pointerleave", () => {
      tip.hidden = true;
      cursor.setAttribute("visibility", "hidden");
    });
    svg.addEventListener("pointermove", (event) => {
      const frame = svg.getBoundingClientRect(), scale = (box.right + 12) / frame.width;
      const at = (event.clientX - frame.left) * scale;
      const near = shown.filter((s) => s.x.length).map((s) => {
        let best = 0;
        s.x.forEach((x, k) => { if (usable(s.y[k]) && Math.abs(X(x) - at) < Math.abs(X(s.x[best]) - at)) best = k; });
        return { s, k: best };
      });
      if (!near.length) return;
      const anchor = near.reduce((a, b) => (Math.abs(X(a.s.x[a.k]) - at) <= Math.abs(X(b.s.x[b.k]) - at) ? a : b));
      const x = anchor.s.x[anchor.k];
      cursor.setAttribute("x1", X(x));
      cursor.setAttribute("x2", X(x));
      cursor.setAttribute("visibility", "visible");
      tip.textContent = "";
      add(tip, "div", { class: "unit" }, spec.x + " " + number(x, 5));
      for (const { s, k } of near.filter(({ s, k }) => Math.abs(X(s.x[k]) - X(x)) < 12)) {
        const row = add(tip, "div");
        add(row, "span", { class: "swatch", style: "background:" + colour(s.i) });
        row.append((shown.length > 1 ? s.name + "  " : "") + number(s.y[k], 5) + (spec.y ? " " + spec.y : ""));
      }
      tip.hidden = false;
      const left = X(x) / scale;
      tip.style.left = (left > frame.width / 2 ? left - tip.offsetWidth - 12 : left + 12) + "px";
      tip.style.top = "14px";
    });
  }

  function parity(parent, spec) {
    const card = add(parent, "section", { class: "card", "aria-label": spec.title });
    add(add(card, "div", { class: "head" }), "h3", {}, spec.title + " / " + spec.unit);
    const plot = add(card, "div", { class: "plot" });
    const shown = spec.x.length < spec.count ? ", " + number(spec.x.length) + " shown" : "";
    add(card, "p", { class: "note" },
      `Mean absolute error ${number(spec.mae)}, root mean square ${number(spec.rmse)} ${spec.error_unit}; ${number(spec.count)} values${shown}.`);
    onResize(plot, () => {
      plot.textContent = "";
      const width = Math.max(plot.clientWidth, 280), height = Math.min(width, 420);
      const box = { left: 62, right: width - 12, top: 10, bottom: height - 40 };
      let [low, high] = extent([...spec.x, ...spec.y]);
      const room = 0.04 * (high - low) || 1;
      low -= room;
      high += room;
      const X = (v) => box.left + ((v - low) / (high - low)) * (box.right - box.left);
      const Y = (v) => box.bottom - ((v - low) / (high - low)) * (box.bottom - box.top);
      const svg = draw(plot, "svg", {
        viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${spec.title}: prediction over reference, mean absolute error ${number(spec.mae)} ${spec.error_unit}`,
      });
      axes(svg, box, "reference", X, Y, ticks(low, high, 5), ticks(low, high, 5), false);
      draw(svg, "line", { class: "target", x1: X(low), y1: Y(low), x2: X(high), y2: Y(high) });
      spec.x.forEach((x, k) => spec.y[k] !== null && draw(svg, "circle", { cx: X(x).toFixed(1), cy: Y(spec.y[k]).toFixed(1), r: 2, fill: colour(0), opacity: 0.45 }));
      draw(svg, "text", { x: box.left + 8, y: box.top + 14 }, "prediction");
    });
  }

  // ---------------------------------------------------------------- the table of structures
  const PAGE = 50;
  const DIGITS = { eV: 4, "meV/atom": 2, "eV/Å": 4, "Å³": 2, "%": 2 };
  function structures(spec) {
    add(root, "h2", {}, "Structures");
    const card = add(root, "section", { class: "card", "aria-label": "Structures" });
    if (spec.note) add(card, "p", { class: "note" }, spec.note);
    const tools = add(card, "div", { class: "tools" });
    const search = add(tools, "input", { type: "search", placeholder: "Name, formula, status, reason", "aria-label": "Search structures" });
    const kinds = Object.entries(spec.counts);
    let only = null;
    if (kinds.length > 1)
      for (const [status, count] of kinds) {
        const button = add(tools, "button", { "aria-pressed": "false" }, status + " " + number(count));
        button.addEventListener("click", () => {
          only = only === status ? null : status;
          for (const other of tools.querySelectorAll("button[aria-pressed]")) other.setAttribute("aria-pressed", other === button && only !== null);
          show(0);
        });
      }
    add(tools, "span", { class: "grow" });
    const back = add(tools, "button", { "aria-label": "previous page" }, "‹");
    const where = add(tools, "span", { class: "unit", "aria-live": "polite" });
    const on = add(tools, "button", { "aria-label": "next page" }, "›");
    const table = add(add(card, "div", { class: "scroll" }), "table", { id: "structures" });
    const headings = add(add(table, "thead"), "tr");
    const body = add(table, "tbody");
    const rows = spec.rows.map((cells, k) => ({ cells, reason: spec.reasons[k], text: [...cells, spec.reasons[k]].filter((c) => typeof c === "string").join(" ").toLowerCase() }));
    const numeric = spec.columns.map((_, c) => rows.every((r) => r.cells[c] === null || typeof r.cells[c] === "number"));
    let first = 0, order = null;
    spec.columns.forEach((column, c) => {
      const th = add(headings, "th", { scope: "col", class: numeric[c] ? "num" : "", "aria-sort": "none" });
      const button = add(th, "button", {}, column.name);
      add(th, "span", { class: "unit" }, column.unit ?? "");
      button.addEventListener("click", () => {
        const down = th.getAttribute("aria-sort") === "ascending";
        for (const other of headings.children) other.setAttribute("aria-sort", "none");
        th.setAttribute("aria-sort", down ? "descending" : "ascending");
        order = (a, b) => compare(a.cells[c], b.cells[c], down ? -1 : 1);
        show(0);
      });
    });
    // What is not known comes last in either direction.
    function compare(a, b, sign) {
      if (a === null || b === null) return (a === null) - (b === null);
      return sign * (typeof a === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true }));
    }
    function show(start) {
      const word = search.value.toLowerCase();
      let found = rows.filter((r) => (only === null || r.cells[spec.status_column] === only) && r.text.includes(word));
      if (order) found = [...found].sort(order);
      first = Math.max(0, Math.min(start, found.length - 1));
      body.textContent = "";
      for (const row of found.slice(first, first + PAGE)) {
        const tr = add(body, "tr");
        row.cells.forEach((cell, c) => {
          const digits = DIGITS[spec.columns[c].unit];
          const text = typeof cell !== "number" || digits === undefined ? number(cell) : fixed(cell, digits);
          const td = add(tr, "td", { class: numeric[c] ? "num" : c === spec.status_column ? "" : "text " + spec.columns[c].name }, c === spec.status_column ? null : text);
          if (c === spec.status_column) {
            add(td, "span", { class: cell.split(" ")[0] }, cell);
            if (row.reason) add(td, "span", { class: "reason" }, row.reason);
          }
        });
      }
      const shown = Math.min(first + PAGE, found.length);
      where.textContent = found.length ? `${first + 1}–${shown} of ${number(found.length)}` : "none";
      if (rows.length < spec.total) where.textContent += ` (${number(spec.total)} in all; those that need a look first)`;
      back.disabled = first === 0;
      on.disabled = shown >= found.length;
    }
    const fixed = (v, digits) => (Math.abs(v) >= 1e7 || (v !== 0 && Math.abs(v) < 0.5 * 10 ** -digits) ? number(v, 2) : minus(v.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits })));
    search.addEventListener("input", () => show(0));
    back.addEventListener("click", () => show(first - PAGE));
    on.addEventListener("click", () => show(first + PAGE));
    show(0);
  }

  // ---------------------------------------------------------------- times, settings
  function meters(parent, title, note, rows) {
    const card = add(parent, "section", { class: "card", "aria-label": title });
    add(card, "h3", {}, title);
    add(card, "p", { class: "note" }, note);
    const body = add(add(add(card, "div", { class: "scroll" }), "table"), "tbody");
    for (const [name, words, value, share] of rows) {
      const tr = add(body, "tr"), cell = add(tr, "td", {}, words || name);
      if (words) cell.setAttribute("title", name);
      add(tr, "td", { class: "num" }, value);
      const bar = add(add(tr, "td", { style: "width:30%" }), "div", { class: "meter" });
      add(bar, "div", { style: "width:" + Math.min(100, share) + "%" });
      add(tr, "td", { class: "num" }, share.toFixed(1) + " %");
    }
  }
  function timing(spec) {
    add(root, "h2", {}, "Where the time goes");
    const two = add(root, "div", { class: "two" });
    meters(two, "Stages", `A step takes ${number(spec.step_ms)} ms, mean of the steps that were timed.`,
      spec.stages.filter((s) => s.share >= 0.2).map((s) => [s.name, s.words, number(s.ms, 3) + " ms", s.share]));
    if (spec.hooks.length)
      meters(two, "Hooks", "Share of the run so far, on the host.", spec.hooks.map((h) => [h.name, "", number(h.s, 3) + " s", h.share]));
  }
  function pairs(parent, title, rows) {
    if (!rows.length) return;
    const card = add(parent, "section", { class: "card", "aria-label": title });
    add(card, "h3", {}, title);
    const body = add(add(card, "table"), "tbody");
    for (const [name, value] of rows) {
      const tr = add(body, "tr");
      add(tr, "td", { class: "key" }, name);
      add(tr, "td", { class: "value-cell" }, value);
    }
  }

  top();
  if (report.charts.length) {
    add(root, "h2", {}, "Curves");
    const charts = add(root, "div", { class: "charts" });
    for (const spec of report.charts) chart(charts, spec);
  }
  if (report.parity.length) {
    add(root, "h2", {}, report.parity_title ?? "Prediction and reference");
    const plots = add(root, "div", { class: "charts" });
    for (const spec of report.parity) parity(plots, spec);
  }
  if (report.structures) structures(report.structures);
  if (report.timing) timing(report.timing);
  add(root, "h2", {}, "Settings and environment");
  const two = add(root, "div", { class: "two" });
  for (const section of report.settings) pairs(two, section.title, section.rows);
  pairs(two, "Environment", report.environment);
  add(root, "footer", {}, "Written by nvalchemi. This file loads nothing from anywhere.");
})();
