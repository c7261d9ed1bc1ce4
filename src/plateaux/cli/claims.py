"""The command `plateaux claims`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from plateaux.cli.common import AsJson, print_result
from plateaux.storage.atomic import write_atomic

if TYPE_CHECKING:
    from rich.table import Table

    from plateaux.studies.claims.claim import ClaimEntry


def claims(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[CLAIM]...", help="Numbers or names; by default all.")
    ] = None,
    run_studies: Annotated[
        bool, typer.Option("--run-studies", help="Run the studies that test the claims, and store the evidence.")
    ] = False,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write a page, such as claims.md.")] = None,
    workdir: Annotated[Path, typer.Option(help="The folder that the studies run in.")] = Path("runs/claims"),
    evidence: Annotated[
        Path | None, typer.Option(help="The folder of the evidence; by default claims/evidence.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the claims of the papers with the verdicts of our studies; run the studies; write the page.

    In Python: `from plateaux.studies.claims.claim import read_entries; read_entries()`
    """
    from plateaux.studies.claims.claim import ClaimEntry, claims_dir, read_claims, read_evidence, select_claims
    from plateaux.studies.claims.evidence import gather
    from plateaux.studies.claims.page import page
    from plateaux.studies.results import results_from_study

    known = select_claims(read_claims(), names or [])
    where = evidence or claims_dir() / "evidence"
    if run_studies:
        gather(known, workdir, where, claims_dir().parent, read=results_from_study)
    entries = [ClaimEntry(claim, read_evidence(claim, where)) for claim in known]
    if out is not None:
        write_atomic(out, page(entries))
    last = [f"written to {out}"] if out else []
    print_result(as_json, [each.to_dict() for each in entries], lambda: [table(entries), *last])


def table(entries: Sequence["ClaimEntry"]) -> "Table":
    """Return the table of claims: one row for every case of every claim."""
    from rich.table import Table

    from plateaux.studies.claims.page import format_values

    shown = Table("claim", "what it says", "case", "the paper's effect", "here (95 % interval)", "verdict")
    for each in entries:
        cases = each.evidence.cases if each.evidence else {}
        effect = "" if each.claim.primary.effect is None else f"{each.claim.primary.effect:g}"
        for at, (case, verdict) in enumerate(each.verdicts.items()):
            number, words = (str(each.claim.number), each.claim.statement) if at == 0 else ("", "")
            ours = format_values(cases[case].primary, each.claim.primary.unit) if case in cases else ""
            shown.add_row(number, words, case, effect, ours, verdict)
    return shown
