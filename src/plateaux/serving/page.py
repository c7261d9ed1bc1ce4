"""The page at `/`: what the model is, how well it does, and a form to try an image."""

from __future__ import annotations

import base64
import hashlib
import json
import shlex
from html import escape
from typing import Any

from plateaux.deploy.manifest import Manifest
from plateaux.prediction.predictor import Predictor
from plateaux.serving.settings import ServeSettings

MAX_CLASSES = 12  # that are listed
STYLE = """
:root { color-scheme: light dark; --ink: #1d2430; --soft: #5b6675; --line: #d8dee6; --paper: #ffffff; --panel: #f5f7fa;
  --accent: #2459c4; --warn: #9a5b00; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6eaf0; --soft: #9aa6b5; --line: #38424f; --paper: #151a21;
  --panel: #1d242d; --accent: #8ab0ff; --warn: #ffc266; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 60rem; padding: 1.5rem 1rem 4rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin: 0 0 .25rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p { margin: .25rem 0 .75rem; } .soft { color: var(--soft); } .warn { color: var(--warn); }
.panel { background: var(--panel); border: 1px solid var(--line); border-radius: 8px; padding: 1rem; }
table { border-collapse: collapse; width: 100%; } td, th { text-align: left; padding: .35rem .5rem;
  border-bottom: 1px solid var(--line); vertical-align: top; } th { font-weight: 600; color: var(--soft); width: 40%; }
code, pre { font: 13px/1.45 ui-monospace, monospace; } pre { overflow-x: auto; margin: 0; white-space: pre; }
input, button { font: inherit; max-width: 100%; } button { padding: .4rem 1rem; border-radius: 6px; cursor: pointer;
  border: 1px solid var(--accent); background: var(--accent); color: var(--paper); }
.bar { height: .6rem; background: var(--accent); border-radius: 3px; min-width: 1px; }
#preview { max-width: 8rem; max-height: 8rem; display: block; margin: .75rem 0; border-radius: 4px; }
#preview[hidden] { display: none; } label { display: inline-block; margin: 0 .5rem .5rem 0; }
"""
SCRIPT = """
const form = document.getElementById("form"), out = document.getElementById("out");
const cell = (row, tag, text) => {
  const e = document.createElement(tag); e.textContent = text; row.append(e); return e; };
if (form) form.addEventListener("submit", async (event) => {
  event.preventDefault();
  const file = form.elements.file.files[0];
  if (!file) return;
  const preview = document.getElementById("preview");
  preview.src = URL.createObjectURL(file); preview.hidden = false;
  out.textContent = "";
  let answer;
  try {
    const key = form.elements.key ? form.elements.key.value : "";
    const headers = key ? {"Authorization": "Bearer " + key} : {};
    const response = await fetch("predict", {method: "POST", body: file, headers});
    answer = await response.json();
    if (!response.ok) throw new Error(answer.error);
  } catch (error) { const p = cell(out, "p", error.message); p.className = "warn"; return; }
  const found = answer.predictions[0], table = document.createElement("table");
  const rows = [["label", found.label_name], ["probability", found.probability.toFixed(4)],
    ["entropy (nats)", found.entropy.toFixed(4)], ["mutual information (nats)", found.mutual_information.toFixed(4)],
    ["OOD score", found.ood_score.toFixed(4)],
    ["out of distribution", found.is_ood === null ? "not available" : found.is_ood ? "yes" : "no"],
    ...("members_queried" in found ? [["members queried", found.members_queried]] : []),
    ["prediction set", found.prediction_set === null ? "not available" : found.prediction_set.join(", ") || "empty"],
    ["abstain", found.abstain === null ? "not available" : found.abstain ? "yes: do not use this answer" : "no"]];
  for (const [name, value] of rows) {
    const row = document.createElement("tr"); cell(row, "th", name); cell(row, "td", value); table.append(row); }
  out.append(table);
  const best = Object.entries(found.probabilities).sort((a, b) => b[1] - a[1]).slice(0, 5);
  const bars = document.createElement("table");
  for (const [name, p] of best) { const row = document.createElement("tr"); cell(row, "th", name);
    const td = cell(row, "td", ""), bar = document.createElement("div"); bar.className = "bar";
    bar.style.width = (100 * p).toFixed(1) + "%"; bar.title = p.toFixed(4); td.append(bar); bars.append(row); }
  cell(out, "h2", "Most likely classes"); out.append(bars);
});
"""


def render_page(
    manifest: Manifest, predictor: Predictor, settings: ServeSettings, *, needs_key: bool
) -> tuple[str, dict[str, str]]:
    """Return the page, and headers that allow no other scripts and styles than its own."""
    contract = predictor.contract
    names = ", ".join(predictor.class_names[:MAX_CLASSES]) + (", ..." if contract.classes > MAX_CLASSES else "")
    facts = {
        "inputs": contract.describe(),
        "classes": f"{contract.classes}: {names}",
        "members": str(len(manifest.members)),
        "calibrated": "yes" if predictor.calibrated else "no",
        **_cascade(manifest),
        **({"intended use": manifest.intended_use} if manifest.intended_use else {}),
        "OOD score": predictor.ood_score,
        "license": manifest.license or "not stated",
    }
    measured = _measured(manifest)
    key = '<label>API key <input type="password" name="key" autocomplete="off" required></label> '
    form = (
        '<form id="form" class="panel"><label>Image '
        '<input type="file" name="file" accept="image/*" required></label> '
        f'{key if needs_key else ""}<button>Predict</button><img id="preview" alt="The chosen image" hidden></form>'
        '<div id="out" aria-live="polite"></div>'
        if contract.is_image
        else "<p>This model takes no images; use the request below.</p>"
    )
    remark = f'<p class="warn">{escape(predictor.remark)}</p>' if predictor.remark else ""
    name = escape(settings.name)
    example = "..." if contract.example() is None else json.dumps([contract.example()])
    body = shlex.quote(f'{{"inputs": {example}}}')
    call = (
        "curl --data-binary @image.jpg -H 'Content-Type: image/jpeg' http://HOST/predict"
        if contract.is_image
        else f"curl -H 'Content-Type: application/json' -d {body} http://HOST/predict"
    )
    schema = json.dumps(contract.to_json_schema(), indent=1)
    page = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{name} - Plateaux</title><style>{STYLE}</style></head><body>
<h1>{name}</h1><p class="soft">A deep ensemble served by Plateaux, for classification.</p>{remark}
<h2>Try it</h2>{form}
<h2>Model</h2>{_table(facts)}
{"<h2>Measured</h2>" + _table(measured) if measured else ""}
<h2>Request</h2><div class="panel"><pre>{escape(call)}</pre></div>
<details><summary>JSON Schema of <code>/schema</code></summary><pre>{escape(schema)}</pre></details>
<p class="soft">Open Inference Protocol v2: <code>/v2/models/{name}/infer</code>. Metrics: <code>/metrics</code>.</p>
<script>{SCRIPT}</script></body></html>"""
    policy = (
        f"default-src 'none'; script-src '{_hash(SCRIPT)}'; style-src '{_hash(STYLE)}'; "
        "img-src blob:; connect-src 'self'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
    )
    return page, {"content-security-policy": policy, "x-content-type-options": "nosniff", "cache-control": "no-store"}


def _cascade(manifest: Manifest) -> dict[str, str]:
    cascade = manifest.cascade
    if cascade is None:
        return {}
    return {"members queried, mean": f"{cascade.queried:.2f} of {len(manifest.members)}, on calibration samples"}


def _measured(manifest: Manifest) -> dict[str, str]:
    """Return the measured numbers of the bundle, with the data they were measured on."""
    return {
        f"{each.metric}, {each.row}": f"{each.value:.4g}"
        + ("" if each.stderr is None else f" ± {each.stderr:.2g}")
        + f" on {each.data} ({each.split})"
        for each in manifest.measured
    }


def _table(rows: dict[str, Any]) -> str:
    cells = "".join(f"<tr><th>{escape(name)}</th><td>{escape(str(value))}</td></tr>" for name, value in rows.items())
    return f"<table>{cells}</table>"


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
