"""The commands `plateaux push` and `plateaux pull`: the only ones that send or fetch on their own."""

from typing import Annotated

import typer

import plateaux
from plateaux.cli.common import AsJson, Sha256, print_result, progress_bar


def push(
    bundle: Annotated[str, typer.Argument(metavar="BUNDLE", help="The folder or URL of a bundle.")],
    target: Annotated[str, typer.Argument(help="hf://user/name, a URL such as s3://bucket/name, or a folder.")],
    private: Annotated[bool, typer.Option("--private", help="Only push to a new or private repository.")] = False,
    as_json: AsJson = False,
) -> None:
    """Copy a bundle to the Hugging Face Hub, a bucket, or a folder.

    In Python: `plateaux.push("bundle", "hf://user/name")`
    """
    from plateaux.deploy.bundle import Bundle

    digest = Bundle.open(bundle).sha256
    with progress_bar("pushing", "files") as progress:
        address = plateaux.push(bundle, target, private=private, progress=progress)
    text = f"{bundle} is now at {address}, sha256 {digest}"
    print_result(as_json, {"address": address, "sha256": digest}, lambda: [text])


def pull(
    source: Annotated[str, typer.Argument(help="hf://user/name[@revision], a URL such as s3://..., or a folder.")],
    out: Annotated[str, typer.Option("--out", "-o", help="The folder to write to; it must be empty.")],
    member: Annotated[int | None, typer.Option(min=0, help="Fetch only the weights of this member.")] = None,
    sha256: Sha256 = None,
    as_json: AsJson = False,
) -> None:
    """Copy a bundle from the Hugging Face Hub, a bucket, or a folder, and check its digests.

    In Python: `plateaux.pull("hf://user/name", "bundle")`
    """
    from plateaux.deploy.bundle import Bundle

    with progress_bar("pulling", "files") as progress:
        files = plateaux.pull(source, out, member=member, sha256=sha256, progress=progress)
    digest = Bundle.open(out).sha256 if member is None else sha256
    count = f"{len(files)} file{'s' * (len(files) != 1)}"
    text = f"{out}: {count}, all digests are correct{f', sha256 {digest}' if digest else ''}"
    print_result(as_json, {"folder": out, "files": files, "sha256": digest}, lambda: [text])
