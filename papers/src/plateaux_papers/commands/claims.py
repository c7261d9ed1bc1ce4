"""The command `plateaux claims`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from plateaux.commands import AsJson, print_result, write_atomic
from plateaux.errors import RecipeError

if TYPE_CHECKING:
    from rich.table import Table

    from plateaux_papers.claims.claim import ClaimEntry


def claims(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[CLAIM]...", help="Numbers or names; by default all.")
    ] = None,
    study: Annotated[
        Path | None,
        typer.Option(help="Judge by the results in this folder of a finished study instead of the stored evidence."),
    ] = None,
    store: Annotated[Path | None, typer.Option(help="With --study: write the evidence to this folder.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write a page, such as claims.md.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the claims of the papers with the verdicts of our studies; write the page.

    In Python: `from plateaux_papers.claims.claim import read_entries; read_entries()`
    """
    from plateaux_papers.claims.claim import (
        ClaimEntry,
        evidence_folders,
        read_claims,
        read_evidence,
        select_claims,
        write_evidence,
    )
    from plateaux_papers.claims.evidence import evidence_from_study
    from plateaux_papers.claims.page import page

    if study is not None and not names:
        raise RecipeError("--study needs the claims that it is about, such as `plateaux claims 1 --study runs/mine`")
    if store is not None and study is None:
        raise RecipeError("--store writes the evidence of a study: give its folder with --study")
    known = select_claims(read_claims(), names or [])
    if study is None:
        entries = [ClaimEntry(claim, read_evidence(claim, evidence_folders())) for claim in known]
    else:
        measured = evidence_from_study(known, study)
        entries = [ClaimEntry(claim, evidence) for claim, evidence in zip(known, measured, strict=True)]
        if store is not None:
            for evidence in measured:
                write_evidence(evidence, store)
    if out is not None:
        write_atomic(out, page(entries))
    last = [f"written to {out}"] if out else []
    print_result(as_json, [each.to_dict() for each in entries], lambda: [table(entries), *last])


def table(entries: Sequence["ClaimEntry"]) -> "Table":
    """Return the table of claims: one row for every case of every claim."""
    from rich.table import Table

    from plateaux_papers.claims.page import format_values

    shown = Table("claim", "what it says", "case", "the paper's effect", "here (95 % interval)", "verdict")
    for each in entries:
        cases = each.evidence.cases if each.evidence else {}
        effect = "" if each.claim.primary.effect is None else f"{each.claim.primary.effect:g}"
        for at, (case, verdict) in enumerate(each.verdicts.items()):
            number, words = (str(each.claim.number), each.claim.statement) if at == 0 else ("", "")
            ours = format_values(cases[case].primary, each.claim.primary.unit) if case in cases else ""
            shown.add_row(number, words, case, effect, ours, verdict)
    return shown
