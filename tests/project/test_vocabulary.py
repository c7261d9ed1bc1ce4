"""Words that the project no longer uses: retired identifiers and phrases do not come back.

The lists hold words without other meanings in this field. Frozen seed labels (strings passed to `derive_seed`) keep
their old text, because they determine every random number.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "plateaux"
SOURCES = [*sorted(PACKAGE.rglob("*.py")), *sorted((ROOT / "benchmarks").glob("*.py"))]

RETIRED_NAMES = """
Ask Book Bucket CarryOut Chapter Chosen Conduct Course Crew Drawing Edge Feed Finding Given Grid Ground Hand
Headed Heard Keeper Learner Measure Measurement Meeting Moment Needs Pace Panel Planned Reckoned Rendezvous Resident
Runner Said Say Scene Seen Sheet Shelf Sign Slot Streamed Tally Tell Way absent adopt alarm alarms answers_of
as_trained asks awake bagging bell carry_out careful cast casts choose_members climb colour colours convention
counted crew descend determining doubt doubts findings fresh given go_on ground guess guesses guest guests hear
hear_all heard is_first judge keyed learner learners ledger lender lends load_chosen look_up manner meeting meetings
mixing neighbourhood news normalise nothing_given offer offers panel parked parking place_among posed pour pulse
reckoning reestimate regularise regulariser rehearsed rescaled samplewise say settle settle_in settled span
span_from stand_at stop_sign strangers sweep synchronise take_notes told told_apart trunk turns unlabelled views
wandering wants write_whole
"""
RETIRED = frozenset(RETIRED_NAMES.split())
PHRASES = (
    r"no number",
    r"in the hands of",
    r"would flatter",
    r"asks once",
    r"careful about",
    r"cannot be stacked",
    r"settles? together",
    r"comes? along",
    r"\bso many\b",
    r"a stranger's",
    r"samples of elsewhere",
    r"strange samples",
    r"by chance",
    r"told apart",
    r"machine chose",
    r"\bnobody\b",
    r"\beverybody\b",
    r"\bbegun again\b",
    r"\blearners?\b",
    r"\btrunk\b",
    r"\bunlabelled\b",
    r"\bnormalis",
    r"\bregularis",
    r"\bneighbourhood",
    r"\bcolou?rs?\b(?<!color)(?<!colors)",
)
FROZEN = {  # seed labels, and the names that seeds of a search are derived from
    ("config/builders/data.py", "unlabelled"),
    ("config/search_space.py", "unlabelled"),
    ("config/search_space.py", "regularis"),
    ("data/loader.py", "unlabelled"),
}


def retired_identifiers(source: str) -> Iterator[str]:
    """Yield the retired names among all names, attributes, parameters, and keywords of a source."""
    for node in ast.walk(ast.parse(source)):
        name = {
            ast.Name: "id", ast.Attribute: "attr", ast.arg: "arg", ast.keyword: "arg", ast.FunctionDef: "name",
            ast.ClassDef: "name", ast.alias: "asname",
        }.get(type(node))  # fmt: skip
        value = getattr(node, name) if name else None
        if value and value.strip("_") in RETIRED:
            yield f"line {getattr(node, 'lineno', 0)}: {value}"


def retired_phrases(source: str) -> Iterator[tuple[int, str]]:
    """Yield the retired phrases in strings and comments, with their lines."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.STRING, tokenize.COMMENT):
            for phrase in PHRASES:
                for match in re.finditer(phrase, token.string, re.IGNORECASE):
                    yield token.start[0], match[0]


def test_no_source_uses_a_retired_identifier() -> None:
    found = {str(file.relative_to(ROOT)): list(retired_identifiers(file.read_text("utf-8"))) for file in SOURCES}
    assert {file: names for file, names in found.items() if names} == {}


def test_no_text_in_the_sources_uses_a_retired_phrase() -> None:
    found = []
    for file in SOURCES:
        name = file.relative_to(PACKAGE if file.is_relative_to(PACKAGE) else ROOT).as_posix()
        for line, phrase in retired_phrases(file.read_text("utf-8")):
            if (name, phrase.lower()) not in FROZEN:
                found.append(f"{name}:{line}: {phrase}")
    assert found == []


@pytest.mark.parametrize(
    "source", ["learner = 1\n", "def f(*, tell_me, casts): ...\n", "x.settle()\n", "f(given=1)\n", "class Panel: ...\n"]
)
def test_a_retired_identifier_is_found(source: str) -> None:
    assert len(list(retired_identifiers(source))) == 1


def test_a_retired_phrase_is_found_in_strings_and_comments() -> None:
    source = 'x = "the loss is no number"  # told apart by chance\n'
    assert [phrase for _, phrase in retired_phrases(source)] == ["no number", "by chance", "told apart"]
