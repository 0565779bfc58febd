"""Builds the site: `python -m docs.site.build [FOLDER]`. A warning of MkDocs is an error. 6 s of CPU time."""

import logging
import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SITE = ROOT / "proxy" / "ui" / "manual"
"""Where the proxy serves the site from; git ignores it."""


def build_site(folder: Path = SITE) -> None:
    """Write the site into a folder, which is emptied first.

    Raises:
        mkdocs.exceptions.Abort: There was a warning.
    """
    # Loaded late: the import alone takes 0.3 s, and the theme prints a notice about other versions of MkDocs.
    os.environ.setdefault("NO_MKDOCS_2_WARNING", "true")
    from mkdocs.commands.build import build  # noqa: PLC0415
    from mkdocs.config import load_config  # noqa: PLC0415

    config = load_config(str(Path(__file__).with_name("mkdocs.yml")), site_dir=str(folder))
    config.plugins.run_event("startup", command="build", dirty=False)
    build(config)
    config.plugins.run_event("shutdown")


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    build_site(*(Path(argument).absolute() for argument in sys.argv[1:2]))
