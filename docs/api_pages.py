"""Writes the reference, a page for each family of functions, from signatures and docstrings.

`python docs/operations.py` calls `pages`. The pages are plain Markdown, so that the repository's
web view shows them completely. Each name has a heading, which other pages link to (`link`).
"""

import enum
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from mpi4py import MPI

from mpi4jax import ops
from mpi4jax._op.other_names import public_names
from mpi4jax._op.table import ROWS


class Section(NamedTuple):
    title: str
    module: str
    names: list[str]
    introduction: str = ""
    signatures_only: bool = False


class Page(NamedTuple):
    title: str
    introduction: str
    sections: list[Section]


OPERATIONS = [name for name in public_names(ops) if name in ROWS]
STARTS = [f"i{name}" for name in sorted([*OPERATIONS, "neighbor_allgather", "neighbor_alltoall"])]
ANY_SOURCE = "[Messages from any source and tag](usage.md#messages-from-any-source-and-tag)"

NEIGHBORS = ["halo_exchange", "halo_add", "neighbor_allgather", "neighbor_alltoall"]
MESSAGES = ["permute", "recv", "send", "sendrecv"]
COLLECTIVES = [name for name in OPERATIONS if name not in (*NEIGHBORS, *MESSAGES)]
ALIAS = "`mpi4jax` below is `mpi4jax.notoken`: `import mpi4jax.notoken as mpi4jax`."
SHAPES = (
    "Shapes refer to arrays; for a pytree, they hold for each leaf. `comm` is an mpi4py "
    "intracommunicator, `op` an `MPI.Op`, and `status` an `MPI.Status`. The "
    "[cheat sheet](cheat-sheet.md) shows all operations in one table."
)

PAGES: dict[str, Page] = {
    "reference-collectives": Page(
        "Reference: collectives",
        f"Operations in which all ranks of a communicator take part. {ALIAS} {SHAPES}",
        [Section("Collectives", "mpi4jax.notoken", COLLECTIVES)],
    ),
    "reference-messages": Page(
        "Reference: messages",
        f"Operations between pairs of ranks and between neighbors. {ALIAS} {SHAPES}",
        [
            Section("Messages", "mpi4jax.notoken", MESSAGES),
            Section(
                "Messages from any source and tag",
                "mpi4jax.notoken",
                ["recv_with_status", "sendrecv_with_status", "Received"],
                f"{ANY_SOURCE} has an example.",
            ),
            Section(
                "Neighbors",
                "mpi4jax.notoken",
                NEIGHBORS,
                "For communicators with a topology: `halo_exchange` and `halo_add` for Cartesian "
                "ones, the others for Cartesian and graph communicators. "
                "[Grids and ghost cells](grids.md) has examples.",
            ),
        ],
    ),
    "reference-nonblocking": Page(
        "Reference: nonblocking operations",
        f"{ALIAS} [Overlapping communication and computation](overlap.md) has examples.",
        [
            Section(
                "Waiting for nonblocking operations",
                "mpi4jax.notoken",
                ["wait", "waitall", "after", "Request"],
            ),
            Section(
                "Nonblocking operations",
                "mpi4jax.notoken",
                STARTS,
                "Each function initiates the operation of the same name without `i`, with the "
                "same arguments except for `status`, and returns a `Request` without waiting for "
                "the result. It raises the errors of the blocking operation.",
                signatures_only=True,
            ),
        ],
    ),
    "reference-values": Page(
        "Reference: replicated values, reductions, tokens",
        ALIAS,
        [
            Section(
                "Replicated values and reductions",
                "mpi4jax.notoken",
                ["pvary", "ipvary", "maxloc", "minloc", "assert_equal", "reproducible_sum", "MEAN"],
            ),
            Section(
                "Tokens",
                "mpi4jax",
                ["create_token", "auto_tokenize"],
                "After a plain `import mpi4jax`, each operation has one more argument: `token=` "
                "takes the token of another operation, or None. It returns a pair of the result "
                "and a new token; `send` and `barrier` return only the token. "
                "[Programs for mpi4jax 0.7 and older](migrating.md) need tokens, others do not. "
                "`gen_token` is another name of `create_token`, and `mpi4jax.experimental` has "
                "`auto_tokenize` and `notoken`.",
            ),
        ],
    ),
    "reference-sharding": Page(
        "Reference: shard_map and shardings",
        f"Functions for programs that are written for a mesh. {ALIAS}",
        [
            Section(
                "Functions written for `jax.shard_map`",
                "mpi4jax.notoken",
                ["shard_map", "Mesh"],
                "[Coming from `shard_map`](from-shard-map.md) has examples.",
            ),
            Section(
                "Global arrays and their shardings",
                "mpi4jax.notoken",
                [
                    "sharding.make_mesh", "sharding.NamedSharding", "sharding.cut", "sharding.join",
                    "sharding.make_array_from_callback", "sharding.device_put",
                    "sharding.with_sharding_constraint", "sharding.jit",
                    "sharding.global_shard_map",
                ],
                "`mpi4jax.sharding` is loaded when it is used. `global_shard_map` takes global "
                "arrays, and `mpi4jax.shard_map` takes blocks.",
            ),
        ],
    ),
    "reference-training": Page(
        "Reference: training",
        f"Functions for batches and sharded parameters of neural networks. {ALIAS}",
        [
            Section(
                "Training",
                "mpi4jax.notoken",
                [
                    "training.fsdp_specs", "training.unshard", "training.specs_for",
                    "training.global_norm", "training.clip_by_global_norm", "training.batches",
                ],
                "`mpi4jax.training` is loaded when it is used. [Training a network](training.md) "
                "has examples.",
            ),
        ],
    ),
    "reference-grids": Page(
        "Reference: grids and meshes",
        f"Blocks of grids with ghost cells, and ghost values by global index. {ALIAS}",
        [
            Section(
                "Blocks",
                "mpi4jax.notoken",
                [
                    "scatter_blocks", "gather_blocks",
                    "grids.Block", "grids.balanced", "grids.dirichlet", "grids.neumann",
                    "grids.overlapped", "grids.regions",
                ],
                "[Grids and ghost cells](grids.md) has examples. `halo_exchange` and `halo_add` "
                "are with the [messages](reference-messages.md#neighbors).",
            ),
            Section(
                "Ghost values by global index",
                "mpi4jax.notoken",
                ["ghosts.Plan"],
                "[Unstructured meshes](unstructured.md) has examples.",
            ),
        ],
    ),
    "reference-layouts": Page(
        "Reference: layouts and Fourier transforms",
        f"[Redistribution and FFTs](fft.md) has examples. {ALIAS}",
        [
            Section(
                "Layouts and redistribution",
                "mpi4jax.notoken",
                ["Layout", "redistribute", "migrate"],
            ),
            Section(
                "Fourier transforms",
                "mpi4jax.notoken",
                [
                    "fft.fftn", "fft.ifftn", "fft.rfftn", "fft.irfftn", "fft.spectral_layout",
                    "fft.frequencies",
                ],
            ),
            Section(
                "Cosine and sine transforms",
                "mpi4jax.notoken",
                ["fft.dctn", "fft.idctn", "fft.dstn", "fft.idstn"],
                "[Redistribution and FFTs](fft.md#walls) has examples.",
            ),
        ],
    ),
    "reference-solvers": Page(
        "Reference: linear solvers",
        f"[Linear solvers](solvers.md) has examples. {ALIAS}",
        [Section("Linear solvers", "mpi4jax.notoken", [])],  # all public names of the module
    ),
    "reference-files": Page(
        "Reference: checkpoints and output",
        f"[Checkpoints](checkpoints.md) has examples. {ALIAS}",
        [
            Section(
                "Checkpoints and output",
                "mpi4jax.notoken",
                [
                    "checkpoints.save", "checkpoints.load", "checkpoints.latest",
                    "checkpoints.AsyncCheckpointer", "output.append",
                ],
            ),
        ],
    ),
    "reference-jobs": Page(
        "Reference: jobs and tools",
        "What concerns the process and the job. [Environment variables](environment.md) has the "
        "settings.",
        [
            Section(
                "Running",
                "mpi4jax.notoken",
                ["flush", "time_limit", "default_comm", "transport_info", "TransportInfo"],
            ),
            Section(
                "Capabilities",
                "mpi4jax.notoken",
                ["has_cuda_support", "has_hip_support", "has_sycl_support"],
            ),
            Section("Commands", "", []),
        ],
    ),
}  # fmt: skip

COMMANDS = """\
`mpi4jax run -n 4 program.py` [starts a program](installation.md#as-root-or-on-few-cores) on ranks
of this host. `mpi4jax check program.py` names the lines of a program that
[ask JAX about the job](from-shard-map.md#programs-that-ask-jax-about-the-job). `mpi4jax check`,
`mpi4jax report` and `mpi4jax timeline` are the following programs.

`python -m mpi4jax` checks the installation, alone or under `mpiexec -n 2`: it prints versions, the
MPI library, the thread level and the transport, and tests some operations. `--report` prints what
an issue should contain.

`python -m mpi4jax.report` merges the last 256 operations of all ranks of your newest job on this
host, or of the job whose directory a [report](debugging.md) names, and says for each communicator
which rank diverged first.

`python -m mpi4jax.timeline FILES` merges the timelines that ranks wrote with `MPI4JAX_TRACE`,
prints what each rank and each source line sent, took and waited, and draws them with `--png`: see
[timelines](performance.md#timelines). `mpi4jax timeline` does the same where no MPI is installed.
"""

ROLE = re.compile(r":\w+:`~?(?:mpi4jax\.)?(?:notoken\.)?([\w.]+)`")
SECTION = re.compile(r"^(Args|Returns|Yields|Raises|Derivative|Example|Attributes|See also):(.*)$")


def slug(heading: str) -> str:
    """Return the anchor of a heading, as GitHub and MyST make it."""
    return re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-")


def found(module: str, name: str) -> Any:
    value: Any = importlib.import_module(module)
    for part in name.split("."):
        value = getattr(value, part)
    return value


def members(value: type) -> Iterator[str]:
    """Yield the public methods and properties that a class defines itself, in the order of the
    source."""
    for member, function in vars(value).items():
        kinds = (property, classmethod, staticmethod)
        documented = callable(function) or isinstance(function, kinds)
        if not member.startswith("_") and documented and inspect.getdoc(getattr(value, member)):
            yield member


def names_of(section: Section) -> list[str]:
    if section.title == "Linear solvers":
        module = importlib.import_module("mpi4jax.linalg")
        return [f"linalg.{name}" for name in sorted(module.__all__, key=str.lower)]
    return section.names


def places() -> dict[str, str]:
    """Return the place of the heading of each name of the reference."""
    made = {}
    for page, (_, _, sections) in PAGES.items():
        for section in sections:
            for name in names_of(section):
                anchor = slug(section.title if section.signatures_only else name)
                made[name] = f"{page}.md#{anchor}"
                value = found(section.module, name)
                if isinstance(value, type) and value.__name__ == name.rpartition(".")[2]:
                    for full in (f"{name}.{member}" for member in members(value)):
                        made[full] = f"{page}.md#{slug(full)}"
    return made


def link(name: str) -> str:
    """Return a name as a link into the reference, or as code if the reference does not have it."""
    known = places()
    place = known.get(name) or known.get(name.rpartition(".")[2])
    longer = [full for full in known if full.endswith(f".{name}")]
    place = place or (known[min(longer, key=lambda full: full.count("."))] if longer else None)
    return f"[`{name}`]({place})" if place else f"`{name}`"


def default(p: inspect.Parameter) -> str:
    """Return a default value as a program would write it."""
    if p.name in ("source", "tag", "recvtag") and p.default == MPI.ANY_TAG:
        return "MPI.ANY_SOURCE" if p.name == "source" else "MPI.ANY_TAG"
    return "MPI.SUM" if isinstance(p.default, MPI.Op) else repr(p.default)


def signature(function: Callable[..., Any], name: str) -> str:
    """Return a call with defaults, without types: the docstring says more than those."""
    if isinstance(function, type) and issubclass(function, enum.Enum):
        return name  # how its class is called depends on the version of Python
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:
        return name
    parts, kinds = [], [p.kind for p in parameters]
    for i, p in enumerate(parameters):
        if p.name in ("self", "cls"):
            continue
        if p.kind == p.KEYWORD_ONLY and not {p.KEYWORD_ONLY, p.VAR_POSITIONAL} & {*kinds[:i]}:
            parts.append("*")
        star = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        value = "" if p.default is p.empty else f"={default(p)}"
        parts.append(f"{star}{p.name}{value}")
        if p.kind == p.POSITIONAL_ONLY and kinds[i + 1 :][:1] != [p.POSITIONAL_ONLY]:
            parts.append("/")
    line = f"{name}({', '.join(parts)})"
    if len(line) <= 88:
        return line
    lines, current = [], "   "
    for part in parts:
        if len(current) + len(part) > 84:
            lines.append(current)
            current = "   "
        current += f" {part},"
    return f"{name}(\n" + "\n".join([*lines, current]) + "\n)"


def markdown(text: str) -> str:
    """Return a paragraph of a docstring: one line, with names as links."""
    text = " ".join(text.split())
    text = ROLE.sub(lambda m: link(m[1]), text)
    return text.replace("``", "`").replace("<https", "<https")


def entries(lines: list[str]) -> list[str]:
    """Return the entries of an `Args` or `Raises` section: each begins at the least indentation."""
    made: list[str] = []
    for line in lines:
        if line.strip() and not line.startswith(" "):
            made.append(line)
        elif line.strip() and made:
            made[-1] += "\n" + line
    return made


def entry(text: str) -> str:
    name, _, rest = text.partition(":")
    if rest and re.fullmatch(r"[\w*`., ]+", name) and len(name) < 60:
        parts = " ".join(f"`{part.strip('`')}`," for part in re.split(", ?", name)).rstrip(",")
        return f"- {parts}: {markdown(rest)}"
    return f"- {markdown(text)}"


def paragraphs(lines: list[str]) -> str:
    """Text, with its lists as lists and its code as code."""
    made = []
    for part in re.split(r"\n\s*\n", "\n".join(lines).strip("\n")):
        rows = part.split("\n")
        if all(row.startswith("    ") for row in rows if row.strip()):
            made.append("```text\n" + inspect.cleandoc(part) + "\n```")
        elif re.match(r"\s*- ", rows[0]) or any(re.match(r"- ", row) for row in rows):
            items = re.split(r"^\s*- ", part, flags=re.M)
            head = [markdown(items[0])] if items[0].strip() else []
            made.append("\n\n".join([*head, "\n".join(f"- {markdown(i)}" for i in items[1:])]))
        elif part.strip():
            text = markdown(part)
            made.append(text[:-1] if text.endswith("::") else text)
    return "\n\n".join(made)


def described(doc: str) -> str:
    """Return a docstring of Google's style as Markdown."""
    body: dict[str, list[str]] = {"": []}
    current = ""
    for line in doc.split("\n"):
        if match := SECTION.match(line):
            current = match[1]
            body[current] = [match[2].strip()] if match[2].strip() else []
        elif current and line and not line.startswith(" ") and current != "See also":
            current = ""  # text after a section
            body[""] += ["", line]
        else:
            body[current].append(line)
    made = [paragraphs(body.pop(""))]
    for name, lines in body.items():
        lines = textwrap.dedent("\n".join(lines)).strip("\n").split("\n")
        if name in ("Args", "Raises", "Attributes"):
            title = {"Args": "Arguments"}.get(name, name)
            items = [entry(e) for e in entries(lines)]
            made.append(f"**{title}**\n\n" + "\n".join(items))
        elif name == "Example":
            made.append("**Example**\n\n```pycon\n" + "\n".join(lines).rstrip() + "\n```")
        else:
            made.append(f"**{name}**: {paragraphs(lines)}")
    return "\n\n".join(part for part in made if part)


def one(module: str, name: str, level: str = "###") -> Iterator[str]:
    value = found(module, name)
    yield f"{level} {name}"
    if isinstance(value, type) or callable(value):
        yield f"```py\n{signature(value, name)}\n```"
    if isinstance(value, type) and value.__name__ != name.rpartition(".")[2]:
        yield f"Another name of {link(value.__name__)}."
        return
    yield described(inspect.getdoc(value) or "")
    if isinstance(value, type):
        for member in members(value):
            yield from method(value, name, member)


def method(value: type, name: str, member: str) -> Iterator[str]:
    function = inspect.getattr_static(value, member)
    full = f"{name}.{member}"
    yield f"#### {full}"
    if isinstance(function, property):
        yield f"Property: {described(inspect.getdoc(function) or '')}"
        return
    yield f"```py\n{signature(getattr(value, member), full)}\n```"
    yield described(inspect.getdoc(getattr(value, member)) or "")


def pages() -> dict[str, str]:
    """Return the text of each page of the reference."""
    made = {}
    for page, (title, introduction, sections) in PAGES.items():
        parts = ["<!-- Written by docs/operations.py from the docstrings: do not edit. -->"]
        parts += [f"# {title}", introduction]
        for section in sections:
            parts.append(f"## {section.title}")
            if section.introduction:
                parts.append(section.introduction)
            if section.title == "Commands":
                parts.append(COMMANDS.strip())
                continue
            names = names_of(section)
            if section.signatures_only:
                calls = [signature(found(section.module, name), name) for name in names]
                parts.append("```py\n" + "\n".join(calls) + "\n```")
                continue
            if len(names) > 3:
                parts.append(" · ".join(f"[`{name}`](#{slug(name)})" for name in names))
            for name in names:
                parts += one(section.module, name)
        made[page] = "\n\n".join(parts) + "\n"
    return made
