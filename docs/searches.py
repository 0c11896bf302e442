"""What readers type into the search field of the built pages, and which page answers it.

`conf.py` makes each of them an index entry, since a search puts index entries first.
`check_pages.py` searches the built index.
"""

import json
import re
from pathlib import Path

# Words; the page that answers; the anchor of its section, or "" for the whole page.
SEARCHES = [
    ("rank 0 of 1", "troubleshooting", "every-rank-prints-rank-0-of-1"),
    ("mpirun as root", "installation", "as-root-or-on-few-cores"),
    ("attempt to run as root", "installation", "as-root-or-on-few-cores"),
    ("not enough slots available", "installation", "as-root-or-on-few-cores"),
    ("Fortran", "from-fortran", ""),
    ("deadlock", "debugging", "how-to-read-a-report"),
    ("hang", "debugging", "how-to-read-a-report"),
    ("tokens", "migrating", ""),
    ("ghost cells", "grids", ""),
    ("glossary", "glossary", ""),
    ("Slurm", "clusters", ""),
    ("bfloat16", "usage", ""),
]


def scores(index: dict, query: str) -> list[tuple[float, str]]:
    """Return the pages that the search of Sphinx 9 finds, best first, without objects' names."""
    from sphinx.search.en import SearchEnglish

    language = SearchEnglish({})
    words, pages = query.lower(), index["docnames"]
    found: dict[int, float] = {}

    def add(page: int, score: float) -> None:
        found[page] = max(score, found.get(page, 0))

    for titles, points in ((index["alltitles"], 15), (index["indexentries"], 100)):
        for title, places in titles.items():
            if words in title.lower() and 2 * len(words) >= len(title):
                for page, *_ in places:
                    add(page, round(points * len(words) / len(title)))
    kept = (w for w in re.split(r"\W+", words) if not w.isdigit() and w not in language.stopwords)
    terms = {language.stem(word) for word in kept}
    of_all: dict[int, list[int]] = {}
    for term in terms:
        of_term: dict[int, int] = {}
        for name, points in (("terms", 5), ("titleterms", 15)):
            pages_of = index[name].get(term, [])
            for page in [pages_of] if isinstance(pages_of, int) else pages_of:
                of_term[page] = points
        for page, points in of_term.items():
            of_all.setdefault(page, []).append(points)
    for page, points in of_all.items():
        if len(points) == len(terms):
            add(page, max(points))
    return sorted(((score, pages[page]) for page, score in found.items()), reverse=True)


def check(html: Path) -> list[str]:
    """Return which of SEARCHES do not find their page first, or not alone."""
    text = (html / "searchindex.js").read_text()
    index = json.loads(text.removeprefix("Search.setIndex(").removesuffix(")"))
    wrong = []
    for query, page, _ in SEARCHES:
        found = scores(index, query)
        first = [name for score, name in found if score == found[0][0]]
        if first != [page]:
            wrong.append(f"a search for {query!r} finds {first or 'nothing'} first, not {page}")
    return wrong
