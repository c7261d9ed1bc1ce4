"""The model card of a bundle, `README.md`: what the model takes and returns, what was measured, and its limits.

Everything in it comes from the manifest. Names and texts are escaped: they may come from anyone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from plateaux.core.formatting import escape_markdown
from plateaux.core.text_table import Table
from plateaux.deploy.manifest import CalibrationRecord, CascadeRecord, Manifest

MAX_CLASSES = 50  # that are listed
USE = """```python
import plateaux  # pip install "plateaux[onnx]"

predictor = plateaux.load_predictor("BUNDLE")  # this folder
print(predictor({example}).to_records())
```

To serve it over HTTP: `plateaux serve BUNDLE` (`pip install "plateaux[serve]"`). Every file is checked at load.
"""
ANSWERS = {
    "probability": "of the predicted class, and of every class",
    "entropy": "of the probabilities, in nats: total uncertainty",
    "mutual_information": "disagreement of the members, in nats",
    "ood_score": "larger for inputs that are unlike the training data",
    "is_ood": "whether the OOD score is above the threshold of the alarm",
    "prediction_set": "the classes that cannot be excluded",
    "abstain": "whether the answer should not be used",
    "members_queried": "how many members the cascade needed",
}


def model_card(manifest: Manifest) -> str:
    """Return the model card as Markdown, with the header that the Hugging Face Hub reads."""
    return "\n".join(_lines(manifest)).rstrip() + "\n"


def _lines(manifest: Manifest) -> Iterator[str]:
    yield from _header(manifest)
    contract, count = manifest.contract, len(manifest.members)
    yield from ("", "# Deep ensemble for classification", "")
    members = f"{count} networks" if count > 1 else "One network"
    calibrated = "calibrated" if manifest.calibration is not None else "not calibrated"
    version = escape_markdown(manifest.plateaux)
    yield f"{members}, {contract.classes} classes, {calibrated}. Written by Plateaux {version}."
    yield from ("", "## How to use it", "", USE.format(example=_example(manifest)))
    yield from ("## Inputs", "", f"Expected: {escape_markdown(contract.describe())}.", "")
    if contract.labels:
        names = ", ".join(map(escape_markdown, contract.labels[:MAX_CLASSES]))
        yield from (f"Classes: {names}{', ...' if contract.classes > MAX_CLASSES else ''}.", "")
    schema = json.dumps(contract.to_json_schema()).replace("`", "\\u0060")  # a fence would end the block
    yield from ("JSON Schema of a request to the service:", "", "```json", schema, "```", "")
    has = {output.name for output in manifest.outputs}
    answers = Table.from_text("Answers", ["answer", "meaning"], _answer_rows(manifest, has))
    yield answers.to_markdown("##", text_columns=["meaning"])
    yield from ("## Intended use", "")
    yield from (escape_markdown(manifest.intended_use) or "Not stated by whoever exported the model.", "")
    yield from ("## Measured", "", *_measured(manifest))
    yield from ("## Limits", "", *(f"- {limit}" for limit in _limits(manifest)), "")
    yield from ("## License of the weights", "", escape_markdown(manifest.license) or "Not stated.")


def _header(manifest: Manifest) -> Iterator[str]:
    yield "---"
    yield "library_name: plateaux"
    if manifest.license:
        yield f"license: {json.dumps(manifest.license.lower())}"  # a JSON string is also one of YAML
    if manifest.contract.is_image:
        yield "pipeline_tag: image-classification"
    elif manifest.contract.preprocessing.tokenizer is not None:
        yield "pipeline_tag: text-classification"
    yield "tags: [deep-ensemble, uncertainty, out-of-distribution-detection, onnx]"
    yield "---"


def _example(manifest: Manifest) -> str:
    contract = manifest.contract
    example = contract.example()
    if example is not None:
        return json.dumps(example)
    return '"image.jpg"' if contract.is_image else "x"


def _answer_rows(manifest: Manifest, has: set[str]) -> list[list[str]]:
    rows = [[name, meaning] for name, meaning in ANSWERS.items() if name in has]
    return [[name, f"{meaning} ({manifest.ood_score})" if name == "ood_score" else meaning] for name, meaning in rows]


def _measured(manifest: Manifest) -> Iterator[str]:
    if not manifest.measured:
        yield from ("Nothing was measured before the export. `plateaux evaluate RUN` measures, then export again.", "")
    else:
        rows = [
            [
                f"{each.metric}, {each.row}",
                f"{each.value:.4g}" + ("" if each.stderr is None else f" ± {each.stderr:.2g}"),
                f"{each.data} ({each.split}{'' if each.samples is None else f', {each.samples:,} samples'})",
            ]
            for each in manifest.measured
        ]
        results = Table.from_text("Results", ["metric", "value ± standard error", "data"], rows)
        yield results.to_markdown("###", text_columns=["data"])
    for check in manifest.checks:
        yield (
            f"The graph in `{escape_markdown(check.file)}` differs from the networks in PyTorch by at most "
            f"{check.max_difference:.1g} in any probability ({escape_markdown(check.inputs)})."
        )
    if manifest.checks:
        yield ""


def _limits(manifest: Manifest) -> Iterator[str]:
    yield "The measured numbers hold for data like those they were measured on, and not under distribution shift."
    yield "The OOD score is not a probability. How many out-of-distribution inputs it detects is not guaranteed."
    if manifest.calibration is None:  # the remark of the manifest says the same
        yield "The model is not calibrated: it has no prediction sets, no abstention, and no OOD alarm."
    else:
        yield from _calibration_limits(manifest.calibration)
        if manifest.remark:
            yield _sentence(escape_markdown(manifest.remark))
    if manifest.cascade is not None and manifest.cascade.threshold is not None:
        yield _cascade_limit(manifest.cascade, len(manifest.members))


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."


def _calibration_limits(calibration: CalibrationRecord) -> Iterator[str]:
    fitted = f"fitted on {calibration.samples:,} {escape_markdown(calibration.split)} samples"
    if calibration.sets is not None and calibration.sets.threshold is None:
        yield f"Every prediction set contains all classes: there were too few samples for smaller ones ({fitted})."
    elif calibration.sets is not None:
        level = f"{100 * (1 - calibration.sets.alpha):g} %"
        yield f"Prediction sets contain the label of {level} of new samples like those ({fitted}), on average."
    if calibration.alarm.threshold is not None:
        yield f"The OOD alarm has {calibration.alarm.describe()} for new samples like those ({fitted})."
    limit = calibration.max_error_probability
    if limit is not None and limit < 0:  # an error probability is at least 0
        yield f"The model abstains from every answer: no threshold reaches the target risk ({fitted})."
    elif limit is not None:
        yield f"The model abstains where its error probability is above {limit:.4g} ({fitted})."


def _cascade_limit(cascade: CascadeRecord, members: int) -> str:
    loss = "lose a correct prediction" if cascade.kind == "harm" else "get another prediction"
    return (
        f"A cascade queries {cascade.queried:.2f} of {members} networks on average. With confidence "
        f"{cascade.confidence:g}, at most {100 * cascade.max_harm:g} % of samples like the {cascade.samples:,} it was "
        f"fitted on {loss}. This does not hold under distribution shift or for out-of-distribution inputs."
    )
