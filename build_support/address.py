"""The public address of the project's repository, and what is made of it.

The repository has none yet. The one of the same name on GitHub belongs to an older package, so no
page, no error and no metadata names a code host. Once there is an address, set `REPOSITORY`: the
HTML pages, the links of `README.md` on PyPI and the package's metadata follow.
"""

import re

REPOSITORY: str | None = None


def absolute_links(text: str) -> str:
    """Return a page for PyPI, which shows no other file of the repository: relative links become
    absolute ones. Without an address, a link becomes its text. The film is left out."""
    text = re.sub(r"<img [^>]*>\n*", "", text)
    if REPOSITORY is None:
        text = re.sub(r"!\[[^]]*\]\((?!https?:)[^)]*\)\n*", "", text)
        return re.sub(r"\[([^]]*)\]\((?!https?:|#)[^)]*\)", r"\1", text)
    text = re.sub(r"!\[([^]]*)\]\((?!https?:)", rf"![\1]({REPOSITORY}/raw/main/", text)
    return re.sub(r"(?<!!)\[([^]]*)\]\((?!https?:|#)", rf"[\1]({REPOSITORY}/blob/main/", text)


def project_urls() -> dict[str, str]:
    """Return the addresses in the package's metadata."""
    if REPOSITORY is None:
        return {}
    return {
        "Documentation": f"{REPOSITORY}/blob/main/docs/index.md",
        "Source": REPOSITORY,
        "Changelog": f"{REPOSITORY}/blob/main/CHANGELOG.md",
        "Issues": f"{REPOSITORY}/issues",
    }
